"""What data modules of time series share: windows by client, their splits, normalisation and features."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from fedlit.checks import check, check_one_of
from fedlit.data.base import DomainDataModule
from fedlit.data.normalising import HOW, Normalise, feature_moments, feature_normaliser
from fedlit.data.raw_inputs import RawInputs, VectorNetwork
from fedlit.data.samples import Domain, check_data, refuse_data
from fedlit.data.signals.networks import SignalNetwork, WindowScaling
from fedlit.data.signals.recordings import Numbers, Recording, WindowRules, Windows
from fedlit.data.signals.splits import SplitBy, overlaps, split_windows
from fedlit.data.source import agreed, check_classes
from fedlit.data.splits import Parts, Split
from fedlit.data.tables.features import total_over
from fedlit.data.tables.values import check_once
from fedlit.federation import Summed
from fedlit.federation.names import alike, check_list, difference, shown
from fedlit.federation.nested import Shape

WindowNormalise = Literal["none", "client", "window"]

SCALES = Summed(
    "scales",
    "how many clients have each channel at each scale, in quarters of an octave, to find sites with other units",
)

_FINENESS = 4
"""Parts of an octave (a factor of 2) that scales are told apart by."""

_TENFOLD = 13
"""Such parts from which on a scale differs: 8 to 11 times. Metres per square second are 9.8 times those in g."""

_FEW = 20
"""Samples that may grow by chance."""

_CHUNK = 1024
"""Windows that are prepared at a time, which bounds memory."""


def in_parts(prepare: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return windows ``x``, prepared some at a time."""
    return torch.cat([prepare(part) for part in torch.split(x, _CHUNK)])


def _grows(values: Numbers) -> bool:
    """Whether values never fall, and some rise; in single precision, time stamps may repeat."""
    return bool(len(values) > _FEW and (np.diff(values) >= 0).all() and values[-1] > values[0])


