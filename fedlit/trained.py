"""Training from Python in one call, with results that notebooks display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import ArgumentParser
from torch import nn

import fedlit.data
import fedlit.methods
from fedlit.callbacks import RoundProgressBar, RunRecord, RunSummary
from fedlit.callbacks.communication_ledger import ledger_table
from fedlit.callbacks.report import RunFolder, read_runs, write_report
from fedlit.callbacks.report.pages import Picture
from fedlit.callbacks.report.run import curves_of
from fedlit.callbacks.summary import closing_table
from fedlit.checks import check, refuse
from fedlit.cli.arguments import content_of
from fedlit.cli.experiment import shipped_for
from fedlit.cli.known import known, nearest
from fedlit.cli.lightning_cli import quieten
from fedlit.cli.mistakes import installed
from fedlit.data import DomainDataModule
from fedlit.export import export_target
from fedlit.models import MLP, SmallCNN, SmallCNN1D
from fedlit.module import FederatedModule
from fedlit.privacy import SecureAggregation
from fedlit.strategy import FederatedStrategy
from fedlit.tables import Table

_FROM_DATA = ("clients", "target", "num_classes", "task", "extractor")
"""Arguments of a method that `train` gives it."""


def train(
    method: str | type[FederatedModule] | FederatedModule,
    data: str | DomainDataModule,
    *,
    rounds: int = 20,
    target: str | None = None,
    privacy: str | SecureAggregation | None = None,
    extractor: nn.Module | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    strategy: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> TrainedRun:
    """Train a method on data, test it, and return the run, which notebooks display.

    Args:
        method: Name or class in `fedlit.methods`, which gets the arguments of its shipped configuration where
            ``arguments`` say nothing else, or a module that is made already.
        data: Name of a shipped configuration (``"digits"``, ``"heart_disease"``; see ``fedlit list data``), or a data
            module.
        rounds: Rounds of training.
        target: Client that is adapted to, of data given by name.
        privacy: Name of a shipped configuration (``"masking"``, ``"paillier"``; see ``fedlit list privacy``), or a
            backend.
        extractor: Network from inputs to features, with the attribute ``out_features``; ``None`` takes `MLP` for
            vectors, `SmallCNN1D` for signals and `SmallCNN` for images.
        seed: Of networks, batches and splits of data given by name.
        folder: In which the run gets a folder, as of ``fedlit fit``; ``None`` is ``runs/METHOD``.
        strategy: Further arguments of `FederatedStrategy`.
        trainer: Further arguments of Lightning's Trainer, or others than these: one CPU and no model summary.
        arguments: Of the method.

    Raises:
        ValueError: If a name is unknown, something is given twice, or samples have no extractor of their shape.
    """
    quieten()
    pl.seed_everything(seed, verbose=False)
    shipped = {} if isinstance(method, FederatedModule) else _shipped_for(_class_of(method))
    data = _data(data, target, seed, shipped.get("data", {}).get("init_args", {}))
    module = _module(method, data, extractor, arguments, shipped.get("model", {}).get("init_args", {}))
    place = Path(folder or f"runs/{type(module).__name__}").expanduser().resolve()
    record, given, chosen = RunRecord(place, awaits_test=True), dict(trainer or {}), dict(strategy or {})
    for name, way_out in {"strategy": "give its arguments as strategy={...}", "max_epochs": "give rounds"}.items():
        check(name not in given, f"trainer[{name!r}]", "left out", given.get(name), way_out)
    dry = given.get("fast_dev_run")
    check(not dry, "trainer['fast_dev_run']", "left out", dry, "give rounds=1")
    twice = privacy is not None and "privacy" in chosen
    check(not twice, "strategy['privacy']", "left out, as privacy is given", chosen.get("privacy"))
    more = given.pop("callbacks", None) or []
    bar = [] if given.get("enable_progress_bar") is False else [RoundProgressBar()]
    settings: dict[str, Any] = {
        "max_epochs": rounds,
        "strategy": FederatedStrategy(**{"num_threads": "auto"} | _privacy(privacy) | chosen),
        "callbacks": [*(more if isinstance(more, list | tuple) else [more]), record, *bar],
        "accelerator": "cpu",
        "devices": 1,
        "log_every_n_steps": 1,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    runner = pl.Trainer(**settings | given)
    runner.fit(module, datamodule=data)
    runner.test(module, datamodule=data, verbose=False)
    assert record.path is not None
    assert record.summary is not None
    return TrainedRun(module, data, runner, record.path, record.summary)


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """A run that has been trained and tested; notebooks show its row of the closing table.

    A module that is trained further changes what earlier runs of it predict and export; their ``metrics`` stay.

    Attributes:
        module: The method, whose ``replicas`` are the clients' networks.
        data: The data module.
        trainer: Lightning's Trainer.
        folder: With all files of the run, for ``fedlit report``.
        summary: What the run came to.
    """

    module: FederatedModule
    data: DomainDataModule
    trainer: pl.Trainer
    folder: Path
    summary: RunSummary

    @property
    def metrics(self) -> dict[str, float]:
        """Scores: of hidden labels those called ``oracle_``, by which nothing is to be chosen; in [0, 1] or R2."""
        found = {"target_score": self.summary.target_score}
        found |= {f"oracle_{name}": value for name, value in self.summary.oracle_scores().items()}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def table(self) -> Table:
        """Row of the closing table."""
        return closing_table([self.summary])

    @property
    def ledger(self) -> Table:
        """Messages and bytes by channel."""
        return ledger_table(self.module.federation.ledger)

    def plot(self) -> Curves:
        """Return scores and losses over the rounds."""
        return Curves(curves_of(self._read()))

    def predict(self) -> Any:
        """Predict the target's test samples: a pandas DataFrame, without pandas a list of rows by column."""
        self.trainer.predict(self.module, datamodule=self.data, return_predictions=False)
        path = self.folder / "predictions.csv"
        try:
            import pandas
        except ImportError:
            import csv

            with path.open(newline="", encoding="utf-8") as file:
                return list(csv.DictReader(file))
        texts = {"id": "str"} | ({} if self.data.task == "regression" else {"predicted": "str"})
        return pandas.read_csv(path, dtype=texts, keep_default_na=False)

    def report(self) -> Page:
        """Write the page of ``fedlit report`` to the run's folder, and return it."""
        return Page(write_report([self._read()], self.folder / "report.html")[0])

    def export(self, path: str | Path) -> None:
        """Write the target's model: ``NAME.pt2``, ``NAME.onnx``, or a folder for `fedlit.load`; see `export_target`."""
        export_target(self.module, path, self.data, self.summary.published_scores())

    def _read(self) -> RunFolder:
        return read_runs([self.folder])[0]

    def _repr_html_(self) -> str:
        return self.table.html()

    def __repr__(self) -> str:
        scores = ", ".join(f"{name} {value:.3f}" for name, value in self.metrics.items())
        run = f"{self.summary.method} on {self.summary.target!r}, {self.summary.rounds} rounds"
        return f"{run}: {scores} ({self.folder})"


