"""What tests of the command share: runs of it take seconds, many of which go into the same data again and again."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

import fedlit.data.digits


@pytest.fixture(scope="session", autouse=True)
def _digits_are_drawn_once() -> Iterator[None]:
    """Drawing them takes longer than a short run, and always gives the same."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("printed_digits", "photo_patches"):
            patch.setattr(fedlit.data.digits, name, functools.cache(getattr(fedlit.data.digits, name)))
        yield


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
