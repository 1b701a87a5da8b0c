"""Features: from the columns of a table to the numbers that a network takes, by what all clients have agreed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedlit.data.raw_inputs import RawRows, TableNetwork
from fedlit.data.tables.columns import MISSING
from fedlit.data.tables.numbers import texts_of

if TYPE_CHECKING:
    import pandas as pd
    from sklearn.compose import ColumnTransformer


@dataclass(frozen=True)
class Column:
    """A column, as all clients have it.

    Args:
        name: As in the tables.
        missing: Whether a value is missing at some client.
        levels: Of a category, sorted; ``None`` for numbers.
    """

    name: str
    missing: bool
    levels: tuple[str, ...] | None = None


@dataclass(frozen=True)
class TableFeatures:
    """Makes features of tables.

    A number is standardised, and a missing one is the mean, with a mark beside it if any client misses one. A category
    is a one for its level and zeros for the others; all zeros if it is none of them.

    Args:
        columns: In the order in which features follow one another: of all numbers first, then marks, then categories.
        mean: Of each number, in the order of ``columns``.
        deviation: Of each number; 0 where a column is constant, which is centred alone.
    """

    columns: tuple[Column, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @property
    def numbers(self) -> list[str]:
        """Columns of numbers."""
        return [column.name for column in self.columns if column.levels is None]

    @property
    def marked(self) -> list[str]:
        """Columns of numbers of which a missing one is marked."""
        return [column.name for column in self.columns if column.levels is None and column.missing]

    @property
    def categories(self) -> dict[str, list[str]]:
        """Levels of each category, the one for missing values last."""
        return {
            column.name: [*column.levels, *([MISSING] if column.missing else [])]
            for column in self.columns
            if column.levels is not None
        }

    @property
    def names(self) -> list[str]:
        """Names of the features."""
        levels = [f"{name}={level}" for name, some in self.categories.items() for level in some]
        return [*self.numbers, *(f"{name} missing" for name in self.marked), *levels]

    def of(self, table: pd.DataFrame) -> Tensor:
        """Return features of the rows of a table that has the columns, shape (n, d), float32."""
        return torch.from_numpy(np.asarray(self._transformer.transform(self._prepared(table)), dtype=np.float32))

    def _prepared(self, table: pd.DataFrame) -> pd.DataFrame:
        """Numbers as float64, and categories as texts, none missing."""
        import pandas as pd

        numbers = dict(zip(self.numbers, numbers_of(table, self.numbers).numpy().T, strict=True))
        texts = {name: texts_of(table[name]) for name in self.categories}
        levels = {name: text.where(text.notna(), MISSING) for name, text in texts.items()}
        return pd.DataFrame(numbers | levels, index=table.index)

    @cached_property
    def _transformer(self) -> ColumnTransformer:
        import pandas as pd
        from sklearn.compose import ColumnTransformer
        from sklearn.impute import MissingIndicator, SimpleImputer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import OneHotEncoder, StandardScaler

        # two rows that have the agreed mean and deviation stand for the rows of all clients
        mean, deviation = np.asarray(self.mean), np.asarray(self.deviation)
        rows = pd.DataFrame(np.stack([mean - deviation, mean + deviation]), columns=self.numbers)
        rows = rows.assign(**{name: levels[0] for name, levels in self.categories.items()})
        scale = make_pipeline(SimpleImputer(), StandardScaler())
        mark = MissingIndicator(features="all")
        choose = OneHotEncoder(
            categories=[*self.categories.values()], handle_unknown="ignore", sparse_output=False, dtype=np.float64
        )
        steps = [("numbers", scale, self.numbers), ("marks", mark, self.marked), ("levels", choose, [*self.categories])]
        return ColumnTransformer([step for step in steps if step[2]]).fit(rows)

    def raw(self) -> RawRows:
        """Return rows as they are in a table, and the network that makes these features of them."""
        index = {column.name: number for number, column in enumerate(self.columns)}
        levels = self.categories
        network = TableNetwork(
            [index[name] for name in self.numbers],
            [index[name] for name in self.marked],
            [(index[name], len(some)) for name, some in levels.items()],
            self.mean,
            self.deviation,
        )
        text = (
            "Rows as they are in the table; the model standardises numbers and replaces missing ones by itself, with "
            "mean and deviation of the training samples."
        )
        columns = tuple((name, tuple(levels[name]) if name in levels else None) for name in index)
        return RawRows(network, torch.zeros(1, len(index), dtype=torch.float64), text, columns, MISSING)

    def state(self) -> dict[str, Any]:
        """Return plain data, for checkpoints."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TableFeatures:
        """Restore what `state` returned."""
        columns = tuple(
            Column(each["name"], each["missing"], None if each["levels"] is None else tuple(each["levels"]))
            for each in state["columns"]
        )
        return cls(columns, tuple(state["mean"]), tuple(state["deviation"]))


def numbers_of(table: pd.DataFrame, names: Sequence[str]) -> Tensor:
    """Return columns of numbers, shape (n, d), float64, NaN where one is missing."""
    if not names:
        return torch.zeros(len(table), 0, dtype=torch.float64)
    return torch.from_numpy(table[[*names]].to_numpy(dtype=np.float64, na_value=np.nan).copy())
