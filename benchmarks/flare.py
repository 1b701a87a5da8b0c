"""NVIDIA FLARE beside one process, gloo and gRPC: equal models, seconds, and what is killed or ended.

Run from the repository root, with the extra nvflare: python benchmarks/flare.py [--only equal|faults]

Four hospitals at three sites; masked sums. "equal": FedAvg, FedMMD and FedDaDiL in one process, in three over gloo,
with server and sites over gRPC, in FLARE's simulator and in its proof-of-concept mode (server, sites and an
administrator, provisioned, with mutual TLS): whether the target's model is that of one process to the last bit, seconds
of the run at the target's site for each round, and seconds of the whole command or job beyond those of the run.
"faults", in proof-of-concept mode: the process of a site that trains is killed; then all processes of a site are, and
the administrator aborts the job.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measures import environment

ROUNDS = 20
SITES = {"north": ["cleveland", "hungary"], "south": ["switzerland"], "west": ["va_long_beach"]}
AT = ",".join(f"{site}:{'+'.join(clients)}" for site, clients in SITES.items())
EXPERIMENT = """
data: {class_path: fedlit.data.HeartDisease, init_args: {target: va_long_beach}}
model:
  class_path: fedlit.methods.FedAvg
  init_args: {extractor: {class_path: fedlit.models.MLP, init_args: {in_features: 38, hidden: [32]}}}
trainer:
  accelerator: cpu
  check_val_every_n_epoch: 1000
  strategy:
    class_path: fedlit.FederatedStrategy
    init_args: {local_steps: 10, num_threads: 1, privacy: PairwiseMasking}
"""
METHODS: dict[str, list[str]] = {
    "FedAvg": [],
    "FedMMD": ["--model=FedMMD", "--model.warmup_rounds=0.5"],
    "FedDaDiL": ["--model=FedDaDiL", "--model.warmup_rounds=0.5", "--model.atom_size=40"],
}
Way = Callable[[Path, list[str]], Path]
"""Runs an experiment of these words in a folder, and says where the target's run is."""

BIN = Path(sys.executable).parent
FEDLIT = [sys.executable, "-m", "fedlit.cli"]


def called(command: list[str], **kwargs: Any) -> str:
    """What a command says, which must not fail."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout + done.stderr


def summary(folder: Path) -> dict[str, Any]:
    """Of the one run in a folder."""
    (file,) = folder.rglob("summary.json")
    told: dict[str, Any] = json.loads(file.read_text())
    return told


# ---------------------------------------------------------------- ways to run


def one_process(folder: Path, words: list[str]) -> Path:
    """``fedlit fit``."""
    called([*FEDLIT, "fit", *words, f"--trainer.default_root_dir={folder}"])
    return folder


def over_gloo(folder: Path, words: list[str]) -> Path:
    """``torchrun`` with three processes."""
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=3",
        "--master_port=29741",
        "-m",
        "fedlit.cli",
        "fit",
        *words,
    ]
    called([*run, "--trainer.devices=3", f"--trainer.default_root_dir={folder}"])
    return folder


def over_grpc(folder: Path, words: list[str]) -> Path:
    """``fedlit serve`` and ``fedlit join``."""
    keys = folder / "keys"
    called([*FEDLIT, "certificates", "--sites", ",".join(SITES), "--server", "localhost", "--out", str(keys)])
    commands = []
    for name in ("server", *SITES):
        seat: dict[str, Any] = {
            "certificate": str(keys / f"{name}.crt"),
            "key": str(keys / f"{name}.key"),
            "ca": str(keys / "ca.crt"),
        }
        seat |= {"address": "127.0.0.1:18743", "sites": SITES} if name == "server" else {"server": "localhost:18743"}
        file = folder / f"{name}.yaml"
        file.write_text(json.dumps({"seat": seat}))
        word = "serve" if name == "server" else "join"
        commands.append([*FEDLIT, word, *words, f"--config={file}", f"--trainer.default_root_dir={folder / name}"])
    processes = [subprocess.Popen(each, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for each in commands]
    if any(process.wait() for process in processes):
        raise RuntimeError("a seat failed")
    return folder / "west"


def write_job(folder: Path, words: list[str]) -> Path:
    """``fedlit flare``."""
    called([*FEDLIT, "flare", *words, "--sites", AT, "--out", str(folder / "job")])
    return folder / "job"


def in_simulator(folder: Path, words: list[str]) -> Path:
    """FLARE's simulator."""
    job, place = write_job(folder, words), folder / "simulator"
    allow(place)
    names = ",".join(SITES)
    called([str(BIN / "nvflare"), "simulator", str(job), "-w", str(place), "-c", names, "-t", "3"], cwd=folder)
    return place / "west"


