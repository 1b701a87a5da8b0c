"""Splits of a client's samples into training, validation and test, and the choice of labels that the target keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

import torch
from torch import Tensor

from fedlit.checks import check, check_one_of, refuse
from fedlit.federation.errors import RosterError
from fedlit.federation.labels import UNLABELLED, known_labels
from fedlit.federation.streams import stable_seed

Parts = tuple[Tensor, Tensor, Tensor]
"""Positions of training, validation and test samples."""

HoldOut = Callable[[Tensor, float, float, torch.Generator, bool], Parts]
"""Splits samples with these labels, by the shares for validation and test; for validation blindly, or by class."""


@dataclass(frozen=True)
class Split:
    """Positions of a client's samples, each ascending; ``labelled`` are those of ``train`` with labels in training."""

    train: Tensor
    val: Tensor
    test: Tensor
    labelled: Tensor


@dataclass(frozen=True)
class SplitRules:
    """How every client's samples are split; `DomainDataModule` documents the arguments."""

    val_fraction: float
    test_fraction: float
    target_labels: int | float
    target_label_draw: Literal["random", "balanced"]
    transductive: bool

    def __post_init__(self) -> None:
        for name in ("val_fraction", "test_fraction"):
            fraction = getattr(self, name)
            check(isinstance(fraction, Real), name, "a number in [0, 1)", fraction, error=TypeError)
            check(0 <= fraction < 1, name, "in [0, 1)", fraction, "it is a share of each client's samples")
        rule = f"below 1 together with test_fraction ({self.test_fraction})"
        check(self.val_fraction + self.test_fraction < 1, "val_fraction", rule, self.val_fraction, "some must train")
        labels = self.target_labels
        rule = "a number of samples (an integer, at least 0) or a share of them (a float in (0, 1])"
        check(isinstance(labels, (Integral, float)), "target_labels", rule, labels, error=TypeError)
        fits = labels >= 0 and (labels <= 1 or not isinstance(labels, float))
        check(fits and not isinstance(labels, bool), "target_labels", rule, labels)
        check_one_of("target_label_draw", self.target_label_draw, ("random", "balanced"))

    def split(
        self, name: str, y: Tensor, stratified: bool, is_target: bool, seed: int, hold_out: HoldOut | None = None
    ) -> Split:
        """Split the samples of client ``name``, which depends on them and the seed alone.

        Of a target without labels, validation samples are drawn as if it had none: a choice by them would know their
        class shares otherwise. ``hold_out`` takes the place of `stratified_split`.

        Raises:
            RosterError: If they are too few.
            ValueError: If the target has too few labels for ``target_labels``.
        """
        generator = torch.Generator().manual_seed(stable_seed(seed, "split", name))
        known = known_labels(y)
        blind = is_target and not self.target_labels
        if not stratified:  # one stratum, and one of samples without labels
            y = torch.zeros_like(known, dtype=torch.int64) if blind else torch.where(known, 0, UNLABELLED)
            blind = False
        # a transductive target is tested on all samples, and its validation samples are drawn from all
        test_fraction = 0.0 if blind and self.transductive else self.test_fraction
        train, val, test = (hold_out or stratified_split)(y, self.val_fraction, test_fraction, generator, blind)
        for part, positions, fraction in (("val", val, self.val_fraction), ("test", test, test_fraction)):
            rule = f"enough for one of the {len(y)} samples of client {name!r}, beside a training sample of each class"
            way_out = "raise it, set it to 0, or leave the client out of clients"
            check(fraction == 0 or len(positions) > 0, f"{part}_fraction", rule, fraction, way_out, RosterError)
        if not is_target:
            return Split(train, val, test, train)
        candidates = train
        if self.transductive:
            train = test = torch.arange(len(y))
            candidates = train[~torch.isin(train, val)]
        candidates = candidates[known[candidates]]
        number = self._num_labels(name, len(train), int(known[train].sum()), len(candidates))
        generator = torch.Generator().manual_seed(stable_seed(seed, "target_labels", name))
        if self.target_label_draw == "balanced":
            labelled = balanced_choice(y, candidates, number, generator)
        else:
            labelled = random_choice(candidates, number, generator)
        if self.transductive:
            test = test[~torch.isin(test, labelled)]  # samples whose labels are trained on would score too high
        return Split(train, val, test, labelled)

    def _num_labels(self, target: str, num_train: int, num_known: int, num_candidates: int) -> int:
        """Number of training labels that the target keeps."""
        asked = self.target_labels
        number = max(1, round(asked * num_known)) if isinstance(asked, float) and asked > 0 else int(asked)
        if number > num_candidates:
            held_out = "; transductive holds out the validation samples" if self.transductive else ""
            whose = "training samples" if num_known == num_train else "training samples with labels"
            rule = f"at most what target {target!r} has: {num_candidates} {whose} to choose from{held_out}"
            refuse("target_labels", rule, asked, "lower target_labels")
        if self.transductive and number == num_train:
            rule = f"below all {num_train} samples of target {target!r}, which leaves transductive none to test on"
            refuse("target_labels", rule, asked, "lower target_labels or set transductive=False")
        return number