class SignalModule(DomainDataModule):
    """Windows of recordings, with channels in one order and at one rate at all clients.

    A window has shape (channels, samples), float32. With ``features`` it becomes 13 numbers of each channel: mean,
    standard deviation, quantiles of 5, 25, 50, 75 and 95 %, mean absolute difference, and log power in five bands.
    Windows without a label are left out, but in recordings of the target that have none. Infinite values are missing.

    Windows may overlap, and no two parts of a split share a sample. Held-out recordings are whole ones, if a client has
    enough of them; otherwise they are the first and the last windows of each class, and training windows that overlap
    them are left out. Windows of a transductive target that overlap one with a label in training do not score.

    When training starts, clients sum over the channel ``"scales"`` how many have each channel at which scale. A client
    warns if its own scale differs about tenfold from that of most others.

    Args:
        window: Length of a window, in ``unit``.
        stride: From one window to the next, in ``unit``; ``None`` is half a window.
        unit: ``"seconds"`` or ``"samples"`` (at ``rate``), of ``window``, ``stride`` and ``fill``.
        rate: Samples a second of the windows, to which recordings are resampled; ``None`` keeps that of the recordings,
            which must be the same at all clients.
        recorded_rate: Samples a second of recordings that have neither time stamps nor a rate.
        channels: Names of the channels, in the order in which a model sees them; ``None`` takes all, in the order of
            the first recording.
        magnitudes: Further channels, each with the names of those whose Euclidean length it is, such as
            ``{acceleration: [x, y, z]}``.
        classes: Names of the classes to keep, in the order of their labels; ``None`` takes those of the recordings
            that are here, sorted. Samples of other classes have no label.
        label_rule: A window's label is that of all of its samples (``"all"``), and windows across a change of label
            are left out; or that of more than half of them (``"majority"``).
        fill: Longest run of missing values, or gap between time stamps, that is filled by linear interpolation;
            windows with longer ones are left out, with a warning. 0 fills none.
        features: Compute features of each window, for linear classifiers.
        normalise: Of windows: ``"client"`` standardises each channel with mean and deviation of the client's training
            windows, ``"window"`` with its own, ``"none"`` leaves units; of features as `FeatureDomains`. ``None`` is
            ``"client"``, and ``"ranks"`` of features.
        split_by: Hold out whole ``"recordings"``, or ``"blocks"`` of successive windows of each class; ``None`` takes
            recordings where that leaves each part some, and training all classes.
        target: The domain that is adapted to; ``None`` takes the last of the clients.
        kwargs: See `DomainDataModule`.
    """

    spread = True

    def __init__(
        self,
        *,
        window: float,
        stride: float | None = None,
        unit: Literal["seconds", "samples"] = "seconds",
        rate: float | None = None,
        recorded_rate: float | None = None,
        channels: list[str] | None = None,
        magnitudes: dict[str, list[str]] | None = None,
        classes: list[str] | None = None,
        label_rule: Literal["all", "majority"] = "all",
        fill: float = 0.0,
        features: bool = False,
        normalise: Normalise | WindowNormalise | None = None,
        split_by: SplitBy | None = None,
        target: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(target=target, **kwargs)
        check_one_of("unit", unit, ("seconds", "samples"))
        check_one_of("label_rule", label_rule, ("all", "majority"))
        check_one_of("split_by", split_by, (None, *get_args(SplitBy)))
        check_list("classes", classes)
        check_classes(classes)
        check_list("channels", channels)
        if channels is not None:
            check_once(channels, "channels", "name each once")
        allowed = get_args(Normalise if features else WindowNormalise)
        self.normalise = ("ranks" if features else "client") if normalise is None else normalise
        check_one_of(f"normalise (of {'features' if features else 'windows'})", self.normalise, allowed)
        seconds = unit == "seconds"
        self.window_rules = WindowRules(window, stride, seconds, rate, recorded_rate, fill, label_rule == "majority")
        self.magnitudes = {name: [*group] for name, group in (magnitudes or {}).items()}
        self.features, self.split_by = features, split_by
        self._channels = None if channels is None else tuple(channels)
        self._names_channels = channels is not None
        self._wanted = classes
        self._found_classes: list[str] | None = None
        self._windows: dict[str, Windows] = {}
        self._scales: dict[str, Tensor] = {}
        self._shape: Shape | None = None

    @abstractmethod
    def recordings(self, domain: str) -> list[Recording]:
        """Return the recordings of a domain, in a fixed order."""

    # ---------------------------------------------------------------- classes and channels

    def class_names(self) -> list[str]:
        """Return ``classes``, or those of all recordings that are here, sorted."""
        if self._wanted is not None:
            return self._wanted
        if self._found_classes is None:
            here = self._names_here()
            found = {name for client in here for each in self.recordings(client) for name in each.classes}
            numeric = all(name.removeprefix("-").isdecimal() for name in found)
            names = sorted(sorted(found), key=int if numeric else str)
            for group in alike(names):
                way_out = "write it in one way, or name all in classes if they are different"
                got = f"{shown(group)}, which differ in {difference(group)}"
                refuse_data("classes", "different names", got, way_out)
            way_out = "name all in classes, in the order that all processes have"
            check_data(len(names) > 1, f"classes of the recordings of {here}", "at least 2", names, way_out)
            self._found_classes = names
        return self._found_classes

    def channel_names(self) -> list[str]:
        """Return the channels that a model sees, in order; without those of ``magnitudes``, which follow."""
        if self._channels is None:
            first = self._names_here()[0]
            self._channels = self.recordings(first)[0].channels
        for argument, group in self.magnitudes.items():
            for name in group:
                check_one_of(f"magnitudes[{argument!r}]", name, self._channels)
        return [*self._channels]

    # ---------------------------------------------------------------- windows

    def windows(self, domain: str) -> Windows:
        """Return the windows of a domain that is here, in the units of the recordings."""
        self._check_here(domain)
        names = self.channel_names()
        recordings = []
        for each in self.recordings(domain):
            extra = [name for name in each.channels if name not in names]
            way_out = "name the channels that all recordings have in channels"
            rule = f"those of the first recording, {names}"
            # of channels that the user names, others are left out
            check_data(not extra or self._names_channels, f"channels of {each.name}", rule, f"also {extra}", way_out)
            recordings.append(each.selected(names))
        check_data(bool(recordings), "clients", "of domains with recordings", domain, "give it some, or leave it out")
        growing = [name for index, name in enumerate(names) if all(_grows(each.x[:, index]) for each in recordings)]
        if growing and not self._names_channels:
            warnings.warn(
                f"channels {growing} of client {domain!r} only ever grow in its recordings, as time stamps and row "
                "numbers do, and tell a network where in a recording a window is: name the column in time, or the "
                "channels in channels",
                stacklevel=2,
            )
        twice = f"recordings of client {domain!r}"
        check_once([each.name for each in recordings], twice, "give each another name")
        return self.window_rules.cut(domain, recordings, self.class_names(), domain == self.target)

    def load(self, domain: str) -> Domain:
        """Return windows of a domain, shape (n, channels, samples), and their labels."""
        windows = self.windows(domain)
        # without the samples, which are kept once alone, as they are when they are normalised
        self._windows[domain] = replace(windows, x=windows.x.new_empty(0, *windows.x.shape[1:]))
        self._scales[domain] = windows.x.double().square().mean(dim=(0, 2)).sqrt()
        return Domain(windows.x, windows.y)

    def _make_split(self, name: str, y: Tensor) -> Split:
        windows = self._windows[name]

        def hold_out(y: Tensor, val: float, test: float, generator: torch.Generator, blind: bool) -> Parts:
            return split_windows(name, windows, self.split_by, val, test, generator, blind)

        split = self._rules.split(name, y, True, name == self.target, self.seed, hold_out)
        if name == self.target and self.transductive and self.target_labels:
            seen = overlaps(windows, split.test, split.labelled)
            rule = f"below what leaves target {name!r} windows to score that overlap none with a label in training"
            check(
                not bool(seen.all()),
                "target_labels",
                rule,
                self.target_labels,
                "lower it, or give a stride of a window",
            )
            split = Split(split.train, split.val, split.test[~seen], split.labelled)
        return split

    def ids(self, client: str, stage: str) -> list[str]:
        """Return each window's recording, and where it begins, in seconds or (without a rate) in samples."""
        texts = []
        for name in self._members(client):
            self._domain(name)
            texts += self._windows[name].texts()
        positions: Tensor = getattr(self.split(client), "test" if stage == "predict" else stage)
        return [texts[position] for position in positions.tolist()]

    def _sample_shape(self) -> Shape:
        # a process without data has received it from the others
        return self._shape if self.elsewhere and self._shape is not None else super()._sample_shape()

    # ---------------------------------------------------------------- normalisation

    def finish(self, x: Tensor, train: Tensor) -> Tensor:
        """Compute what a model takes, with statistics of the windows at ``train``."""
        return in_parts(self._network(x[train]), x)

    def _network(self, train: Tensor) -> SignalNetwork:
        """Prepares windows, with statistics of those in training."""
        names = self.channel_names()
        groups = [[names.index(name) for name in group] for group in self.magnitudes.values()]
        network = SignalNetwork(groups, self.features, nn.Identity())
        if self.normalise == "window":
            network.normalise = WindowScaling()
        elif self.normalise != "none":
            prepared = in_parts(network.prepare, train)
            if self.features:
                network.normalise = feature_normaliser(self.normalise, prepared)  # type: ignore[arg-type]
            else:
                mean, deviation = feature_moments(prepared.transpose(1, 2).flatten(0, 1).double())
                network.normalise = VectorNetwork(mean.float()[:, None], deviation.float()[:, None], unit=False)
        return network

    def raw_inputs(self) -> RawInputs:
        """Return windows of the target in the units of its recordings, and the network that prepares them."""
        windows = self.windows(self.target)
        self._domain(self.target)
        network = self._network(windows.x[self.split(self.target).train])
        rate = "" if windows.rate is None else f" at {windows.rate:g} samples a second"
        how = {
            "none": "takes them as they are", "window": "standardises each channel of each window",
            "client": "standardises channels with mean and deviation of the target's training windows",
        } | HOW  # fmt: skip
        computed = [*self.magnitudes, *(["features of each window"] if self.features else [])]
        computes = f"computes {', '.join(computed)} and " if computed else ""
        text = (
            f"Windows of {windows.x.shape[-1]} samples{rate}, channels {', '.join(self.channel_names())}, in the units "
            f"of the recordings; the model {computes}{how[self.normalise]} by itself."
        )
        return RawInputs(network, windows.x[:1] * 0, text)

    # ---------------------------------------------------------------- facts that clients announce

    @property
    def channels(self) -> tuple[Summed, ...]:
        """The channel of a federation over which clients compare scales."""
        return (SCALES,)

    def facts(self, client: str) -> dict[str, Any]:
        """Return what a client announces: as the base class, its channels and the rate of its windows."""
        facts = super().facts(client)
        members = [self._windows[name] for name in self._members(client)]
        for name, each in zip(self._members(client), members, strict=True):
            is_hidden = name == self.target and not self.target_labels
            if len(torch.unique(each.y)) == 1 and int(each.y[0]) >= 0 and not is_hidden:
                warnings.warn(
                    f"client {name!r} has windows of one class alone ({self.class_names()[int(each.y[0])]!r}, in "
                    f"{shown(each.names[:3])}): methods that balance or match classes have little to learn from; see "
                    "whether labels or recordings are missing",
                    stacklevel=2,
                )
        rates = [None if each.rate is None else float(f"{each.rate:.6g}") for each in members]
        return facts | {"channels": self.channel_names(), "rate": rates[0]}

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """As the base class; and channels, their order and the rate of windows must be the same at all clients."""
        agreed("channels", facts, "name the channels in channels, in one order, in the configuration of each client")
        agreed("rate", facts, "give rate, to which all are resampled, in the configuration of each client")
        super().check_facts(facts)
        self._warn_of_unseen([each["has"] for name, each in facts.items() if name != self.target])
        self._shape = next(iter(facts.values()))["shapes"][0]

    def setup(self, stage: str | None = None) -> None:
        """As the base class; and compare the scales of channels with the other clients'."""
        super().setup(stage)
        federation = self._federation()
        if federation is None and stage == "fit":
            sources = [client.name for client in self.check_roster() if not client.is_target]
            if self._wanted is not None and all(map(self.is_here, sources)):
                self._warn_of_unseen([self._classes_of(name, [self.labels(name)]) for name in sources])
        elif federation is not None and stage == "fit":
            federation.channels.declare(self.channels)  # of a Trainer with another strategy
            self._compare_scales(total_over(federation, self._members))

    def _warn_of_unseen(self, has: Sequence[Sequence[bool] | None]) -> None:
        """Warn of a class that is named and that no source has; each source says which classes it has."""
        if self._wanted is None:
            return
        seen = [any(of_class) for of_class in zip(*filter(None, has), strict=True)]
        unseen = [name for name, is_seen in zip(self._wanted, seen, strict=False) if not is_seen]
        if unseen:
            warnings.warn(
                f"no source has a window of {unseen}, of classes={self._wanted}: see whether they are spelt as in the "
                "recordings, whose windows of other classes are left out",
                stacklevel=2,
            )

    def _compare_scales(self, total: Callable[[str, Callable[[str], Tensor]], Tensor | None]) -> None:
        """Warn if the scale of a channel of a client differs from that of most others."""
        from fedlit.functional.table_moments import needed_exponents

        def marks(domain: str) -> Tensor:
            self._domain(domain)
            # a power of the scale, so that powers of two tell apart more of them
            return needed_exponents(self._scales[domain] ** _FINENESS)

        everyone = total(SCALES.name, marks)
        if everyone is None:
            return
        for client in self._local_names():
            for domain in self._members(client):
                self._warn_of_scales(domain, marks(domain), everyone.round())

    def _warn_of_scales(self, domain: str, own: Tensor, everyone: Tensor) -> None:
        others = everyone - own
        for name, mine, theirs in zip(self.channel_names(), own, others, strict=True):
            if not mine.any() or not theirs.any():
                continue
            distance = torch.arange(len(mine)) - int(mine.argmax())
            if 2 * theirs[distance.abs() < _TENFOLD].sum() < theirs.sum():
                ratio = 2 ** (float((theirs * distance).sum() / theirs.sum()) / _FINENESS)
                warnings.warn(
                    f"channel {name!r} of client {domain!r} has a scale that differs about tenfold or more from that "
                    f"of most other clients (1 to {ratio:.3g} on average; {shown(self._windows[domain].names[:3])}): "
                    "see whether it is in the same unit, and scale it in its files if not",
                    stacklevel=2,
                )
