"""Helpers of several callbacks: the module they watch, files of a run, numbers as text, and statistics of sources."""

from __future__ import annotations

import csv
import io
import os
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fedlit.checks import check
from fedlit.federation import KEYS, RosterError
from fedlit.federation.nested import Inputs
from fedlit.functional import random_fourier_features, sample_frequencies, temperature_grid
from fedlit.functional.quantiles import COUNT_BITS
from fedlit.module import FederatedModule
from fedlit.run.component import Component
from fedlit.run.tasks import Classification, Unscored

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedlit.run.run import Run

LOGGING_CHANNELS = ("metrics", "oracle")
"""Channels of logged numbers, which are sent as plaintext."""

SOURCE_MOMENTS = "source_moments"
"""Channel of statistics that `Validators` average over the sources, through its privacy backend."""

CLASS_MEANS = "class_means"
"""Channel of the means of inputs by class that `Validators` average over the sources, through its privacy backend."""

VALIDATION_CLASSES = "validation_classes"
"""Channel on which sources sum up, for `CLASS_MEANS`, who has validation samples of which class."""

CALIBRATION = "calibration"
"""Channel of the losses that `Calibration` averages over the sources, through its privacy backend."""

INTERVALS = "intervals"
"""Channel of the counts of residuals that `ConformalIntervals` sums over the sources, through its privacy backend."""

CLINIC = "clinic"
"""Channel of the counts of samples that `ClinicMetrics` sums over the sources, through its privacy backend."""

CLINIC_CLASSES = "clinic_classes"
"""Channel on which sources sum up, for `CLINIC`, who has positive and negative validation samples."""

_T = TypeVar("_T")
_K = TypeVar("_K")


def watched(channel: str) -> bool:
    """Whether a channel only carries numbers for watching: the method would train the same without it."""
    summed = (SOURCE_MOMENTS, CLASS_MEANS, VALIDATION_CLASSES, CALIBRATION, INTERVALS, CLINIC, CLINIC_CLASSES)
    return channel in LOGGING_CHANNELS or channel.removesuffix(KEYS) in summed


def federated(module: LightningModule, callback: object) -> FederatedModule:
    """``module``, which must be a `FederatedModule` for ``callback`` to watch it; raises a `TypeError` otherwise."""
    if not isinstance(module, FederatedModule):
        raise TypeError(
            f"{type(callback).__name__} watches a FederatedModule, got {type(module).__name__}: train a method of "
            "fedlit.methods, or remove the callback"
        )
    return module


def check_form(module: FederatedModule, callback: object) -> None:
    """Refuse a module whose outputs have any form; raises a `ValueError`."""
    if isinstance(module.task, Unscored):
        name = type(callback).__name__
        raise ValueError(
            f"{name} reads logits of classes, or numbers, and {type(module).__name__} has num_classes=None, outputs of "
            f"any form: remove {name}, and evaluate in validation_step and test_step of the module"
        )


