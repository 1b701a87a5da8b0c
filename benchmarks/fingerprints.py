"""Fingerprints of every method's run: what a change that is to leave results as they were is compared by.

sha256 of the target's weights and of the ledger, with all clients in one process and with a process for each. For each
row of ``METHODS`` in the tests: sums in the clear and masked; two rounds, a checkpoint, and the rest; a source that is
away in the third round and returns. For some rows: the encrypted backends, whose sums are exact. And LightningModules
that are wrapped. Weights differ between machines in their last bits: make the file of the commit before on the same
machine, and give it to ``--against``.
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
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import torch
import torch.distributed as dist

import own_modules
from fedlit import FederatedModule
from fedlit.federation import RosterError, Schedule
from fedlit.privacy import BFV, CKKS, Paillier, PairwiseMasking
from helpers import STATEFUL, build, digits, trainer, weights
from method_table import METHODS, ONE_PASS
from small_federation import Blobs

PRIVACY: dict[str, Any] = {
    "plain": lambda: None,
    "masking": lambda: PairwiseMasking(colluders=0),  # as two sources are few
    "paillier": lambda: Paillier(key_bits=512, insecure_test_keys=True),  # the keys' length changes no result
    "ckks": CKKS,
    "bfv": BFV,
}
ENCRYPTED = ("FedAvg", "FedGP", "FedMMD", "FedRFTCA")
"""Rows that every backend runs: weights, updates, moments within a step, and messages of both sides."""
RANDOM_SIZES = ("ckks", "bfv")
"""Backends whose ciphertexts are compressed, so that their lengths depend on the keys."""
ROUNDS = 3
EVERYBODY = ["clean", "blended", "fonts"]
AWAY = Schedule([EVERYBODY, EVERYBODY, ["clean", "fonts"], EVERYBODY])
"""In the first two rounds some methods warm up or begin."""


def cases() -> dict[str, Callable[[], FederatedModule]]:
    """All runs by name; each gives its module, trained."""
    found = {f"{name}, {privacy}": partial(row, name, privacy) for name in METHODS for privacy in ("plain", "masking")}
    found |= {f"{name}, {privacy}": partial(row, name, privacy) for name in ENCRYPTED for privacy in PRIVACY}
    several = [name for name in METHODS if name not in ONE_PASS]
    found |= {f"{name}, resumed": partial(resumed, name) for name in several}
    found |= {f"{name}, a source away": partial(row, name, "plain", ROUNDS + 1, participation=AWAY) for name in several}
    return found | {f"wrapped, {kind}": partial(wrapped, kind) for kind in own_modules.MODULES}


def row(
    name: str, privacy: str, rounds: int = ROUNDS, checkpoint: str | None = None, save: str | None = None, **given: Any
) -> FederatedModule:
    """A row of ``METHODS``, trained on digits."""
    method, arguments, options = METHODS[name]
    arguments = {key: value for key, value in arguments.items() if key != "penalty"}  # there to make tests short
    data = digits(batch_size=32, **options)
    module = build(method, data, **STATEFUL, **arguments)
    run = trainer(rounds, gradient_clip_val=1.0, devices=processes(), strategy={"privacy": PRIVACY[privacy](), **given})
    run.fit(module, data, ckpt_path=checkpoint)
    if save is not None:
        run.save_checkpoint(save)
    return module


def resumed(name: str) -> FederatedModule:
    """A row that was left before its last round, and went on from the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        path = [str(Path(folder, "left.ckpt"))]
        if processes() > 1:
            dist.broadcast_object_list(path)  # the first process's folder, for all of them
        row(name, "plain", ROUNDS - 1, save=path[0])
        return row(name, "plain", checkpoint=path[0])


def wrapped(kind: str) -> FederatedModule:
    """A LightningModule of one's own."""
    module = own_modules.build(kind)
    trainer(ROUNDS, devices=processes()).fit(module, Blobs())
    return module


def processes() -> int:
    """How many take part."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def fingerprint(name: str, case: Callable[[], FederatedModule]) -> dict[str, str] | None:
    """Of a run, from the process that hosts the target; ``None`` from the others."""
    os.environ["PL_GLOBAL_SEED"] = "0"
    try:
        module = case()
    except RosterError:  # of a method that needs single messages
        if not name.endswith(", masking"):
            raise
        return {"refused": "RosterError"}
    if not module.federation.is_local(module.target):
        return None
    found = hashlib.sha256()
    for key, tensor in sorted(weights(module, module.target.name).items()):
        found.update(key.encode() + tensor.cpu().contiguous().numpy().tobytes())
    entries = sorted(module.federation.ledger)
    if name.rpartition(", ")[2] in RANDOM_SIZES:
        entries = [replace(entry, num_bytes=0) for entry in entries]
    booked = repr(entries).encode()
    return {"weights": found.hexdigest(), "ledger": hashlib.sha256(booked).hexdigest()}


def all_runs(out: Path) -> None:
    """Write the fingerprints of all runs on these processes."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = {name: fingerprint(name, case) for name, case in cases().items()}
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
