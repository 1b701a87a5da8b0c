"""Runs as they go in a browser: ``fedlit report --serve`` and ``fedlit serve --page``."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from commands import refusal
from fedlit.callbacks.report import LiveRuns, live
from fedlit.cli import page as cli_page
from fedlit.cli.page import PageServer, open_page
from read_page import Page
from summaries import summary, write_run

METRICS = "round,step,time/round_s,target/score,oracle/target/acc,comm/MB,comm/weights/MB\n"
CONFIG = {
    "seed_everything": 3,
    "model": {"class_path": "fedlit.methods.FedAvg"},
    "data": {"init_args": {"target": "<b>webcam</b>"}},
    "trainer": {"max_epochs": 10},
}


def going(folder: Path, rounds: int = 4) -> Path:
    """A run that has no summary yet; a round takes 2 s."""
    rows = "".join(f"{each}.0,{each + 1},2.0,0.{each}5,0.5,{each + 1}.5,1.5\n" for each in range(rounds))
    return write_run(folder, CONFIG, METRICS + rows, None)


def rows_of(html: str) -> dict[str, dict[str, str]]:
    """Of the table of runs, by run."""
    header, *rows = next(table for table in Page(html).tables if table[0][0] == "run")
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_a_run_that_goes_shows_how_far_it_is_and_when_it_will_end(tmp_path: Path) -> None:
    folder = going(tmp_path / "FedAvg" / "version_0")
    os.utime(folder / "metrics.csv", (time.time(), time.time()))
    html = LiveRuns([tmp_path]).page()
    row = rows_of(html)["FedAvg/version_0"]
    assert (row["state"], row["round"], row["seed"]) == ("running", "4 of 10", "3")
    assert row["ETA"] in ("0:12", "0:11"), "six rounds of 2 s"
    assert (row["target score"], row["MB"], row["s a round"]) == ("0.35", "4.500", "2")
    assert row["target"] == "<b>webcam</b>"
    assert "<b>" not in html, "texts of folders are escaped"
    assert "MB sent so far" in html
    assert '<meta http-equiv="refresh" content="5">' in html
    assert "<script" not in html


def test_a_run_that_has_ended_or_stands_still_says_so_and_comes_after_those_that_go(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "version_0", CONFIG, METRICS + "0.0,1,2.0,0.1,0.5,1,1\n", summary("FedAvg", "x", 0.5))
    still = going(tmp_path / "b" / "version_0")
    for file in still.iterdir():
        os.utime(file, (time.time() - 4000,) * 2)
    going(tmp_path / "c" / "version_0")
    rows = rows_of(LiveRuns([tmp_path]).page())
    assert next(iter(rows)) == "c/version_0"
    assert rows["a/version_0"]["state"] == "ended"
    assert rows["b/version_0"]["state"].startswith("no sign for 1:06:4")
    assert {rows[f"{name}/version_0"]["ETA"] for name in "ab"} == {"-"}


def test_before_the_first_round_and_while_a_file_is_written_the_page_says_so(tmp_path: Path) -> None:
    assert "No run has ended an epoch there yet" in LiveRuns([tmp_path]).page()
    folder = going(tmp_path / "FedAvg" / "version_0")
    (folder / "summary.json").write_text('{"method": "Fed')
    assert "summary.json" in LiveRuns([tmp_path]).page()


def test_a_run_that_cannot_be_read_is_a_row_and_the_others_are_as_ever(tmp_path: Path) -> None:
    going(tmp_path / "a" / "version_0")
    spoilt = going(tmp_path / "b" / "version_0")
    (spoilt / "summary.json").write_text("{")
    html = LiveRuns([tmp_path]).page()
    assert rows_of(html)["b/version_0"]["state"] == "cannot be read"
    assert rows_of(html)["a/version_0"]["state"] == "running"
    assert "summary.json" in html
    assert html.count("<svg") >= 4


@pytest.mark.parametrize("number", ["inf", "nan", "1e308", "-1e300", "1e300"])
def test_numbers_that_no_run_writes_are_no_error(tmp_path: Path, number: str) -> None:
    rows = f"0.0,1,{number},{number},{number},{number},{number}\n1.0,2,-{number.removeprefix('-')},1,1,1,1\n"
    folder = write_run(tmp_path / "a" / "version_0", CONFIG, METRICS + rows, None)
    (folder / "config.yaml").write_text("trainer: {max_epochs: 1" + "0" * 400 + "}")
    assert rows_of(LiveRuns([tmp_path]).page())["a/version_0"]["state"] == "running"


def test_finished_runs_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, original = [], live.read_progress
    monkeypatch.setattr(live, "read_progress", lambda folder, name: read.append(name) or original(folder, name))
    going(tmp_path / "a" / "version_0")
    second = going(tmp_path / "b" / "version_0")
    runs = LiveRuns([tmp_path])
    assert runs.page().count("<svg") == runs.page().count("<svg")
    with (second / "metrics.csv").open("a") as file:
        file.write("4.0,5,2.0,0.9,0.5,9.5,1.5\n")
    assert rows_of(runs.page())["b/version_0"]["round"] == "5 of 10"
    assert read == ["a/version_0", "b/version_0", "b/version_0"]


def test_sites_are_shown_with_what_they_do(tmp_path: Path) -> None:
    html = LiveRuns([tmp_path]).page({"north": "takes part", "south": "has left"}, "round 3")
    assert [["site", "state"], ["north", "takes part"], ["south", "has left"]] in Page(html).tables
    assert "round 3" in html


@pytest.fixture
def page(tmp_path: Path) -> Iterator[PageServer]:
    server = PageServer(LiveRuns([tmp_path]).page, 0)
    server.start()
    yield server
    server.shutdown()
    server.server_close()


def answer(port: int, method: str = "GET", path: str = "/", **headers: str) -> tuple[int, str, Mapping[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read().decode(), dict(response.getheaders())


def test_the_page_is_made_anew_once_it_is_a_second_old(page: PageServer, tmp_path: Path) -> None:
    assert "No run" in answer(page.server_port)[1]
    going(tmp_path / "FedAvg" / "version_0")
    assert "No run" in answer(page.server_port)[1]
    time.sleep(1.1)
    status, html, headers = answer(page.server_port)
    assert status == 200
    assert "FedAvg/version_0" in rows_of(html)
    assert headers["Cache-Control"] == "no-store"
    assert answer(page.server_port, "HEAD")[:2] == (200, "")


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/../../etc/passwd", {}, 404),
        ("GET", "/summary.json", {}, 404),
        ("POST", "/", {}, 501),
        ("DELETE", "/", {}, 501),
        ("GET", "/", {"Host": "stranger.example:8050"}, 403),
        ("GET", "/", {"Host": "localhost:8050"}, 200),
        ("GET", "/", {"Host": "[::1]:8050"}, 200),
    ],
)
def test_nothing_but_the_page_is_served_and_not_in_a_strangers_name(
    page: PageServer, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    assert answer(page.server_port, method, path, **headers)[0] == status


def test_visitors_that_go_away_leave_no_trace_and_too_many_are_turned_away(
    capfd: pytest.CaptureFixture[str],
) -> None:
    made = threading.Event()
    server = PageServer(lambda: str(made.wait(60)), 0)
    server.start()
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    waiting = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(40)]
    for each in waiting:
        each.sendall(request)
    ends = time.monotonic() + 30
    while sum("process_request_thread" in thread.name for thread in threading.enumerate()) < 16:
        assert time.monotonic() < ends
        time.sleep(0.05)
    time.sleep(0.3)
    assert sum("process_request_thread" in thread.name for thread in threading.enumerate()) == 16
    for each in waiting:
        each.close()
    made.set()
    while True:  # until a thread is free
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            assert answer(server.server_port)[:2] == (200, "True")
            break
        assert time.monotonic() < ends
        time.sleep(0.1)
    server.shutdown()
    server.server_close()
    assert "Traceback" not in capfd.readouterr().err


def test_a_page_that_cannot_be_made_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(cli_page._log, "warning", lambda text, *values: logged.append(text % values))
    server = PageServer(lambda: str(1 // 0), 0)
    server.start()
    assert answer(server.server_port)[0] == 500
    server.shutdown()
    server.server_close()
    assert logged == ["the page cannot be made: ZeroDivisionError: integer division or modulo by zero"]


def test_it_listens_on_the_loopback_alone(page: PageServer) -> None:
    assert page.socket.getsockname()[0] == "127.0.0.1"


def test_a_port_in_use_and_what_is_no_port_are_refused_in_a_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal("report", str(tmp_path), f"--serve={port}")
    assert line == f"fedlit: --serve: port {port} of 127.0.0.1 is in use: give another, or 0 for one that is free"
    for wrong in ("x", "70000", "-1", "localhost:"):
        assert "--serve must be PORT or HOST:PORT" in refusal("report", str(tmp_path), f"--serve={wrong}")
    assert "cannot be had" in refusal("report", str(tmp_path), "--serve=192.0.2.1:0")
    assert "RUN_DIR must be a folder" in refusal("report", "nowhere", "--serve=0")


def test_who_shows_it_to_others_is_told_that_nothing_asks_for_a_password(capsys: pytest.CaptureFixture[str]) -> None:
    open_page(str, "0.0.0.0:0", "--page").server_close()
    assert "nothing asks for a password" in capsys.readouterr().out
    server = open_page(str, "0", "--page")
    server.server_close()
    assert capsys.readouterr().out == f"fedlit: runs are shown at http://127.0.0.1:{server.server_port}/\n"


@pytest.mark.slow
def test_a_browser_shows_it_without_another_request(page: PageServer, tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no Chromium here")
    going(tmp_path / "runs" / "FedAvg" / "version_0")
    quiet = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"
    command = [browser, "--headless", *quiet.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.url]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "FedAvg/version_0" in rows_of(seen)
    assert seen.count("<svg") >= 4