def stratified_split(
    y: Tensor, val_fraction: float, test_fraction: float, generator: torch.Generator, blind: bool = False
) -> Parts:
    """Return positions of training, validation and test samples: disjoint, covering, ascending, equal in class shares.

    Fractions in [0, 1) are of all samples. Of each class, the number held out is within one of its exact share, and one
    sample always stays in training. If ``blind``, validation samples are drawn from all others, whatever their class.
    """
    if blind:
        rest, _, tested = stratified_split(y, 0.0, test_fraction, generator)
        share = val_fraction * len(y) / len(rest)
        trained, held, _ = stratified_split(torch.zeros_like(rest), share, 0.0, blind_generator(generator))
        return rest[trained], rest[held], tested
    order = torch.randperm(len(y), generator=generator)
    labels = _shuffled_labels(y, generator)
    groups = [order[y[order] == label] for label in labels]
    counts = torch.tensor([len(group) for group in groups])
    num_test = apportion(counts, test_fraction, counts - 1)
    num_val = apportion(counts, val_fraction, counts - 1 - num_test)
    train, val, test = [], [], []
    for group, tests, vals in zip(groups, num_test.tolist(), num_val.tolist(), strict=True):
        test.append(group[:tests])
        val.append(group[tests : tests + vals])
        train.append(group[tests + vals :])
    return tuple(torch.cat(part).sort().values for part in (train, val, test))  # type: ignore[return-value]


def published_split(is_test: Tensor) -> HoldOut:
    """Hold out the samples that a publication tests on, and for validation a share of the others.

    Args:
        is_test: Which samples these are, shape (n,).
    """

    def hold_out(
        y: Tensor, val_fraction: float, test_fraction: float, generator: torch.Generator, blind: bool
    ) -> Parts:
        others = (~is_test).nonzero().squeeze(1)
        train, val, _ = stratified_split(y[others], val_fraction, 0.0, generator, blind)
        return others[train], others[val], is_test.nonzero().squeeze(1)

    return hold_out


def blind_generator(generator: torch.Generator) -> torch.Generator:
    """Return one of the same seed that labels have not moved on: a split draws as often as there are classes."""
    return torch.Generator().manual_seed(stable_seed(generator.initial_seed(), "validation"))


def _shuffled_labels(y: Tensor, generator: torch.Generator) -> Tensor:
    """Return the labels that occur, in random order, so that ties favour no class."""
    labels: Tensor = torch.unique(y)
    return labels[torch.randperm(len(labels), generator=generator)]


def shuffled_by_class(y: Tensor, num_classes: int, *stream: object) -> list[Tensor]:
    """Return positions of each class's samples in random order, fixed by the name (``stream``)."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(stable_seed(*stream)))
    return [order[y[order] == label] for label in range(num_classes)]


def kept_of_each_class(y: Tensor, number: int | None, num_classes: int, *stream: object) -> Tensor:
    """Return positions of ``number`` samples at most (``None`` for all), in the class shares of all, ascending.

    Which, is fixed by the name (``stream``).
    """
    if number is None or len(y) <= number:
        return torch.arange(len(y))
    members = shuffled_by_class(y, num_classes, *stream)
    counts = torch.bincount(y, minlength=num_classes)
    numbers = apportion(counts, number / len(y), counts).tolist()
    return torch.cat([group[:size] for group, size in zip(members, numbers, strict=True)]).sort().values


def apportion(counts: Tensor, fraction: float, room: Tensor) -> Tensor:
    """Deal ``round(fraction * counts.sum())`` seats to groups by largest remainders, at most ``room`` to each."""
    exact = counts.double() * fraction
    seats = torch.minimum(exact.floor().long(), room)
    left = round(fraction * int(counts.sum())) - int(seats.sum())
    for group in (exact - seats).argsort(descending=True, stable=True).tolist():
        if left > 0 and exact[group] > seats[group] and seats[group] < room[group]:
            seats[group] += 1
            left -= 1
    return seats


def random_choice(candidates: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Draw ``number`` of the ``candidates`` (int64, shape (n,)), ascending, each equally likely."""
    return candidates[torch.randperm(len(candidates), generator=generator)[:number]].sort().values


def balanced_choice(y: Tensor, candidates: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Draw ``number`` of the ``candidates`` (positions in ``y``), ascending, with class counts as equal as possible."""
    order = candidates[torch.randperm(len(candidates), generator=generator)]
    labels = _shuffled_labels(y, generator)
    # a first sample of each class, then a second of each, and so on
    queue = [(nth, rank, int(i)) for rank, c in enumerate(labels) for nth, i in enumerate(order[y[order] == c])]
    return torch.tensor(sorted(position for _, _, position in sorted(queue)[:number]), dtype=torch.int64)
