"""``--log json``: all that a command writes is a JSON object in each line; and with which status commands end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

FIRST = ("fit", "--config=experiments/first", "--seeds=[0]", "--compare=null", "--trainer.max_epochs=3")


def run(*words: str, **environment: str) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]]]:
    """The status of a command of its own process, and the objects of its output and errors."""
    command = [sys.executable, "-m", "fedlit.cli", *words]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=200)
    out, err = ([json.loads(line) for line in text.splitlines()] for text in (ended.stdout, ended.stderr))
    return ended.returncode, out, err


@pytest.mark.parametrize("asked", ["option", "environment"])
def test_each_line_is_an_object_and_each_round_has_one(asked: str) -> None:
    words, environment = (("--log", "json"), {}) if asked == "option" else ((), {"FEDLIT_LOG": "json"})
    status, out, err = run(*FIRST, *words, **environment)
    assert status == 0
    rounds = [each for each in err if each["logger"] == "fedlit.rounds"]
    assert [(each["round"], each["rounds"]) for each in rounds] == [(1, 3), (2, 3), (3, 3)]
    assert rounds[0]["bytes"] < rounds[2]["bytes"]
    assert {"loss", "target_score"} <= rounds[0].keys()
    assert any("SourceOnly" in each["message"] for each in out), "the closing table"
    for each in (*out, *err):
        assert {"time", "level", "logger", "message"} <= each.keys()
        assert datetime.fromisoformat(each["time"]).utcoffset() == timedelta(0)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("fit", "--data=Digits", "--model=FedAvgg"), 1, "FedAvgg"),
        (("report", "nowhere"), 1, "RUN_DIR must be a folder"),
        (("report", "x", "--output=page.txt"), 2, "--output must end in .html"),
    ],
)
def test_why_a_command_ends_is_an_object_too(words: tuple[str, ...], status: int, message: str) -> None:
    code, _, err = run(*words, "--log=json")
    assert code == status
    assert message in err[-1]["message"]
    if status == 1:
        assert err[-1]["level"] == "error"


def test_a_command_whose_output_nobody_reads_ends_without_a_traceback() -> None:
    command = [sys.executable, "-m", "fedlit.cli", "benchmark", "--list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_an_error_of_a_program_is_one_object_with_its_traceback() -> None:
    Path("own_network.py").write_text("raise ZeroDivisionError('gone')\n")
    program = "from fedlit.cli.logs import take_log\ntake_log(['--log=json'])\nimport own_network\n"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    (line,) = map(json.loads, ended.stderr.splitlines())
    assert line["message"] == "ZeroDivisionError: gone"
    assert "own_network.py" in line["exception"]


WRITERS = """
import os, subprocess, sys
from fedlit.cli.logs import take_log
take_log(["--log=json"])
sys.stdout.writelines(["by lines\\n", "Gr\u00fc\u00dfe\\n"])
sys.stdout.buffer.write(b"by bytes\\n")
os.write(2, b"as C does, \\xff\\n")
subprocess.run([sys.executable, "-c", "print('of a child')"])
ours = "from fedlit.cli.logs import take_log; take_log([]); print('of a child of ours')"
subprocess.run([sys.executable, "-c", ours])
sys.stderr.write("last words, without an end")
"""


def test_whoever_writes_and_however_the_line_is_an_object() -> None:
    ended = subprocess.run([sys.executable, "-c", WRITERS], capture_output=True, text=True, timeout=100)
    out, err = ([json.loads(line) for line in text.splitlines()] for text in (ended.stdout, ended.stderr))
    assert {each["message"] for each in out} == {
        "by lines",
        "Gr\u00fc\u00dfe",
        "by bytes",
        "of a child",
        "of a child of ours",
    }
    assert [each["message"] for each in err] == ["as C does, \ufffd", "last words, without an end"]
    assert {each["level"] for each in out} == {"info"}


def test_a_process_that_becomes_another_writes_objects_still() -> None:
    program = (
        "import os, sys\nfrom fedlit.cli.logs import end_log, take_log\ntake_log(['--log=json'])\nprint('before')\n"
        "end_log()\nos.execv(sys.executable, [sys.executable, '-c', "
        "\"from fedlit.cli.logs import take_log; take_log([]); print('after')\"])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert [json.loads(line)["message"] for line in ended.stdout.splitlines()] == ["before", "after"]


def test_another_form_is_refused() -> None:
    command = [sys.executable, "-m", "fedlit.cli", "list", "--log=xml"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "fedlit: --log must be text or json, got 'xml'\n")


@pytest.mark.slow
def test_a_command_that_a_signal_ends_has_its_status() -> None:
    words = [*FIRST[:-1], "--trainer.max_epochs=100000", "--log=json"]
    for each in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen([sys.executable, "-m", "fedlit.cli", *words], stderr=subprocess.PIPE, text=True) as going:
            assert going.stderr is not None
            next(line for line in going.stderr if '"fedlit.rounds"' in line)
            time.sleep(0.2)
            going.send_signal(each)
            rest = [json.loads(line) for line in going.stderr]
        assert going.returncode == 128 + each
        assert any(f"ended by {each.name}" in line["message"] for line in rest)
