"""What tests of the command share: runs of it take seconds."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock

from fedlit.cli import main
from fedlit.privacy import PrivacyWarning

NETWORK = "--model.extractor.init_args.hidden=[8]"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def _return_types_kept() -> Iterator[None]:
    """Keep the types that functions return, for which each parser would read and parse the files of their modules."""
    with pytest.MonkeyPatch.context() as patch:
        with contextlib.suppress(ImportError, AttributeError):  # of another release
            from jsonargparse import _postponed_annotations as annotations

            patch.setattr(annotations, "get_return_type", cache(annotations.get_return_type))
        yield


@pytest.fixture(scope="session")
def once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``once(name, make)``: a folder that ``make(folder)`` has filled, once for all processes of pytest-xdist.

    Tests of any of the processes read it, so that none may change it. What is printed is in ``printed.txt``.
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
                with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
                    patch.chdir(folder)
                    patch.setenv("PL_GLOBAL_SEED", "0")
                    make(folder)
                (folder / "printed.txt").write_text(printed.getvalue())
                done.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def exported(once: Callable[..., Path]) -> Path:
    """The folder of a run of FedAvg over three rounds, which keeps the checkpoint of each."""

    def fit(folder: Path) -> None:
        keep = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.save_top_k=-1", "--trainer.max_epochs=3"]
        main(["fit", "--config", "experiments/digits_fedavg", NETWORK, *keep, f"--trainer.default_root_dir={folder}"])

    return once("exported", fit) / "FedAvg" / "version_0"


@pytest.fixture(scope="session")
def reported(once: Callable[..., Path]) -> Path:
    """A folder with ``runs`` of four methods in three federations, and their report ``page.html``."""

    def make(folder: Path) -> None:
        short = ["--trainer.max_epochs=2", "--trainer.enable_checkpointing=false"]
        digits = ["--config=experiments/digits", "--config=privacy/masking", NETWORK]
        digits += ["--trainer.callbacks+=PrivacyReport", "--trainer.default_root_dir=runs/digits"]
        with pytest.warns(PrivacyWarning, match=r"with FedAvg and the same seed: .* reveal what \['fonts'\] sent"):
            main(["fit", *digits, *short])  # the labelled target trains in FedAvg and not in SourceOnly
        axes = ["--compare=null", "--seeds=[0]", "--targets=[hungary]", *short]
        main(["fit", "--config=experiments/heart_fedgp", *axes, "--trainer.default_root_dir=runs/hearts"])
        rates = ["--config=experiments/heart_rate_fed_mmd", "--trainer.default_root_dir=runs/rates"]
        main(["fit", *rates, *axes, "--model.warmup_rounds=1"])
        main(["report", "runs", "--output=page.html"])

    return once("reported", make)