@dataclass(frozen=True)
class Curves:
    """Drawings, which notebooks show."""

    pictures: list[Picture]

    def save(self, folder: str | Path) -> list[Path]:
        """Write an SVG file for each to a folder, which is made if need be; return their paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / picture.file for picture in self.pictures]
        for path, picture in zip(paths, self.pictures, strict=True):
            path.write_bytes(picture.on_disk())
        return paths

    def _repr_html_(self) -> str:
        return "".join(picture.on_disk().decode() for picture in self.pictures)


@dataclass(frozen=True)
class Page:
    """A page that was written, which notebooks show in a frame."""

    path: Path

    def _repr_html_(self) -> str:
        page = escape(self.path.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" width="100%" height="700" style="border: 0"></iframe>'


# ---------------------------------------------------------------- what is given by name


def _check_name(argument: str, rule: str, name: str, names: Sequence[str]) -> None:
    """Refuse a name that is none of these, with the nearest or all of them."""
    guess = nearest(name, names)
    way_out = f"did you mean {guess!r}?" if guess else f"there are {', '.join(names)}"
    check(name in names, argument, rule, name, way_out)


def _shipped(kind: str, name: str) -> dict[str, Any]:
    """Content of a shipped configuration."""
    _check_name(kind, "the name of a shipped configuration", name, installed(kind))
    return dict(content_of(str(files("fedlit.configs").joinpath(kind, f"{name}.yaml"))))


def _made(cls: type[Any], init_args: Mapping[str, Any], skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Arguments of a class as objects, in place of their class paths."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, "made", instantiate=False, skip={*skip})
    config = parser.instantiate(parser.parse_object({"made": dict(init_args)}))
    return {name: config["made"][name] for name in init_args}


def _class_of(method: str | type[FederatedModule]) -> type[FederatedModule]:
    if isinstance(method, str):
        _check_name("method", "the name of a class in fedlit.methods", method, fedlit.methods.__all__)
        found: type[FederatedModule] = getattr(fedlit.methods, method)
        return found
    is_class = isinstance(method, type) and issubclass(method, FederatedModule)
    check(is_class, "method", "a name, a class in fedlit.methods, or a module", method)
    return method


def _shipped_for(method: type[FederatedModule]) -> dict[str, Any]:
    """Content of the plainest shipped configuration of a method."""
    file = shipped_for(f"fedlit.methods.{method.__name__}")
    return {} if file is None else dict(content_of(file))


def _data(data: str | DomainDataModule, target: str | None, seed: int, settings: Mapping[str, Any]) -> DomainDataModule:
    """The data module, of data given by name with what the method's configuration says of data."""
    if not isinstance(data, str):
        check(isinstance(data, DomainDataModule), "data", "a name, or a data module", data)
        check(target is None, "target", "left out, as the data module has one", target)
        return data
    entry = _shipped("data", data.removeprefix("data/"))["data"]
    cls = getattr(fedlit.data, entry["class_path"].rpartition(".")[2])
    init_args = {**entry.get("init_args", {}), **settings, **({} if target is None else {"target": target})}
    made: DomainDataModule = cls(**{"seed": seed} | _made(cls, init_args))
    return made


