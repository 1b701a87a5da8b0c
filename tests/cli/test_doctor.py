"""``fedlit doctor``: that it sees what is wrong, and says what mends it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from fedlit.cli import doctor, main
from fedlit.remote.certificates import make_certificates

grpc = pytest.importorskip("grpc")
from fedlit.remote.grpc_carrier import GrpcListener  # noqa: E402


def findings(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[dict[str, tuple[str, str]], object]:
    """By topic, the text and what mends it; and how the command ended."""
    status: object = 0
    try:
        main(["doctor", *args])
    except SystemExit as end:
        status = end.code
    found: dict[str, tuple[str, str]] = {}
    topic = ""
    for line in capsys.readouterr().out.splitlines():
        if line.startswith(" "):
            found[topic] = (found[topic][0], line.strip().removeprefix("-> "))
        else:
            mark, topic, text = line.split(maxsplit=2)
            assert mark in ("ok", "!!")
            found[topic] = (text, "")
    return found, status


def test_an_installation_in_order_is_found_so(capsys: pytest.CaptureFixture[str]) -> None:
    found, status = findings(capsys)
    assert {*found} == {"fedlit", "dependencies", "torchvision", "extras", "threads", "gpus", "disk", "clock"}
    assert status == 0
    assert not any(mend for _, mend in found.values())
    assert metadata.version("torch") in found["dependencies"][0]


def test_version_has_the_versions_of_extras(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"fedlit {metadata.version('fedlit')}"
    assert f"torch {metadata.version('torch')}" in lines
    assert f"remote (grpcio {metadata.version('grpcio')})" in " ".join(lines)


def test_old_and_missing_libraries_are_named_with_the_command_that_installs_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = doctor._version
    there = {"POT": "0.8.1", "rich": None, "timm": None}
    monkeypatch.setattr(doctor, "_version", lambda name: there.get(name, real(name)))
    found, status = findings(capsys)
    text, mend = found["dependencies"]
    assert text == "POT is 0.8.1, and must be >=0.9; rich is missing"
    assert mend == "pip install -U 'POT>=0.9' 'rich>=13'"
    assert found["extras"][0] == "not installed: timm: pip install 'fedlit[NAME]'"
    assert str(status).startswith("fedlit: 1 of these (!!)")


def test_builds_of_torch_that_do_not_match_are_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = doctor.import_module

    def broken(name: str) -> Any:
        if name == "torchvision.ops":
            raise RuntimeError("operator torchvision::nms does not exist\nmore")
        return real(name)

    monkeypatch.setattr(doctor, "import_module", broken)
    text, mend = findings(capsys)[0]["torchvision"]
    assert text.endswith("(operator torchvision::nms does not exist)")
    assert mend.startswith("pip install -U torch torchvision")


def test_a_machine_without_space_time_or_cores_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(doctor, "__file__", str(Path(doctor.__file__)))
    monkeypatch.setattr(Path, "stat", lambda self, **kwargs: SimpleNamespace(st_mtime=4e9, st_mode=0o100644))
    found, _ = findings(capsys)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    assert found["threads"][1].startswith(f"set OMP_NUM_THREADS={cores}")
    assert found["disk"][0].startswith("0.5 GiB free")
    assert "--trainer.default_root_dir" in found["disk"][1]
    assert found["clock"][1] == "set the clock of this machine"


@pytest.mark.parametrize(
    ("listed", "cuda", "text", "mend"),
    [
        ("GPU 0: Tesla T4", None, "is built without CUDA", "of a build for CUDA"),
        ("GPU 0: Tesla T4", "13.0", "for CUDA 13.0 cannot use it", "update its driver"),
        ("No devices were found", "13.0", "training is on the CPU; nvidia-smi: No devices", ""),
        (
            "NVIDIA-SMI has failed because it couldn't communicate",
            "13.0",
            "NVIDIA-SMI has failed",
            "install the driver",
        ),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_told(
    listed: str, cuda: str | None, text: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: False), version=SimpleNamespace(cuda=cuda), __version__="2.9"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "import_module", lambda name: without)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    answer = SimpleNamespace(stdout=f"{listed}\n", stderr="", returncode=0)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *args, **kwargs: answer)
    (found,) = doctor._gpus()
    assert text in found.text
    assert mend in found.mend
    assert bool(found.mend) == bool(mend)
    if listed.startswith("GPU"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        (found,) = doctor._gpus()
        assert found.mend == "unset CUDA_VISIBLE_DEVICES, to train on it"


def test_a_driver_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    without = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setattr(doctor, "import_module", lambda name: without)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(doctor, "_PATIENCE", 0.1)
    real = subprocess.run
    monkeypatch.setattr(doctor.subprocess, "run", lambda words, **how: real(["sleep", "5"], **how))
    (found,) = doctor._gpus()
    assert "cannot be run" in found.text
    assert found.mend


def test_a_part_that_fails_leaves_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = doctor.import_module

    def without_torch(name: str) -> Any:
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'")
        return real(name)

    monkeypatch.setattr(doctor, "import_module", without_torch)
    found, status = findings(capsys)
    assert found["threads"][0] == "could not be looked at: ModuleNotFoundError: No module named 'torch'"
    assert {"disk", "clock"} <= {*found}
    assert str(status).startswith("fedlit: 2 of these")


# ---------------------------------------------------------------- seats


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_certificates(tmp_path, "localhost", ["north", "south"])
    return tmp_path


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    """Of a server that listens."""
    listener = GrpcListener("0.0.0.0:0", *files(folder, "server"), names=["north"])
    port = listener.listen(lambda name, pieces: pieces, lambda name: None, lambda name: None).rpartition(":")[2]
    yield f"localhost:{port}"
    listener.close()


def files(folder: Path, name: str) -> tuple[Path, Path, Path]:
    return folder / f"{name}.crt", folder / f"{name}.key", folder / "ca.crt"


def seat(folder: Path, name: str, **entries: Any) -> str:
    """A configuration with a seat, whose certificate's files lie beside it."""
    kinds = zip(("certificate", "key", "ca"), (f"{name}.crt", f"{name}.key", "ca.crt"), strict=True)
    path = folder / "seat.yaml"
    path.write_text(yaml.safe_dump({"seat": {**dict(kinds), **entries}}))
    return str(path)


