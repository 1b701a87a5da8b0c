"""What jsonargparse is going to remove: fedlit does not call it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import lightning
import pytest

import fedlit
from fedlit.cli import main
from fedlit.data import Digits

SMALL = ["--config=experiments/digits_fedavg", "--model.extractor.init_args.hidden=[8]", "--trainer.max_epochs=1"]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[warnings.WarningMessage]]:
    """Warnings of a test, each time that there is a reason for one."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "all")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen


def of_jsonargparse(seen: list[warnings.WarningMessage]) -> dict[bool, set[str]]:
    """Files that call what is deprecated: of Lightning, and others."""
    calls: dict[bool, set[str]] = {True: set(), False: set()}
    for each in seen:
        if each.category.__name__ == "JsonargparseDeprecationWarning":
            is_lightnings = Path(each.filename).is_relative_to(Path(lightning.__file__).parent)
            calls[is_lightnings].add(f"{each.filename}:{each.lineno} {each.message}")
    return calls


def test_no_command_calls_what_jsonargparse_removes(found: list[warnings.WarningMessage]) -> None:
    """Lightning does, by which the test knows that it would see it."""
    pytest.importorskip("tensorboard")
    main(["fit", *SMALL, "--config=loggers/tensorboard", "--trainer.default_root_dir=runs"])
    (run,) = Path("runs").rglob("summary.json")
    main(["export", str(run.parent)])
    main(["send", str(run.parent), "--config=loggers/tensorboard"])
    main(["fit", *SMALL, "--data.clients=[clean, fonts]", "--targets=[all]", "--trainer.default_root_dir=swept"])
    main(["features", "--data=Digits", "--extractor=Features", "--extractor_args={in_features: 64}", "--out=f.npz"])
    fedlit.train("FedAvg", Digits(target="fonts", flatten=True, seed=0), rounds=1)
    calls = of_jsonargparse(found)
    assert calls[True]
    assert not calls[False]