def allow(party: Path) -> None:
    """Let jobs name fedlit's classes at a party."""
    local = party / "local"
    local.mkdir(parents=True, exist_ok=True)
    file, default = local / "resources.json", local / "resources.json.default"
    told = json.loads(default.read_text()) if default.is_file() else {"format_version": 2, "class_allow_list": []}
    told["class_allow_list"].append("fedlit.flare")
    file.write_text(json.dumps(told))


class ProofOfConcept:
    """FLARE's server, three sites and an administrator on this machine, as ``nvflare poc`` provisions them.

    Args:
        folder: A new one.
    """

    def __init__(self, folder: Path) -> None:
        self.environment = {**os.environ, "NVFLARE_POC_WORKSPACE": str(folder)}
        self.parties = folder / "example_project" / "prod_00"
        self.flare("poc", "prepare", "-c", *SITES)
        for name in ("server", *SITES):
            allow(self.parties / name)
        self.flare("poc", "start")

    def flare(self, *words: str) -> str:
        """What ``nvflare`` says."""
        kit = ["--startup-kit", str(self.parties / "admin@nvidia.com")] if words[0] == "job" else []
        return called([str(BIN / "nvflare"), *words, *kit], env=self.environment, input="y\n")

    def submit(self, job: Path) -> str:
        """The name of a job, once it is submitted."""
        told = self.flare("job", "submit", "-j", str(job))
        return next(line.split()[-1] for line in told.splitlines() if line.startswith("job_id:"))

    def state(self, job: str) -> str:
        """What FLARE says of a job."""
        line = next(line for line in self.flare("job", "list").splitlines() if line.startswith(job))
        return line.split()[2]

    def run(self, job: Path) -> Path:
        """Run a job to its end, and no other before; the folder of the target's site."""
        for party in ("server", *SITES):
            shutil.rmtree(self.parties / party / "fedlit-runs", ignore_errors=True)
        name = self.submit(job)
        while not (state := self.state(name)).startswith("FINISHED"):
            time.sleep(0.5)
        if state != "FINISHED:COMPLETED":
            raise RuntimeError(f"the job ended as {state}")
        return self.parties / "west"

    def stop(self) -> None:
        """End all: what starts processes again first."""
        for words in (("sub_start.sh", str(self.parties)), (str(self.parties),)):
            for process in pids(*words):
                os.kill(process, signal.SIGKILL)


# ---------------------------------------------------------------- what is measured


def measure_equal(folder: Path) -> list[dict[str, Any]]:
    """A row for each way and method."""
    ways: dict[str, Way] = {
        "one process": one_process,
        "three processes over gloo": over_gloo,
        "server and three sites over gRPC": over_grpc,
        "FLARE, simulator": in_simulator,
    }
    rows: list[dict[str, Any]] = []
    for way, run in ways.items():
        rows += measured(folder, way, run, rows)
    poc = ProofOfConcept(folder / "poc")  # after the simulator, which does not run beside it
    try:
        rows += measured(folder, "FLARE, proof of concept", lambda place, words: poc.run(write_job(place, words)), rows)
    finally:
        poc.stop()
    return rows