def test_a_site_whose_server_answers(folder: Path, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, status = findings(capsys, "--config", seat(folder, "north", server=address))
    assert found["certificate"][0].startswith("of 'north', with its key and signed by the ca, until ")
    assert found["server"] == (f"{address} answers, and takes the certificate of this site", "")
    assert status == 0


def test_a_server_of_another_name_or_authority_is_told(
    folder: Path, address: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    port = address.rpartition(":")[2]
    found, status = findings(capsys, "--config", seat(folder, "north", server=f"127.0.0.2:{port}"))
    assert "certificate that does not hold: IP address mismatch" in found["server"][0]
    assert str(status).startswith("fedlit: 1 of these (!!)")
    other = tmp_path_factory.mktemp("other")
    make_certificates(other, "localhost", ["north"])
    found, _ = findings(capsys, "--config", seat(other, "north", server=address))
    assert "certificate that does not hold: " in found["server"][0]
    shutil.copy(folder / "ca.crt", other / "theirs.crt")  # trusts the server, which does not trust this site
    context = doctor._answers(address, other / "north.crt", other / "north.key", other / "theirs.crt")
    assert "takes no certificate of this site" in context.text or "hangs up" in context.text
    assert context.mend


def test_a_server_that_is_not_there_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found, _ = findings(capsys, "--config", seat(folder, "north", server=f"localhost:{port}"))
    assert found["server"][0].startswith(f"localhost:{port} does not answer: ")
    assert "fedlit serve" in found["server"][1]


def test_something_else_that_listens_there_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:

        def talk() -> None:
            connection, _ = other.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        threading.Thread(target=talk, daemon=True).start()
        port = other.getsockname()[1]
        found, _ = findings(capsys, "--config", seat(folder, "north", server=f"localhost:{port}"))
        assert found["server"][1]
        server = seat(folder, "server", address=f"127.0.0.1:{port}", sites=["north"])
        found, _ = findings(capsys, "--config", server)
        assert "cannot be listened at" in found["address"][0]
        assert found["address"][1] == "end what listens there, or give another seat.address"
    found, status = findings(capsys, "--config", server)
    assert found["address"] == (f"127.0.0.1:{port} is free", "")
    assert status == 0
    for address, mend in (
        ("*:8443", "0.0.0.0:PORT"),
        ("::1:8443", "[::1]:PORT"),
        ("nowhere.invalid:8443", "of this machine"),
    ):
        found, _ = findings(capsys, "--config", seat(folder, "server", address=address, sites=["north"]))
        assert mend in found["address"][1]
    found, _ = findings(capsys, "--config", seat(folder, "north", server="nowhere.invalid:8443"))
    assert "is unknown" in found["server"][0]


def test_certificates_that_end_or_do_not_fit_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_certificates(tmp_path, "localhost", ["north", "south"], days=3)
    address = {"address": "127.0.0.1:0", "sites": ["north"]}
    found, _ = findings(capsys, "--config", seat(tmp_path, "server", **address))
    assert "(2 days)" in found["certificate"][0]
    assert found["certificate"][1].startswith("have it renewed")
    shutil.copy(tmp_path / "south.key", tmp_path / "north.key")
    found, _ = findings(capsys, "--config", seat(tmp_path, "north", server="localhost:1"))
    assert "key must be that of the certificate" in found["seat"][1]


def test_configurations_without_a_seat_or_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _ = findings(capsys, "--config", "experiments/first")
    assert found["seat"] == ("none in these configurations, which fedlit fit needs none of", "")
    for seat_, text in (
        ("foo", "is 'foo'"),
        ("{address: 8443, sites: [a]}", "of fedlit serve"),
        ("{nothing: 1}", "of fedlit join"),
    ):
        (tmp_path / "bad.yaml").write_text(f"seat: {seat_}")
        found, status = findings(capsys, "--config", str(tmp_path / "bad.yaml"))
        assert found["seat"][0] == text
        assert found["seat"][1]
        assert status != 0
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--config", str(tmp_path / "no.yaml")])
    assert ended.value.code == 2
    assert "there is no file" in capsys.readouterr().err