def _module(
    method: str | type[FederatedModule] | FederatedModule,
    data: DomainDataModule,
    extractor: nn.Module | None,
    arguments: Mapping[str, Any],
    shipped: Mapping[str, Any],
) -> FederatedModule:
    if isinstance(method, FederatedModule):
        given = {**arguments, **({} if extractor is None else {"extractor": extractor})}
        check(not given, "arguments", "left out, as the method is made already", [*given])
        return method
    cls = _class_of(method)
    names = [name for name in known().arguments.get(f"fedlit.methods.{cls.__name__}", ()) if name not in _FROM_DATA]
    for name in [name for name in arguments if names and name not in names]:
        guess = nearest(name, names)
        of_data = name in known().arguments.get(f"fedlit.data.{type(data).__name__}", ())
        way_out = f"did you mean {guess!r}?" if guess else f"it takes {', '.join(names)}"
        way_out = f"it is an argument of the data: give {type(data).__name__}({name}=...)" if of_data else way_out
        refuse(name, f"no argument of train, or one of {cls.__name__}", arguments[name], way_out)
    preset = {name: each for name, each in shipped.items() if name not in arguments and name not in _FROM_DATA}
    network = _network(data, shipped.get("extractor", {}).get("init_args", {})) if extractor is None else extractor
    given = {"task": data.task} | _made(cls, preset, _FROM_DATA) | dict(arguments)
    return cls(data.clients, data.target, data.num_classes, network, **given)


def _network(data: DomainDataModule, settings: Mapping[str, Any]) -> nn.Module:
    """A small network for samples of the data's shape, such as one with BatchNorm where the method needs it."""
    shape = data.input_shape
    check(0 < len(shape) < 4, "extractor", "given for samples of such a shape", None, shown=f"none for {shape}")
    cls: Any = (MLP, SmallCNN1D, SmallCNN)[len(shape) - 1]
    made: nn.Module = cls(shape[0], **settings)
    return made


def _privacy(privacy: str | SecureAggregation | None) -> dict[str, Any]:
    if not isinstance(privacy, str):
        return {"privacy": privacy}
    content = _shipped("privacy", privacy.removeprefix("privacy/"))
    return _made(FederatedStrategy, content["trainer"]["strategy"].get("init_args", {}))
