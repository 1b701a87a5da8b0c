"""Fingerprints of every method's run: what a change that is to leave results as they were is compared by.

sha256 of the target's weights and of the ledger for each row of ``METHODS`` in the tests, with sums in the clear and
masked, with all clients in one process and with a process for each. Weights differ between machines in their last
bits: make the file of the commit before on the same machine, and give it to ``--against``.
"""

# ruff: noqa: E402  (the table of methods is one of the tests, which the lines below find)
from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import torch

from fedlit.federation import RosterError
from fedlit.privacy import PairwiseMasking
from helpers import STATEFUL, build, digits, trainer, weights
from method_table import METHODS

PRIVACY = {"plain": lambda: None, "masking": lambda: PairwiseMasking(colluders=0)}  # as two sources are few
ROUNDS = 3


def run(name: str, privacy: str) -> dict[str, str] | None:
    """Fingerprints of a run, from the process that hosts the target; ``None`` from the others.

    Args:
        name: Row of ``METHODS``.
        privacy: Key of `PRIVACY`.
    """
    method, arguments, options = METHODS[name]
    arguments = {key: value for key, value in arguments.items() if key != "penalty"}  # there to make tests short
    os.environ["PL_GLOBAL_SEED"] = "0"
    data = digits(batch_size=32, **options)
    module = build(
        method,
        data,
        **STATEFUL,
        **arguments,
    )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = {"privacy": PRIVACY[privacy]()}
    try:
        trainer(ROUNDS, gradient_clip_val=1.0, devices=processes, strategy=strategy).fit(module, data)
    except RosterError:  # a method that has nothing to say over a hidden channel
        return {"refused": "RosterError"}
    if not module.federation.is_local(module.target):
        return None
    found = hashlib.sha256()
    for key, tensor in sorted(weights(module, module.target.name).items()):
        found.update(key.encode() + tensor.cpu().contiguous().numpy().tobytes())
    booked = repr(sorted(module.federation.ledger)).encode()
    return {"weights": found.hexdigest(), "ledger": hashlib.sha256(booked).hexdigest()}


def all_runs(out: Path) -> None:
    """Write the fingerprints of all runs on these processes."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = {f"{name}, {privacy}": run(name, privacy) for name in METHODS for privacy in PRIVACY}
    if None not in found.values():
        out.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--against", type=Path, help="File of another commit, made on this machine.")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part is not None:
        all_runs(given.part)
        return
    results: dict[str, Any] = {}
    clean = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "WORLD_SIZE", "RANK")}
    for processes in (1, 3):
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder, "part.json")
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            command = [sys.executable, *launcher, str(Path(__file__).resolve()), "--part", str(part)]
            subprocess.run(command, check=True, env=clean | {"OMP_NUM_THREADS": "1"})
            results[f"{processes} process{'es' if processes > 1 else ''}"] = json.loads(part.read_text())
    one, many = results.values()
    differ = [name for name in one if one[name] != many[name]]
    print(f"{len(one)} runs, of which {len(one) - len(differ)} are equal in one process and three", *differ, sep="\n")
    if given.against is not None:
        before = json.loads(given.against.read_text())["results"]
        rows = [(place, name) for place in before for name in before[place]]
        changed = [row for row in rows if before[row[0]][row[1]] != results[row[0]].get(row[1])]
        print(f"{len(rows) - len(changed)} of {len(rows)} runs equal those of {given.against}", *changed, sep="\n")
    facts = {
        "command": "python benchmarks/fingerprints.py",
        "cores": os.cpu_count(), "threads": 1, "seed": 0, "rounds": ROUNDS,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "lightning")},
    }  # fmt: skip
    given.out.write_text(json.dumps(facts | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
