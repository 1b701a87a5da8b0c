"""Samples of one client: a domain as it is loaded, datasets that read batches of it, and errors about data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from fedlit.checks import check, refuse
from fedlit.federation.labels import known_labels
from fedlit.federation.nested import Inputs, Rows, concatenate, mapped, num_samples, take

Transform = Callable[[Tensor], Tensor]


class DatasetNotFoundError(FileNotFoundError):
    """The data are not where they were looked for; the message states where that was and where to get them."""


class DatasetLayoutError(ValueError):
    """Data were found but are laid out in another way than the data module reads."""


def refuse_data(what: str, rule: str, shown: object, way_out: str = "") -> NoReturn:
    """`refuse` data by a `DatasetLayoutError`: ``what`` is a file, a column or an argument, ``shown`` what it has."""
    refuse(what, rule, shown, way_out, DatasetLayoutError, shown=str(shown))


def check_data(holds: bool, what: str, rule: str, shown: object, way_out: str = "") -> None:
    """`refuse_data` unless the rule holds."""
    if not holds:
        refuse_data(what, rule, shown, way_out)


@dataclass(frozen=True)
class Domain:
    """All samples of one domain, before they are split.

    Args:
        x: Samples: a tensor of shape (n, ...), a structure of such tensors, or whatever `DomainDataModule.dataset` of
            the subclass reads.
        y: Classes, int64, shape (n,); in regression numbers, floating, shape (n,) or (n, k).
    """

    x: Any
    y: Tensor


class BatchReader(Dataset[tuple[Inputs, Tensor]]):
    """A dataset that is read a batch at a time."""

    def batch(self, indices: Tensor) -> tuple[Inputs, Tensor]:
        """Return transformed samples and labels at ``indices`` (int64, shape (b,))."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Inputs, Tensor]:
        x, y = self.batch(torch.tensor([index]))
        return mapped(lambda leaf: leaf[0], x), y[0]


class DomainDataset(BatchReader):
    """Samples of one client, in memory and read a batch at a time.

    Args:
        x: Samples, shape (n, ...); or several tensors of n samples, such as a dictionary of them.
        y: Classes, int64, shape (n,), -1 (`UNLABELLED`) where hidden; or numbers, floating, shape (n,) or (n, k), NaN
            where hidden.
        transform: Applied to each batch of samples. It may draw from the global random generators of torch, numpy and
            Python, which the loader seeds for each batch from seed, client and batch alone. Draws from a generator
            that the transform holds depend on processes and resumes.
        augments: Whether ``transform`` draws random numbers for certain. ``False`` takes it for one that may, unless it
            is one of fedlit's or has an attribute ``draws`` that is false.

    Attributes:
        labelled_indices: Positions whose label is known, or ``None`` when all are.
    """

    def __init__(self, x: Inputs, y: Tensor, transform: Transform | None = None, augments: bool = False) -> None:
        check(num_samples(x) == len(y), "y", f"as long as x ({num_samples(x)} samples)", y, shown=str(len(y)))
        self.x = x
        self.y = y if y.is_floating_point() else y.long()
        self.transform = transform
        self.augments = augments or may_draw(transform)
        self.labelled_indices = labelled_positions(self.y)

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, indices: Tensor) -> tuple[Inputs, Tensor]:
        """Return transformed samples and labels at ``indices`` (int64, shape (b,))."""
        x, y = self.stored(indices)
        return (x if self.transform is None else self.transform(x)), y

    def stored(self, rows: Rows) -> tuple[Inputs, Tensor]:
        """Return samples before they are transformed, and labels."""
        return take(self.x, rows), self.y[rows]


class PooledDataset(BatchReader):
    """Samples of several domains, one domain after the other; the parts have a ``batch`` method."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self.ends = torch.tensor([len(part) for part in self.parts]).cumsum(0)
        self.augments = any(part.augments for part in self.parts)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def batch(self, indices: Tensor) -> tuple[Inputs, Tensor]:
        """As `BatchReader.batch`."""
        return self._gather(indices, "batch")

    @property
    def stored(self) -> Callable[[Rows], tuple[Inputs, Tensor]] | None:
        """Reader of samples before they are transformed, and labels; ``None`` if a part has none."""
        readable = all(hasattr(part, "stored") for part in self.parts)
        return (lambda rows: self._gather(torch.arange(len(self))[rows], "stored")) if readable else None

    @property
    def transform(self) -> Transform | None:
        """That of the first part which has one."""
        return next(filter(None, (getattr(part, "transform", None) for part in self.parts)), None)

    def _gather(self, indices: Tensor, method: Literal["batch", "stored"]) -> tuple[Inputs, Tensor]:
        owner = torch.searchsorted(self.ends, indices, right=True)
        order, batches = [], []
        for number, part in enumerate(self.parts):
            positions = (owner == number).nonzero().squeeze(1)
            if len(positions):
                order.append(positions)
                batches.append(getattr(part, method)(indices[positions] - (self.ends[number] - len(part))))
        back = torch.cat(order).argsort()
        return take(concatenate([x for x, _ in batches]), back), torch.cat([y for _, y in batches])[back]


def pooled(parts: Sequence[Dataset[Any]]) -> Dataset[Any]:
    """Join datasets of several domains."""
    return PooledDataset(parts) if all(hasattr(part, "batch") for part in parts) else ConcatDataset(parts)


def labelled_positions(y: Tensor) -> Tensor | None:
    """Return positions of known labels in ``y``, or ``None`` when all are."""
    known = known_labels(y)
    return None if bool(known.all()) else known.nonzero().squeeze(1)


def flatten(x: Tensor) -> Tensor:
    """Flatten each sample of a batch to one vector."""
    return x.flatten(1)


def to_unit(x: Tensor) -> Tensor:
    """Convert bytes to floats in [0, 1]; floats stay as they are."""
    return x.float() / 255 if x.dtype == torch.uint8 else x


def may_draw(transform: Callable[[Tensor], Tensor] | None) -> bool:
    """Return whether a transform may draw random numbers: any may, but those named here and with ``draws`` False."""
    return transform not in (None, flatten, to_unit) and getattr(transform, "draws", True)
