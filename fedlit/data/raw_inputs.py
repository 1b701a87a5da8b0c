"""Samples before they are normalised, and networks that normalise them: for models that are exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlit.data.intensities import BYTES, Scale


@dataclass(frozen=True)
class RawInputs:
    """Samples as their owner has them.

    Args:
        network: From raw samples, shape (n, ...), to what the networks of a run take.
        sample: One of them, shape (1, ...), in their type.
        words: What a sample is, for people.
    """

    network: nn.Module
    sample: Tensor
    words: str


@dataclass(frozen=True)
class RawRows(RawInputs):
    """Rows of a table, whose numbers are float64, NaN where one is missing, and whose categories are codes.

    Args:
        columns: Names, each with the levels of a category, whose codes are their indices, or ``None`` for a number.
        missing: Level that stands for a missing value of a category.
        reading: Arguments by which pandas reads the file of such a table.
    """

    columns: tuple[tuple[str, tuple[str, ...] | None], ...]
    missing: str
    reading: Mapping[str, Any] = field(default_factory=dict)

    def codes(self, name: str, values: Sequence[str | None]) -> list[int]:
        """Return codes of a category's values, -1 for one that is no level; ``None`` is a missing one."""
        code = {level: number for number, level in enumerate(dict(self.columns)[name] or ())}
        return [code.get(self.missing if value is None else value, -1) for value in values]


class _Standardising(nn.Module):
    """Keeps a mean and a deviation, by which it standardises samples."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def standardise(self, x: Tensor) -> Tensor:
        """Samples with mean 0 and deviation 1."""
        return (x - self.mean) / self.deviation


class PixelNetwork(_Standardising):
    """Pixels, by default bytes, to numbers from 0 to 1, normalised by mean and standard deviation of each channel."""

    def __init__(self, mean: Sequence[float], deviation: Sequence[float], scale: Scale = BYTES) -> None:
        super().__init__(torch.tensor(mean).view(-1, 1, 1), torch.tensor(deviation).view(-1, 1, 1))
        self.scale = scale

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalise images of shape (n, channels, height, width), or with one for all channels, to float32."""
        return self.standardise(self.scale(pixels))


class VectorNetwork(_Standardising):
    """Standardises features, and scales samples to length 1 if asked to (``unit``)."""

    def __init__(self, mean: Tensor, deviation: Tensor, unit: bool) -> None:
        super().__init__(mean, deviation)
        self.unit = unit

    def forward(self, x: Tensor) -> Tensor:
        """Normalise samples of shape (n, d), float32."""
        x = self.standardise(x)
        return F.normalize(x, dim=1, eps=torch.finfo(x.dtype).tiny) if self.unit else x


class RankNetwork(nn.Module):
    """Features to `normal_scores` among samples ``x``, shape (n, d), and then to length 1.

    Scores between two values of ``x`` are interpolated; beyond all, that of the nearest is taken. All values of ``x``
    are kept, each feature's in order.
    """

    values: Tensor
    scores: Tensor

    def __init__(self, x: Tensor) -> None:
        from fedlit.functional import normal_scores  # whose libraries other data have no use for

        super().__init__()
        values = x.float().sort(dim=0).values
        self.register_buffer("values", values.T.contiguous())
        self.register_buffer("scores", normal_scores(values).T.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """Rank and scale samples of shape (m, d), float32."""
        columns = x.float().T.contiguous()
        last = self.values.shape[1] - 1
        above = self._number_below(columns, torch.lt).clamp(max=last)
        under = (self._number_below(columns, torch.le) - 1).clamp(min=0)
        start, end = self.values.gather(1, under), self.values.gather(1, above)
        # of one of their values, and beyond all, both ends are the same
        along = ((columns - start) / torch.where(end > start, end - start, 1.0)).clamp(0.0, 1.0)
        scores = torch.lerp(self.scores.gather(1, under), self.scores.gather(1, above), along)
        return F.normalize(scores.T, dim=1)

    def _number_below(self, columns: Tensor, below: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Count values below each number by bisection, as `torch.searchsorted`, which ONNX does not have."""
        size = self.values.shape[1]
        count = torch.zeros_like(columns, dtype=torch.int64)
        for step in (2**power for power in reversed(range(size.bit_length()))):
            further = count + step
            fits = (further <= size) & below(self.values.gather(1, further.clamp(max=size) - 1), columns)
            count = torch.where(fits, further, count)
        return count


class ZeroIsMissing(nn.Module):
    """Replaces 0 by NaN in ``columns`` (indices, of ``width``) whose zeros stand for missing values."""

    zeros: Tensor

    def __init__(self, columns: Sequence[int], width: int) -> None:
        super().__init__()
        self.register_buffer("zeros", torch.tensor([index in columns for index in range(width)]))

    def forward(self, table: Tensor) -> Tensor:
        """Replace zeros of rows of shape (n, width), floating."""
        return torch.where(self.zeros & (table == 0), torch.nan, table)


class TableNetwork(_Standardising):
    """Standardises numbers, marks those that are missing, and chooses among levels: `TableFeatures`, as a network.

    Args:
        numbers: Indices of columns of numbers.
        marked: Indices of those of which a missing one is marked.
        categories: Index and number of levels of each category.
        mean: Of each number, which replaces missing ones.
        deviation: Of each number; where it is 0, a number is centred alone.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        marked: Sequence[int],
        categories: Sequence[tuple[int, int]],
        mean: Sequence[float],
        deviation: Sequence[float],
    ) -> None:
        deviations = torch.tensor(deviation, dtype=torch.float64)
        super().__init__(torch.tensor(mean, dtype=torch.float64), torch.where(deviations > 0, deviations, 1.0))
        self.numbers, self.marked, self.categories = list(numbers), list(marked), list(categories)

    def forward(self, table: Tensor) -> Tensor:
        """Return features, shape (n, d), float32, of rows of shape (n, columns), float64."""
        x = table[:, self.numbers]
        parts = [torch.where(x.isnan(), 0.0, self.standardise(x)), table[:, self.marked].isnan().double()]
        for index, number in self.categories:
            parts.append((table[:, index, None] == torch.arange(number, dtype=torch.float64)).double())
        return torch.cat(parts, dim=1).float()