def measured(folder: Path, way: str, run: Way, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method, run one way."""
    rows = []
    for method, own in METHODS.items():
        place = folder / re.sub(r"\W+", "-", f"{method} {way}")  # FLARE's simulator takes no space in a path
        place.mkdir()
        begun = time.time()
        told = summary(run(place, words_of(folder, [*own, f"--trainer.max_epochs={ROUNDS}"])))
        wall, seconds = time.time() - begun, told["seconds_total"]
        model = told["target_sha256"]
        first = next((row["target_sha256"] for row in before if row["method"] == method), model)
        times = {"round_s": seconds / ROUNDS, "other_s": wall - seconds}
        rows.append({"method": method, "way": way, "target_sha256": model, "equal": model == first, **times})
        print(
            f"{method:8} {way:34} equal {model == first!s:5} {1000 * times['round_s']:7.1f} ms a round, "
            f"{times['other_s']:5.1f} s besides",
            flush=True,
        )
    return rows


def words_of(folder: Path, more: list[str]) -> list[str]:
    """Arguments of the experiment."""
    file = folder / "experiment.yaml"
    file.write_text(EXPERIMENT)
    return [f"--config={file}", *more]


def measure_faults(folder: Path) -> dict[str, Any]:
    """What is killed, and what comes of it."""
    poc = ProofOfConcept(folder / "faulty")
    found: dict[str, Any] = {}
    place = folder / "faults"
    place.mkdir()
    plain = "--trainer.strategy.init_args.privacy=Plain"  # of three masked clients none may be lost within a sum
    often = "--trainer.check_val_every_n_epoch=1"  # a checkpoint is written after each validation
    job = write_job(place, words_of(folder, [plain, often, "--trainer.max_epochs=100000"]))
    try:
        name = poc.submit(job)
        wait_until(lambda: newest(poc, "south") > 5)
        (process,) = pids("fedlit.cli flare site", f"{poc.parties}/south/")
        os.kill(process, signal.SIGKILL)
        killed = newest(poc, "north")
        wait_until(lambda: newest(poc, "south") > killed)
        found["killed_process"] = {"round": killed, "back_by_round": newest(poc, "south"), "state": poc.state(name)}
        print("a site's process is killed:", found["killed_process"], flush=True)
        for process in pids("", f"{poc.parties}/south"):
            os.kill(process, signal.SIGKILL)
        begun, stood = time.time(), newest(poc, "north")
        wait_until(lambda: newest(poc, "north") > stood + 3)
        found["killed_site"] = {"others_go_on_after_s": round(time.time() - begun, 1), "state": poc.state(name)}
        print("all of a site is killed:", found["killed_site"], flush=True)
        poc.flare("job", "abort", name, "--force")
        wait_until(lambda: poc.state(name).startswith("FINISHED"))
        wait_until(lambda: not pids("fedlit.cli flare site", str(poc.parties)))
        found["aborted"] = {
            "state": poc.state(name),
            "newest_checkpoint": {site: newest(poc, site) for site in ("server", *SITES)},
        }
        print("the job is aborted:", found["aborted"], flush=True)
    finally:
        poc.stop()
    return found


def newest(poc: ProofOfConcept, party: str) -> int:
    """Round of a party's newest checkpoint; -1 if it has none."""
    names = [file.name for file in (poc.parties / party / "fedlit-runs").rglob("*.ckpt")]
    return max((int(name.partition("epoch=")[2].partition("-")[0]) for name in names), default=-1)


def pids(*words: str) -> list[int]:
    """Processes whose command line has all these words."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if entry.name.isdigit() and int(entry.name) != os.getpid() and line and all(word in line for word in words):
            found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 180.0) -> None:
    """Wait for something that takes a while."""
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError("what should have happened did not")
        time.sleep(0.2)


def main() -> None:
    """Measure, print and write."""
    import nvflare

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--only", choices=("equal", "faults"))
    given = parser.parse_args()
    result: dict[str, Any] = json.loads(given.out.read_text()) if given.out.is_file() else {}
    result |= {"environment": {**environment(), "nvflare": nvflare.__version__}, "seed": 0, "rounds": ROUNDS}
    found = result.setdefault("results", {})
    with tempfile.TemporaryDirectory() as folder:
        if given.only != "faults":
            found["equal"] = measure_equal(Path(folder))
        if given.only != "equal":
            found["faults"] = measure_faults(Path(folder))
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
