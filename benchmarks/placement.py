"""The same run on 1, 2 and K+1 processes, under torchrun, around a server, and interrupted: are all equal bit by bit?

Run from the repository root: python benchmarks/placement.py [--out benchmarks/placement.json]

FedProx on the four hospitals of the heart disease data (K = 3 sources, va_long_beach as the target), six rounds, one
thread per process. Each line is one run of the ``fedlit`` command: sha256 of the target's weights and of the ledger.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning
import torch

RUN = [
    "fit", "--config", "data/heart_disease", "--config", "methods/fedprox",
    "--trainer.strategy", '{"class_path": "fedlit.FederatedStrategy", "init_args": {"num_threads": 1, "participation": '
    '{"class_path": "fedlit.federation.Fraction", "init_args": {"p": 0.67}}}}',
]  # fmt: skip
SITES = ["cleveland", "hungary", "switzerland", "va_long_beach"]


def run(folder: Path, rounds: int, devices: int = 1, torchrun: bool = False, resume: Path | None = None) -> Path:
    """Train, and return the folder with the ledger, the summary and the checkpoint."""
    command = [str(Path(sys.executable).with_name("fedlit"))]
    if torchrun:
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={devices}"]
        command = [*launcher, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", *command]
    arguments = [*RUN, f"--trainer.max_epochs={rounds}", f"--trainer.default_root_dir={folder}"]
    arguments += [] if torchrun else [f"--trainer.devices={devices}"]
    arguments += [] if resume is None else [f"--ckpt_path={resume}"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return folder / "FedProx" / "version_0"


def around_a_server(folder: Path, rounds: int) -> Path:
    """The same by ``fedlit serve`` and a ``fedlit join`` for each client, with TLS; the folder of the target's site."""
    fedlit = str(Path(sys.executable).with_name("fedlit"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    make = [fedlit, "certificates", "--sites", ",".join(SITES), "--server", "localhost", "--out", str(folder)]
    subprocess.run(make, check=True, capture_output=True)
    processes = []
    for name in ("server", *SITES):
        files = [f"--seat.{key}={folder / file}" for key, file in
                 (("certificate", f"{name}.crt"), ("key", f"{name}.key"), ("ca", "ca.crt"))]  # fmt: skip
        place = [f"--seat.server=localhost:{port}"]
        if name == "server":
            place = [f"--seat.address=127.0.0.1:{port}", f"--seat.sites={json.dumps(SITES)}"]
        arguments = [*RUN[1:], f"--trainer.max_epochs={rounds}", f"--trainer.default_root_dir={folder / name}"]
        command = [fedlit, "serve" if name == "server" else "join", *arguments, *place, *files]
        with (folder / f"{name}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    if any([process.wait(300) for process in processes]):
        sys.exit("".join((folder / f"{name}.log").read_text() for name in ("server", *SITES)))
    return folder / SITES[-1] / "FedProx" / "version_0"


def checkpoint(folder: Path) -> Path:
    """The one checkpoint of a run."""
    (path,) = (folder / "checkpoints").glob("*.ckpt")
    return path


def main() -> None:
    """Run all placements, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        half = checkpoint(run(root / "half", 3))
        half_of_three = checkpoint(run(root / "half of 3", 3, devices=3))
        runs = {
            "1 process": run(root / "1", 6),
            "2 processes": run(root / "2", 6, devices=2),
            "4 = K+1 processes": run(root / "4", 6, devices=4),
            "torchrun, 2 processes": run(root / "torchrun", 6, devices=2, torchrun=True),
            "a server and 4 sites": around_a_server(root / "star", 6),
            "3 rounds + resume 3": run(root / "resumed", 6, resume=half),
            "3 rounds + resume 3 on 3 processes": run(root / "resumed on 3", 6, devices=3, resume=half),
            "3 rounds on 3 processes + resume 3 on 1": run(root / "resumed on 1", 6, resume=half_of_three),
        }
        rows = {}
        for name, place in runs.items():
            ledger = hashlib.sha256((place / "ledger.csv").read_bytes()).hexdigest()
            summary = json.loads((place / "summary.json").read_text())
            rows[name] = {"target_sha256": summary["target_sha256"], "ledger_sha256": ledger}
            print(f"{name:42} target {summary['target_sha256'][:16]}  ledger {ledger[:16]}", flush=True)
    equal = len({tuple(row.values()) for row in rows.values()}) == 1
    print("all equal" if equal else "NOT EQUAL")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "lightning": lightning.__version__}
    result = {"rows": rows, "all_equal": equal, "seed": 0, "threads": 1, "cores": os.cpu_count(), "versions": versions}
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
