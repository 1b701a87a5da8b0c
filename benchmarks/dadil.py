"""One local step of FedDaDiL next to the transport problems in it, and its memory.

Run from the repository root: python benchmarks/dadil.py [--out benchmarks/dadil.json]

A step of a client as `FedDaDiL` takes it: a batch of n_b samples and of n_b points of each of K = 3 atoms, the
fixed-point iterations of their barycenter, the transport of the batch to it, the backward pass, and Adam on atoms,
labels and coordinates. Features are of length d = 1280 (EfficientNet) and 2048 (ResNet-50), of 10 classes around random
centres; one client has labels, the target has none. float32 atoms, one thread.

The step's transport problems are recorded and solved once more by themselves: "solves" is `transport_plan` (POT's exact
solver) for each of their cost matrices, "cost matrices" is `joint_cost` on samples of the same shapes for each of them.
Asked: a step takes at most 1.3 times these two together. CPU seconds (time.process_time), medians of actions that take
turns. Memory is the peak of a fresh process in a step above what it holds with atoms, gradients and moments in place.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

# before torch is imported: CPU time sums over threads
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Adam

from fedlit.functional import barycenter, joint_cost, transport_plan, wasserstein
from fedlit.methods import FedDaDiL
from fedlit.models import Features
from measures import medians, peak

ATOMS, CLASSES, SAMPLES = 3, 10, 200
WIDTHS = (1280, 2048)


class Step:
    """A step of one client, again and again on the same batch.

    Args:
        width: Number d of features.
        samples: Number n_b of samples and of an atom's points.
        client: ``"source"`` or ``"target"``.
    """

    def __init__(self, width: int, samples: int, client: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.module = FedDaDiL(
            ["source", "target"], "target", CLASSES, Features(width), num_atoms=ATOMS, atom_size=samples,
            optimizer=lambda params: Adam(params, fused=True),
        )  # fmt: skip
        self.module.configure_model()
        self.module.federation.round_idx = 1
        self.client = next(each for each in self.module.clients if each.name == client)
        centres = torch.randn(CLASSES, width, generator=generator)

        def drawn(shift: float) -> tuple[Tensor, Tensor]:
            labels = torch.arange(samples) % CLASSES
            noise = 0.7 * torch.randn(samples, width, generator=generator)
            return F.normalize(centres[labels] + shift * centres.roll(1, 0)[labels] + noise, dim=1), labels

        dictionary = self.module.replicas[self.client].dictionary
        with torch.no_grad():
            for atom in range(ATOMS):
                dictionary.points[atom] = drawn(0.2 * atom)[0]
        self.batch = drawn(0.3)
        self.optimizer = self.module.make_optimizer()

    def __call__(self) -> None:
        """Take it."""
        loss = self.module.loss(self.client, self.batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def problems(self) -> list[tuple[Any, ...]]:
        """What a step asks `transport_plan` for: cost matrices, and whatever comes with them."""
        asked: list[tuple[Any, ...]] = []

        def recorded(cost: Tensor, *more: Any) -> Tensor:
            asked.append((cost.detach().clone(), *more))
            return transport_plan(cost, *more)

        wasserstein.transport_plan = barycenter.transport_plan = recorded
        try:
            self()
        finally:
            wasserstein.transport_plan = barycenter.transport_plan = transport_plan
        return asked


def row(width: int, client: str, repeats: int) -> dict[str, Any]:
    """Times of one case, and their ratio."""
    step = Step(width, SAMPLES, client)
    for _ in range(3):
        step()
    asked = step.problems()
    dictionary = step.module.replicas[step.client].dictionary
    points, labels = dictionary.points.detach(), dictionary.labels.detach()
    x, y = points[0].clone(), labels[0].clone()

    def matrices() -> None:
        for place in range(len(asked) - 1):
            joint_cost(points[place % ATOMS], x, labels[place % ATOMS], y)
        joint_cost(step.batch[0], x, *(() if client == "target" else (y, y)))

    taken = medians(
        {"step": step, "solves": lambda: [transport_plan(*each) for each in asked], "cost_matrices": matrices}, repeats
    )
    problems = taken["solves"] + taken["cost_matrices"]
    return {
        "d": width, "client": client, "transport_problems": len(asked),
        **{f"{name}_ms": round(1000 * value, 2) for name, value in taken.items()},
        "step_per_problems": round(taken["step"] / problems, 3),
        "memory_mib": round(memory(width, client), 1),
    }  # fmt: skip


def peak_of(width: int, client: str) -> float:
    """MiB of a step beyond what is there before it."""
    small = Step(8, 20, client)
    small()  # what libraries allocate on their first call
    step = Step(width, SAMPLES, client)
    step()  # gradients and moments
    return peak(step)


def memory(width: int, client: str) -> float:
    """`peak_of` in a fresh process."""
    command = [sys.executable, str(Path(__file__)), "--peak-of", str(width), client]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    """Run all cases, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--peak-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak_of is not None:
        print(peak_of(int(options.peak_of[0]), options.peak_of[1]))
        return
    print("   d  client  problems  step (ms)  solves (ms)  cost matrices (ms)  step / both  memory (MiB)")
    rows = []
    for width in WIDTHS:
        for client in ("source", "target"):
            rows.append(row(width, client, options.repeats))
            print(
                "{d:4}  {client:6}  {transport_problems:8}  {step_ms:9.1f}  {solves_ms:11.1f}  {cost_matrices_ms:18.1f}"
                "  {step_per_problems:11.2f}  {memory_mib:12.1f}".format(**rows[-1]),
                flush=True,
            )
    atoms = {str(width): round(ATOMS * SAMPLES * (width + CLASSES) * 4 / 2**20, 1) for width in WIDTHS}
    print(f"the atoms themselves, MiB: {atoms}")
    result = {
        "asked": {"step_per_problems": 1.3}, "rows": rows, "atoms_mib": atoms, "n_b": SAMPLES, "K": ATOMS,
        "classes": CLASSES, "dtype": "float32", "seed": 0, "repeats": options.repeats, "threads": 1,
        "cores": os.cpu_count(), "load_average": os.getloadavg()[0], "time": "CPU seconds, medians",
        "command": "python benchmarks/dadil.py",
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "POT": version("POT"),
        },
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