def class_names(trainer: Trainer, module: FederatedModule) -> list[str]:
    """Names of classes, or of numbers to predict: the data module's ``classes``, or else numbers from 0."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    names = getattr(data, "classes", None)
    if names is None:
        return [str(index) for index in range(module.num_classes)]
    check(
        len(names) == module.num_classes,
        "classes",
        f"{module.num_classes} names, for the outputs of {type(module).__name__} (num_classes)",
        names,
        f"give the module num_classes={type(data).__name__}.num_classes",
    )
    return [str(name) for name in names]


# ---------------------------------------------------------------- files of a run


def grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Items by a key, in the order in which keys first occur."""
    groups: dict[_K, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def log_folder(trainer: Trainer) -> Path:
    """The Trainer's ``log_dir`` or ``default_root_dir``; called on all processes, as ``log_dir`` is a broadcast."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def is_dry(trainer: Trainer) -> bool:
    """Whether it is a ``fast_dev_run``, which writes no files."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def write_rows(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Write a CSV file, whole or not at all; folders on the way are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    write_whole(path, text.getvalue())


def write_whole(path: Path, text: str) -> None:
    """Write a file with all of its text or not at all, whenever the process ends."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8", newline="")  # line ends stay as they are
    part.replace(path)


def check_fields(record: _T) -> _T:
    """A dataclass that was read from a file; raises a `TypeError` if a field has another type than is declared."""
    for name, annotation in get_type_hints(type(record)).items():
        if not _fits(getattr(record, name), annotation):
            raise TypeError(f"{name} cannot be {str(getattr(record, name))[:100]!r}")
    return record


def _fits(value: object, annotation: Any) -> bool:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(k, parts[0]) and _fits(v, parts[1]) for k, v in value.items())
    if origin in (list, tuple):
        return isinstance(value, origin) and all(_fits(each, parts[0]) for each in value)
    if isinstance(value, bool):  # to Python an int
        return annotation is bool
    if isinstance(value, int):  # bounded, as larger ones are no floats
        return annotation in (int, float) and abs(value) < 2**63
    if is_dataclass(value):
        check_fields(value)
    return isinstance(value, annotation)


def megabytes(num_bytes: float) -> str:
    """Bytes in MB (10^6), to three digits, or to the byte where that would be nothing: ``"3.21"``, ``"0.000042"``."""
    amount = num_bytes / 1e6
    if amount >= 100:
        return f"{amount:,.0f}"
    if amount >= 0.001:
        return f"{amount:#.3g}"
    return f"{amount:.6f}" if num_bytes else "0"


def colors_of(number: int) -> list[Any]:
    """Colours that distinguish so many things."""
    import matplotlib as mpl

    if number <= 10:
        return [mpl.colormaps["tab10"](place) for place in range(number)]
    return [mpl.colormaps["turbo"](0.04 + 0.92 * place / (number - 1)) for place in range(number)]


def over_rounds(axis: Axes) -> None:
    """Make the horizontal axis one of communication rounds."""
    axis.set_xlabel("round")
    axis.locator_params(axis="x", integer=True)
    axis.grid(alpha=0.25)


class SourceStatistics(Callback, Component):
    """Collects batches in each validation, and sends means over the sources that have samples to the target.

    Random features have N frequencies, and the bandwidth of their Gaussian kernel, see `RandomBasis`.
    """

    def __init__(self, num_frequencies: int = 32, bandwidth: float = 0.5) -> None:
        self._basis = RandomBasis(num_frequencies, bandwidth)
        self._temperatures = temperature_grid()
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._unready = False
        """Whether a client has no classifier yet, as in FedRF-TCA before the first average."""
        self._kept: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        """Of the batches of this validation: what `_collect` keeps, by its name and by client."""

    def _collect(self, module: FederatedModule, name: str, inputs: Inputs, labels: Tensor, logits: Tensor) -> None:
        """Keep what statistics and scores need of a client's batch; the target's labels may not be looked at."""
        raise NotImplementedError

    def _statistics(self, channel: str, module: FederatedModule, source: str) -> dict[str, Tensor]:
        """The message of a source on a channel; zeros if it has no samples."""
        raise NotImplementedError

    def _has(self, what: str, client: str) -> bool:
        return client in self._kept[what]

    def _all(self, what: str, client: str) -> Tensor:
        return torch.cat(self._kept[what][client])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse other tasks, and draw features anew for a module that may have another width and seed."""
        check_form(federated(pl_module, self), self)
        if not isinstance(federated(pl_module, self).task, Classification):
            raise ValueError(
                f"{type(self).__name__} is for class probabilities, but the method has task='regression': remove the "
                "callback, and monitor 'source/r2'"
            )
        self._basis.forget_()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the samples of the last validation."""
        self._start_afresh()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Collect what is needed of the clients on this process."""
        if trainer.sanity_checking:
            return
        for name, samples in batch.items():
            if name in outputs:
                self._collect(federated(pl_module, self), name, samples[0], samples[1], outputs[name].detach())
            else:
                self._unready = True

    def _means(self, module: FederatedModule) -> dict[str, Tensor]:
        """Send statistics of each source; the target receives their means over sources that have samples."""
        federation = module.federation
        sources = [client.name for client in module.sources if federation.is_local(client)]
        received: dict[str, Tensor] = {}
        for channel in self.channels:
            if channel.name == VALIDATION_CLASSES:
                continue
            sent = {name: self._statistics(channel.name, module, name) for name in sources}
            means = federation.mean(channel.name, sent, absent_too=True).get(module.target.name, {})
            # sources without samples have sent zeros: divided by the share of the others, this is the mean over those
            received |= {name: total if name == "there" else total / means["there"] for name, total in means.items()}
        return received

    def _at_target(self, module: FederatedModule, compute: Callable[[], _T]) -> _T | None:
        """Compute where the target is, if it has a classifier; an error there ends all processes."""
        result, error = None, None
        if module.federation.is_local(module.target) and not self._unready:
            try:
                result = compute()
            except RosterError as problem:
                error = problem
        module.federation.check(type(self).__name__.lower(), error)
        return result


def report_target(module: FederatedModule, scores: Mapping[str, float] | None, names: list[str]) -> dict[str, float]:
    """Numbers of the target, on all processes; ``None`` where it has none, or is not."""
    local = {} if scores is None else {module.target.name: dict(scores)}
    return module.federation.report(local, names).get(module.target.name, {})


def check_counts(run: Run, channel: str) -> None:
    """Refuse a backend on whose grid the counts of `agree_on_quantiles` are not exact."""
    grid = run.federation.channels[channel].backend.grid
    bits = None if grid is None else grid.fraction_bits
    rule = f"at least {COUNT_BITS} on channel {channel!r}, whose counts are steps of 2^-{COUNT_BITS}"
    check(bits is None or bits >= COUNT_BITS, "fraction_bits", rule, bits, "raise it, and lower bound if it must be")


def total_of_sources(module: FederatedModule, channel: str) -> Callable[[Callable[[str], Tensor]], Tensor | None]:
    """Sum what sources send over a channel; the result is ``None`` in a process without clients."""
    federation = module.federation
    sources = [client.name for client in module.sources if federation.is_local(client)]

    def total(message: Callable[[str], Tensor]) -> Tensor | None:
        received = federation.sum(channel, {name: {"counts": message(name)} for name in sources}, absent_too=True)
        return next((each["counts"] for each in received.values()), None)

    return total


class RandomBasis:
    """Random features of a client's extracted features scaled to length 1; the same for all clients.

    There are 2 N of them, of N frequencies; their Gaussian kernel's bandwidth is in units of the scaled features.
    """

    def __init__(self, num_frequencies: int = 32, bandwidth: float = 0.5) -> None:
        self.num_frequencies, self.bandwidth = num_frequencies, bandwidth
        self.size = 2 * num_frequencies
        self.forget_()

    def forget_(self) -> None:
        """Draw new frequencies for the next module."""
        self._frequencies: Tensor | None = None

    def of(self, module: FederatedModule, name: str, inputs: Inputs) -> Tensor:
        """Features of a batch of a local client's inputs, shape (n, 2 N), float64."""
        extracted: Tensor = module.replicas[name].get_submodule("extractor")(inputs)
        unit = F.normalize(extracted.detach().flatten(1).double(), dim=1)
        if self._frequencies is None:
            drawn = (self.num_frequencies, unit.shape[1], self.bandwidth)
            self._frequencies = sample_frequencies(*drawn, seed=module.federation.seed)
        return random_fourier_features(unit, self._frequencies)


def clock(seconds: float) -> str:
    """A time in minutes and seconds, ``1:05``, or with hours, ``2:00:10``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
