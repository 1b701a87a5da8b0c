r"""Can FedMMD's pairwise exchange be solved for the moments that it encrypts, and what does hiding them cost?

Run from the repository root: python benchmarks/moments.py [--parts shipped paper accuracy] [--out ...]

The attack: two experiments of three rounds, the first of pre-training, on Office-Caltech features, target amazon,
seed 0, with keys of 3072 bits:

shipped   ``configs/experiments/office_caltech_fed_mmd_paillier.yaml`` as it is.
paper     The same with the paper's 4 features and degree 2, gradients at all samples: by ``reveal_moments=True``.

For each set of moments, those of one batch, what all receivers have learnt about it is put together: A, b and y. Told
are the rank of A, the numbers of y, how many bits they can have and how many the moments have (with sign, at their
size), and the worst error of the moments that least squares solve for, twice: the shortest solution, and the one next
to a receiver's own moments of that step, which an attacker would guess. "guess_error" is of this guess alone. MB are
of the exchanges of all pairs in a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fed_mmd_accuracy import row
from fedlit.cli import main as fedlit
from fedlit.federation import Federation
from fedlit.papers.experiments import Results
from fedlit.privacy import AffineGrid, PlainAffine

CONFIG = "experiments/office_caltech_fed_mmd_paillier"
NAMED = '{"moments": {"class_path": "fedlit.privacy.PaillierAffine", "init_args": {"reveal_moments": true}}}'
ARGUMENTS = {
    "shipped": [],
    "paper": [
        "--model.init_args.extractor.init_args.out_features=4",
        "--model.init_args.degree=2",
        f"--trainer.strategy.init_args.two_party={NAMED}",
    ],
}
ON_GRID = (
    '{"moments": {"class_path": "fedlit.privacy.PlainAffine", "init_args": '
    '{"grid": {"class_path": "fedlit.privacy.AffineGrid"}}}}'
)
SHORT = ["--seeds=[0]", "--targets=[amazon]", "--trainer.max_epochs=3", "--model.init_args.warmup_rounds=1"]
STEPS = 8
SOLVED = 1e-6
GRID = AffineGrid()

Case = dict[str, Any]


class Learnt:
    """What receivers have learnt about one set of moments."""

    def __init__(self, moments: Tensor) -> None:
        self.moments = (GRID.moments.encode(moments) / GRID.moments.scale).numpy()
        self.guess: NDArray[np.float64] | None = None
        self.parts: list[tuple[Tensor, Tensor]] = []

    def add(self, matrix: Tensor, offset: Tensor, y: Tensor, own: Tensor | None) -> None:
        """An exchange; A and b in the steps that entered it, as a receiver knows them."""
        exact = GRID.matrix.encode(matrix) / GRID.matrix.scale
        self.parts.append((exact, y - GRID.offset.encode(offset) / GRID.offset.scale))
        if own is not None:
            self.guess = own.numpy()

    def attacked(self) -> Case:
        """Figures of the attack."""
        matrix, y = (torch.cat([part[side] for part in self.parts]).numpy() for side in (0, 1))
        guess = np.zeros_like(self.moments) if self.guess is None else self.guess
        errors = [
            float(np.abs(start + np.linalg.lstsq(matrix, y - matrix @ start, rcond=None)[0] - self.moments).max())
            for start in (0 * guess, guess)
        ]
        steps = np.abs(self.moments) * GRID.moments.scale
        return {
            "moments": len(self.moments), "outputs": len(y), "rank": int(np.linalg.matrix_rank(matrix)),
            "bits_of_outputs": len(y) * GRID.output_bits(len(self.moments)),
            "bits_of_moments": round(float(np.log2(2 * steps + 1).sum())),
            "error": errors[0], "error_from_guess": errors[1], "guess_error": float(np.abs(guess - self.moments).max()),
        }  # fmt: skip


@contextmanager
def listening(learnt: dict[bytes, Learnt]) -> Iterator[None]:
    """Keep what every exchange of a run tells."""
    affine = Federation.affine

    def heard(self: Federation, channel: str, moments: Any, maps: Any, pairs: Any, num_outputs: Any) -> Any:
        outputs = affine(self, channel, moments, maps, pairs, num_outputs)
        for learner, by_holder in outputs.items():
            for holder, y in by_holder.items():
                known = learnt.setdefault(moments[holder].numpy().tobytes(), Learnt(moments[holder]))
                known.add(*(each.double() for each in maps[learner][holder]), y, moments.get(learner))
        return outputs

    with patch.object(Federation, "affine", heard):
        yield


def runs_of(*arguments: str) -> list[dict[str, Any]]:
    """Summaries of the runs of the shipped experiment with these arguments."""
    with tempfile.TemporaryDirectory() as folder:
        fedlit(["fit", "--config", CONFIG, *arguments, f"--trainer.default_root_dir={folder}"])
        return [json.loads(path.read_text()) for path in sorted(Path(folder).rglob("summary.json"))]


def attack(arguments: list[str]) -> Case:
    """Run an experiment and attack all moments of it."""
    learnt: dict[bytes, Learnt] = {}
    with listening(learnt):
        (summary,) = runs_of(*SHORT, *arguments)
    cases = [known.attacked() for known in learnt.values()]
    return {
        "MB_per_step": round(summary["bytes_by_channel"]["moments"] / STEPS / 1e6, 3),
        "sets_of_moments": len(cases),
        "moments": cases[0]["moments"],
        **{f"most_{name}": max(case[name] for case in cases) for name in ("outputs", "rank", "bits_of_outputs")},
        "least_bits_of_moments": min(case["bits_of_moments"] for case in cases),
        "solved": sum(min(case["error"], case["error_from_guess"]) < SOLVED for case in cases),
        **{
            name: {"least": min(found), "median": statistics.median(found), "largest": max(found)}
            for name in ("error", "error_from_guess", "guess_error")
            for found in [[case[name] for case in cases]]
        },
    }


def stand_in(*arguments: str, reveal_moments: bool = False) -> list[dict[str, Any]]:
    """Summaries of runs in which `PlainAffine` takes the place of Paillier, and grants as many numbers, or any."""
    with patch.object(PlainAffine, "reveal_moments", reveal_moments):
        return runs_of(f"--trainer.strategy.init_args.two_party={ON_GRID}", *arguments)


def accuracy() -> dict[str, Any]:
    """Rows of the table, and whether the stand-in computes what Paillier does."""
    short = [each(*SHORT)[0]["target_sha256"] for each in (runs_of, stand_in)]
    return {
        "as shipped": row(stand_in()),
        "gradients at all samples": row(stand_in(reveal_moments=True)),
        "no alignment": row(stand_in("--model.init_args.mmd_weight=0")),
        "same_bits": short[0] == short[1],
    }


def main() -> None:
    """Run the parts, print and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = [*ARGUMENTS, "accuracy"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    results = Results(options.out, "torch", "lightning", "phe", "gmpy2", solved_below=SOLVED)
    for part in options.parts:
        results.keep(accuracy() if part == "accuracy" else attack(ARGUMENTS[part]), part)
        print(json.dumps({part: results.found[part]}, indent=2), flush=True)


if __name__ == "__main__":
    main()
