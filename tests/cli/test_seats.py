"""``fedlit serve``, ``join`` and ``certificates``: refusals, and processes that are killed, frozen and restarted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
import torch

from commands import refusal
from fedlit.cli import seats
from fedlit.cli.arguments import normalise
from fedlit.cli.experiment import Experiment
from fedlit.cli.folders import STARTS
from fedlit.remote import LostClientsError
from read_page import Page

pytest.importorskip("grpc")

EXAMPLE = Path(__file__).parents[2] / "examples" / "three_hospitals"
SITES = ["cleveland", "hungary", "long_beach"]
RUN = ["--config", "data/digits", "--config", "methods/fedavg"]
SEATED = [
    *RUN,
    "--seeds=null",
    "--seat.address=localhost:1",
    *(f"--seat.{file}=x" for file in ("certificate", "key", "ca")),
]


@pytest.mark.parametrize(
    ("word", "arguments", "message"),
    [
        ("serve", [*RUN, "--seeds=null"], "serve needs a seat, and no configuration has one"),
        ("serve", [*RUN, "--seeds=null", "--seat.server=localhost:1"], "server is of fedlit join"),
        ("join", [*RUN, "--seeds=null", "--seat.server=localhost:1"], "seat of join needs certificate, key, ca"),
        ("serve", [*RUN, "--seeds=[0,1]", "--seat.address=localhost:1"], "serve is for one run, but this is 2"),
        ("serve", [*SEATED, "--seat.sites=[no, se]"], "seat: sites must have names in text, got False: YAML reads no"),
        ("serve", [*SEATED, "--seat.sites=[North, north]"], "seat: sites must be different names, but ['North', 'no"),
        ("certificates", ["--sites=a,a", "--server=localhost", "--out=made"], "a"),
        ("certificates", ["--sites=a", "--server=fed.example.org:8443", "--out=made"], "without a port"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(word, arguments, message):
    line = refusal(word, *arguments)
    assert line.startswith("fedlit: ")
    assert message in line
    assert not Path("made").exists()


def test_another_port_or_patience_is_the_same_run():
    places = {
        Experiment(normalise(["fit", *RUN, "--seeds=null", *more])).folder.path
        for more in ([], ["--seat.address=localhost:2", "--seat.patience=60"])
    }
    assert len(places) == 1
    assert Experiment(normalise(["fit", *RUN, "--seeds=null", "--trainer.max_epochs=7"])).folder.path not in places


def test_only_the_first_start_of_a_seat_is_fresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(STARTS, raising=False)
    started = []

    def start(self, number, place, checkpoint, seat):
        kept = place(Path("runs/FedAvg")) / "checkpoints" / "last.ckpt"
        kept.parent.mkdir(exist_ok=True)
        torch.save({"federation": {"round_idx": 1}}, kept)
        started.append((kept.parts[-3], checkpoint))

    monkeypatch.setattr(Experiment, "start", start)
    for starts in ("", "", "1.0"):  # the last is of one that has started itself again
        if starts:
            monkeypatch.setenv(STARTS, starts)
        Experiment(normalise(["fit", *RUN, "--seeds=null", "--fresh=true"])).train(
            0, SimpleNamespace(is_server=True, missing=()), None
        )
    assert [version for version, _ in started] == ["version_0", "version_1", "version_1"]
    assert [each for _, each in started] == [None, None, Path("runs/FedAvg/version_1/checkpoints/last.ckpt")]


@pytest.fixture
def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


DIES = """
import os, signal
from fedlit.privacy.masking import MaskingClient
before, calls = MaskingClient.protect, []
def counting(*args):
    calls.append(args)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return before(*args)
MaskingClient.protect = counting
from fedlit.cli import run
run()
"""
"""A program that dies before a client's fourth vector has left."""


