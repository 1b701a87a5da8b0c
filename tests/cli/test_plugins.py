"""Classes of other packages on the command line: installed as pip would install them, named in a word."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from fedlit.cli import main
from fedlit.cli.catalogue import KINDS, load_plugins
from refused import slow

CODE = '''
from dataclasses import replace

import torch

from fedlit.data.base import Domain, DomainDataModule
from fedlit.methods import FedAvg
from fedlit.models import MLP
from fedlit.privacy import Plain
from lightning.pytorch import Callback


class {prefix}Average(FedAvg):
    """Averages."""


class {prefix}Points(DomainDataModule):
    """Points on two lines."""

    def domain_names(self):
        return ["here", "there"]

    def class_names(self):
        return ["below", "above"]

    def load(self, domain):
        y = torch.arange(40) % 2
        return Domain(torch.stack([y.float(), torch.full((40,), float(domain == "there"))], dim=1), y)


class {prefix}Sum(Plain):
    """Sums in the clear."""

    def describe(self):
        return replace(super().describe(), backend="{prefix}Sum")


class {prefix}Net(MLP):
    """A layer."""


class {prefix}Watch(Callback):
    """Says that it is there."""

    def on_fit_end(self, trainer, pl_module):
        print("{prefix}Watch was there")
'''

Install = Callable[[str, Mapping[str, Mapping[str, str]]], str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution with a module of `CODE` and with entry points where Python looks for packages."""
    monkeypatch.chdir(tmp_path)
    load_plugins.cache_clear()

    def put(distribution: str, groups: Mapping[str, Mapping[str, str]]) -> str:
        folder = tmp_path / distribution
        info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [
            line
            for group, entries in groups.items()
            for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        module = distribution.replace("-", "_")
        (folder / f"{module}.py").write_text(CODE.format(prefix=distribution.split("-")[0].title()))
        monkeypatch.syspath_prepend(folder)
        return module

    yield put
    load_plugins.cache_clear()


def offered(module: str, prefix: str) -> dict[str, dict[str, str]]:
    names = {"methods": "Average", "data": "Points", "privacy": "Sum", "models": "Net", "validators": "Watch"}
    return {f"fedlit.{kind}": {f"{prefix}{name}": f"{module}:{prefix}{name}"} for kind, name in names.items()}


ONE_ROUND = ["--model.extractor.in_features=2", "--model.extractor.hidden=[4]", "--trainer.max_epochs=1"]


@pytest.mark.parametrize("nested", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_kind_of_plug_in_is_used_by_its_short_name(nested, install, capsys):
    prefix = "Nested" if nested else "Word"
    module = install(f"{prefix.lower()}-things", offered(f"{prefix.lower()}_things", prefix))
    key = "--trainer.strategy.init_args.privacy"
    backend = f"{key}={{class_path: {prefix}Sum}}" if nested else f"{key}={prefix}Sum"
    main(["fit", f"--model={prefix}Average", f"--data={prefix}Points", f"--model.extractor={prefix}Net", *ONE_ROUND,
          "--trainer.strategy=fedlit.FederatedStrategy", backend, f"--trainer.callbacks+={prefix}Watch",
          "--trainer.callbacks+=PrivacyReport"])  # fmt: skip
    printed = capsys.readouterr()
    assert f"{prefix}Watch was there" in printed.out
    assert "left out" not in printed.err
    (report,) = Path("runs").glob(f"{prefix}Average/version_0/privacy.json")
    (channel,) = json.loads(report.read_text())["channels"]
    assert channel["description"]["backend"] == f"{prefix}Sum"
    assert {plug_in.thing.__module__ for plug_in in load_plugins()} == {module}
    assert {plug_in.kind for plug_in in load_plugins()} == set(KINDS)


@pytest.mark.parametrize(
    ("group", "name", "value", "reason"),
    [
        ("methods", "Gone", "not_installed_anywhere:Gone", "ModuleNotFoundError: No module named 'not_installed"),
        ("methods", "OddSum", "odd_things:OddSum", "TypeError: 'odd_things:OddSum' is no subclass of FederatedModule"),
        slow("privacy", "OddNet", "odd_things:OddNet", "no subclass of SecureAggregation or TwoPartyAffine"),
        slow("methods", "odd", "odd_things:OddAverage", "'odd_things:OddAverage' must be called like its class"),
        ("methods", "FedAvg", "odd_things:FedAvg", "fedlit has a class of that name: rename it, or write its class"),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_told_by_name_and_leaves_the_command_alone(
    group, name, value, reason, install, capsys
):
    install("odd-things", {f"fedlit.{group}": {name: value}})
    with pytest.raises(SystemExit) as done:
        main(["fit", "--model.help", "FedAvg"])
    printed = capsys.readouterr()
    assert done.value.code == 0
    assert "FedAvg" in printed.out
    (line,) = [line for line in printed.err.splitlines() if "left out" in line]
    assert line.startswith(f"fedlit: plug-in {name!r} of odd-things (fedlit.{group}) is left out: ")
    assert reason in line
    assert load_plugins() == ()


def test_whatever_an_import_raises_is_told(install, capsys):
    module = install("broken-things", offered("broken_things", "Broken"))
    path = next(Path(place) for place in sys.path if Path(place, f"{module}.py").exists()) / f"{module}.py"
    path.write_text("raise RuntimeError('no licence')")
    assert load_plugins() == ()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(KINDS)
    assert all("of broken-things" in line and line.endswith("RuntimeError: no licence") for line in told)


def test_of_two_plug_ins_of_one_name_the_first_distribution_is_taken(install, capsys):
    install("second-things", {"fedlit.methods": {"FirstAverage": "second_things:FirstAverage"}})
    install("first-things", {"fedlit.methods": {"FirstAverage": "first_things:FirstAverage"}})
    (plug_in,) = load_plugins()
    assert (plug_in.kind, plug_in.thing.__name__, plug_in.distribution) == ("methods", "FirstAverage", "first-things")
    told = capsys.readouterr().err
    assert "of second-things (fedlit.methods) is left out: ValueError: first-things has a class of that name" in told
