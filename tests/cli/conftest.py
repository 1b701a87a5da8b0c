"""What tests of the command share: runs of it take seconds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``once(name, make)``: a folder that ``make(folder)`` has filled, once for all processes of pytest-xdist.

    Tests of any of the processes read it, so that none may change it.
    """
    place = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        place = place.parent

    def folder_of(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = place / f"once-{name}", place / f"once-{name}.done"
        with FileLock(place / f"once-{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                with pytest.MonkeyPatch.context() as patch:
                    patch.chdir(folder)
                    patch.setenv("PL_GLOBAL_SEED", "0")
                    make(folder)
                done.touch()
        return folder

    return folder_of