class Federation:
    def __init__(self, folder: Path, port: int, *arguments: str) -> None:
        shutil.copytree(
            EXAMPLE, folder, ignore=shutil.ignore_patterns("sites", "certificates", "server", "__pycache__")
        )
        self.folder, self.port, self.arguments = folder, port, arguments
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.of_server: list[str] = []  # arguments of the server alone
        subprocess.run([sys.executable, "make_sites.py"], cwd=folder, check=True, capture_output=True)
        (folder / "server").mkdir(exist_ok=True)
        self._command(
            "certificates", "--sites", ",".join(SITES), "--server", "localhost", "--out", "certificates"
        ).wait()

    def _command(self, *words: str, place: str = ".", log: str = "log", program: str = "") -> subprocess.Popen[bytes]:
        python = ["-c", program] if program else ["-m", "fedlit.cli"]
        with open(self.folder / place / log, "ab") as to:
            return subprocess.Popen(
                [sys.executable, *python, *words],
                cwd=self.folder / place,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=to,
                stderr=to,
            )

    def start(self, *names: str, program: str = "") -> None:
        common = ["--config", str(self.folder / "experiment.yaml")]
        for name in names:
            own = ["--config", str(self.folder / f"{name}.yaml")]
            if name == "server":
                words, place = ["serve", *common, *own, f"--seat.address=127.0.0.1:{self.port}"], "server"
                words += self.of_server
            else:
                words, place = ["join", *common, *own, f"--seat.server=localhost:{self.port}"], f"sites/{name}"
            # the last one counts, and a file's seat is one as a whole
            self.processes[name] = self._command(
                *words, "--seat.patience=5", *self.arguments, place=place, program=program
            )

    def log(self, name: str) -> str:
        return (self.folder / ("server" if name == "server" else f"sites/{name}") / "log").read_text()

    def checkpoints(self, name: str) -> list[Path]:
        place = self.folder / ("server" if name == "server" else f"sites/{name}")
        return sorted(place.glob("runs/*/version_*/checkpoints/*.ckpt*"), key=lambda path: path.stat().st_mtime)

    def wait_for_checkpoint(self, name: str) -> None:
        ends = time.monotonic() + 120
        while not self.checkpoints(name):
            assert time.monotonic() < ends, self.log(name)
            assert self.processes[name].poll() is None, self.log(name)
            time.sleep(0.05)

    def finish(self) -> None:
        try:
            for name, process in self.processes.items():
                assert process.wait(500) == 0, f"{name}: {self.log(name)}"
        finally:
            for process in self.processes.values():
                process.kill()

    def weights(self, name: str, rounds: int) -> dict[str, Any]:
        """Of the checkpoint of a site after so many rounds."""
        path = self.checkpoints(name)[-1]
        kept = torch.load(path, weights_only=False)
        assert kept["epoch"] + 1 == rounds, path
        return dict(kept["clients"][name]["weights"])


ROUNDS = ("--trainer.max_epochs=20", "--model.init_args.warmup_rounds=2")


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again_ends_as_if_nothing_had_been(tmp_path, free_port):
    quiet = Federation(tmp_path / "quiet", free_port, *ROUNDS)
    quiet.start("server", *SITES)
    quiet.finish()
    struck = Federation(tmp_path / "struck", free_port, *ROUNDS)
    struck.start("server", *SITES)
    struck.wait_for_checkpoint("server")
    struck.processes["server"].kill()
    struck.processes["server"].wait()
    struck.start("server")
    struck.finish()
    assert "starts again" in struck.log("long_beach") or "again" in struck.log("server")
    for name in SITES:
        before, after = quiet.weights(name, 20), struck.weights(name, 20)
        assert before
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before), name


@pytest.mark.slow
def test_the_servers_page_shows_who_takes_part_and_no_clients_numbers(tmp_path: Path, free_port: int) -> None:
    often = ("--trainer.max_epochs=40", "--trainer.enable_progress_bar=true", "--model.init_args.warmup_rounds=2")
    run = Federation(tmp_path / "run", free_port, *often)
    run.of_server = ["--page=0", "--log=json"]
    run.start("server")
    ends, pages = time.monotonic() + 200, []
    while not any("40 of 40" in page or "takes part" in page for page in pages):
        assert time.monotonic() < ends, run.log("server")
        lines = [json.loads(line)["message"] for line in run.log("server").splitlines()]
        url = next((line.split()[-1] for line in lines if "runs are shown at" in line), None)
        if url is not None:
            pages.append(urlopen(url, timeout=30).read().decode())
            if len(pages) == 1:
                run.start(*SITES)
        time.sleep(0.5)
    assert dict(Page(pages[0]).tables[0][1:]) == dict.fromkeys(SITES, "has not come")
    while "FedGP/version_0" not in pages[-1]:
        assert time.monotonic() < ends, run.log("server")
        pages.append(urlopen(url, timeout=30).read().decode())
        time.sleep(0.2)
    sites, runs = Page(pages[-1]).tables[:2]
    assert [row[0] for row in sites[1:]] == SITES
    assert all(row[1].startswith("takes part") for row in sites[1:])
    assert runs[1][2].endswith(" of 40")
    drawn = pages[-1].partition("FedGP/version_0</h2>")[2]
    assert "training loss" in drawn
    assert not any(name in drawn for name in SITES), "means alone"
    run.finish()
    logged = [json.loads(line) for line in run.log("server").splitlines()]
    assert {each["round"] for each in logged if each["logger"] == "fedlit.rounds"} == {*range(1, 41)}
    assert any(each["message"] == "site hungary has come" for each in logged)


