"""What all tests share: seeds, one thread, quiet logs, and the real data where they are."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    import torch  # imported where it is used: the process that hands out tests to others needs none of it

# before torch is imported: processes started by tests inherit them, and placements agree only at equal thread counts
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MPLBACKEND", "Agg")

gc.disable()  # until all tests are collected

settings.register_profile("fedlit", max_examples=30, deadline=None)
settings.load_profile("fedlit")

ROOT = Path(__file__).resolve().parents[1]


def pytest_collectstart(collector: pytest.Collector) -> None:
    # networks that a file makes as it is imported do not depend on the files imported before it
    if isinstance(collector, pytest.Module):
        import torch

        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _quiet_lightning() -> None:
    from lightning.fabric.utilities import registry

    registry.entry_points = cache(registry.entry_points)  # which every Trainer would read from all installed packages
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    # seed_everything leaves its seed in the environment, from where the next test would read it
    import torch

    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    torch.default_generator.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded generator for tests that draw their own data."""
    import torch

    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the project; tests that need it skip where it is missing."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the real data in ../shared/data, beside the project, which is not there")
    return folder


@pytest.fixture(scope="session")
def translations_kept() -> Iterator[None]:
    """Keep the translations to ONNX, whose source PyTorch parses anew for each file, for half of the time it takes."""
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError, AttributeError):  # of another release
            from torch.onnx._internal.exporter._registration import ONNXRegistry

            patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        yield


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this checkout, and the wheel that is built from it."""
    from distributions import build

    return build(tmp_path_factory.mktemp("distributions"))


def pytest_collection_finish() -> None:
    """Keep the garbage collector away from what was imported: looking through it takes a tenth of the time.

    Then fork the process that others are forked from, which shares all that.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20)  # and it need not look often
    gc.enable()
    if "processes" in sys.modules:  # a test that was collected will want some
        sys.modules["processes"].start()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave no process, and let extensions find what is theirs when they end."""
    if "processes" in sys.modules:
        sys.modules["processes"].stop()
    if hasattr(config, "workerinput"):  # all is told, and to take libraries apart takes seconds
        os._exit(0)
    atexit.register(gc.unfreeze)  # no sooner: pytest itself has all rubbish collected before it ends


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Processes take files, whose tests share fixtures and imports, in their order: long ones are not at the end."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what reads the real data, so that `pytest -m real_data` runs it alone."""
    for item in items:
        if "shared_data" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real_data)
