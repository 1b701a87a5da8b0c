"""Which of a client's samples train, validate and test, and which of the target's keep their labels."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlit.federation.streams import stable_seed


def stratified_split(
    y: Tensor, val_fraction: float, test_fraction: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of training, validation and test samples: disjoint, covering, ascending, with equal class shares.

    Fractions in [0, 1) are of all samples. Of each class, the number held out is within one of its exact share, and one
    sample always stays in training.
    """
    order = torch.randperm(len(y), generator=generator)
    labels: Tensor = torch.unique(y)
    labels = labels[torch.randperm(len(labels), generator=generator)]  # so that ties in `apportion` favour no class
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


def shuffled_by_class(y: Tensor, num_classes: int, *stream: object) -> list[Tensor]:
    """Positions of each class's samples in random order; the same name (``stream``) gives the same order."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(stable_seed(*stream)))
    return [order[y[order] == label] for label in range(num_classes)]


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
    """``number`` of the ``candidates`` (int64, shape (n,)), ascending, each equally likely."""
    return candidates[torch.randperm(len(candidates), generator=generator)[:number]].sort().values


def balanced_choice(y: Tensor, candidates: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """``number`` of the ``candidates`` (positions in ``y``), ascending, with as equal class counts as possible."""
    order = candidates[torch.randperm(len(candidates), generator=generator)]
    labels: Tensor = torch.unique(y)
    labels = labels[torch.randperm(len(labels), generator=generator)]
    # Take a first sample of each class, then a second of each, and so on.
    queue = [(nth, place, int(i)) for place, c in enumerate(labels) for nth, i in enumerate(order[y[order] == c])]
    return torch.tensor(sorted(position for _, _, position in sorted(queue)[:number]), dtype=torch.int64)