OF_ALL = ("--model=FedAvg", "--model.init_args.warmup_rounds=0", "--trainer.max_epochs=6", "--seat.wait_for=400")
"""Sums over all three."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    quiet = Federation(tmp_path_factory.mktemp("undisturbed") / "run", port, *OF_ALL)
    quiet.start("server", *SITES)
    quiet.finish()
    return quiet


@pytest.mark.slow
def test_a_masked_site_of_three_that_is_killed_within_a_sum_is_waited_for_and_the_round_repeated(
    undisturbed: Federation, tmp_path: Path, free_port: int
) -> None:
    struck = Federation(tmp_path / "struck", free_port, *OF_ALL)
    struck.start("server", "cleveland", "long_beach")
    struck.start("hungary", program=DIES)
    assert struck.processes["hungary"].wait(500) == -signal.SIGKILL, struck.log("hungary")
    time.sleep(8)  # its patience is over, and the others wait for it
    struck.start("hungary")
    struck.finish()
    assert "cannot be had without ['hungary']" in struck.log("server")
    assert "The server starts again" in struck.log("server")
    assert all("This site starts again" in struck.log(name) for name in ("cleveland", "long_beach"))
    assert "JournalError" not in "".join(map(struck.log, SITES))
    for name in SITES:
        before, after = undisturbed.weights(name, 6), struck.weights(name, 6)
        assert before
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before), name


@pytest.mark.parametrize("word", ["serve", "join"])
def test_a_seat_starts_again_where_a_sum_needs_sites_that_have_dropped_out_but_not_for_ever(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    def refuse(*_: Any) -> None:
        raise LostClientsError("not without ['south']")

    monkeypatch.setattr(seats, "_take", refuse)
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(sys, "argv", ["fedlit", word, "--config=x"])
    monkeypatch.setenv(STARTS, "")
    for _ in range(5):
        getattr(seats, word)([])
    assert [words[-2:] for words in started] == [[word, "--config=x"]] * 5
    assert {"serve": "The server", "join": "This site"}[word] + " starts again" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"without \['south'\]. Started again 5 times"):
        getattr(seats, word)([])


@pytest.mark.slow
def test_a_site_that_is_frozen_for_longer_than_patience_comes_back_by_itself(tmp_path, free_port):
    # in the clear, as the sum of the sources is of the other one alone while it is away
    arguments = ("--trainer.max_epochs=300", "--trainer.strategy.init_args.privacy=null")
    run = Federation(tmp_path / "run", free_port, *arguments)
    run.start("server", *SITES)
    run.wait_for_checkpoint("cleveland")
    run.processes["cleveland"].send_signal(signal.SIGSTOP)
    time.sleep(20)  # 10 until it is noticed, and then the patience of 5
    run.processes["cleveland"].send_signal(signal.SIGCONT)
    run.finish()
    assert "cleveland timed out: the run goes on without it" in run.log("server")
    assert "This site starts again" in run.log("cleveland")
    run.weights("cleveland", 300)


DIES_IN_THE_LAST_ROUND = """
import os, signal
from fedlit.run.loop import Rounds
before = Rounds._close
def closing(self, run):
    if run.clock.round_idx == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return before(self, run)
Rounds._close = closing
from fedlit.cli import run
run()
"""


@pytest.mark.slow
def test_a_site_that_returns_next_day_gets_the_result_where_all_start_again(tmp_path: Path, free_port: int) -> None:
    late = Federation(tmp_path / "late", free_port, *OF_ALL, "--seat.wait_for=60")
    late.start("server", "cleveland", "long_beach")
    late.start("hungary", program=DIES_IN_THE_LAST_ROUND)
    assert late.processes.pop("hungary").wait(500) == -signal.SIGKILL, late.log("hungary")
    late.finish()
    for name in ("server", "cleveland", "long_beach"):
        assert "the run ends without ['hungary']" in late.log(name)
    before = {name: late.weights(name, 6) for name in ("cleveland", "long_beach")}
    late.start("server", *SITES)
    late.finish()
    assert "JournalError" not in "".join(map(late.log, SITES))
    for name in SITES:
        after = late.weights(name, 6)
        assert all(torch.equal(value, after[key]) for key, value in before["cleveland"].items()), name
        assert all(torch.equal(value, before["long_beach"][key]) for key, value in before["cleveland"].items())
    written = {name: [*(late.folder / "sites" / name).glob("runs/*/version_*/summary.json")] for name in SITES}
    assert all(written.values()), written
