"""From the columns of a table to the numbers that a network takes, by what all clients have agreed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedlit.data.raw_inputs import RawRows, TableNetwork
from fedlit.data.table_files import texts_of

if TYPE_CHECKING:
    import pandas as pd
    from sklearn.compose import ColumnTransformer

MISSING = "(missing)"
"""Level of a category that is not known, where that occurs at some client."""


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
    """What turns tables into features.

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
        """What each feature is."""
        levels = [f"{name}={level}" for name, some in self.categories.items() for level in some]
        return [*self.numbers, *(f"{name} missing" for name in self.marked), *levels]

    def of(self, table: pd.DataFrame) -> Tensor:
        """Features of the rows of a table that has the columns, shape (n, d), float32."""
        return torch.from_numpy(np.asarray(self._transformer.transform(self._prepared(table)), dtype=np.float32))

    def _prepared(self, table: pd.DataFrame) -> pd.DataFrame:
        """Numbers as float64, and categories as texts, none missing."""
        import pandas as pd

        known = numbers_of(table, self.numbers).numpy()
        numbers = {name: pd.Series(known[:, place], index=table.index) for place, name in enumerate(self.numbers)}
        texts = {name: texts_of(table[name]) for name in self.categories}
        return pd.DataFrame(numbers | {name: text.where(text.notna(), MISSING) for name, text in texts.items()})

    @cached_property
    def _transformer(self) -> ColumnTransformer:
        import pandas as pd
        from sklearn.compose import ColumnTransformer
        from sklearn.impute import MissingIndicator, SimpleImputer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import OneHotEncoder, StandardScaler

        # two rows that have the agreed mean and deviation teach scikit-learn what rows of all clients would
        mean, deviation = np.asarray(self.mean), np.asarray(self.deviation)
        taught = pd.DataFrame(np.stack([mean - deviation, mean + deviation]), columns=self.numbers)
        taught = taught.assign(**{name: levels[0] for name, levels in self.categories.items()})
        scale = make_pipeline(SimpleImputer(), StandardScaler())
        mark = MissingIndicator(features="all")
        choose = OneHotEncoder(
            categories=[*self.categories.values()], handle_unknown="ignore", sparse_output=False, dtype=np.float64
        )
        steps = [("numbers", scale, self.numbers), ("marks", mark, self.marked), ("levels", choose, [*self.categories])]
        return ColumnTransformer([step for step in steps if step[2]]).fit(taught)

    def raw(self) -> RawRows:
        """Rows as they are in a table, and the network that makes these features of them."""
        place = {column.name: number for number, column in enumerate(self.columns)}
        levels = self.categories
        network = TableNetwork(
            [place[name] for name in self.numbers],
            [place[name] for name in self.marked],
            [(place[name], len(some)) for name, some in levels.items()],
            self.mean,
            self.deviation,
        )
        words = (
            "Rows as they are in the table; the model standardises numbers and replaces missing ones by itself, with "
            "mean and deviation of the training samples."
        )
        columns = tuple((name, tuple(levels[name]) if name in levels else None) for name in place)
        return RawRows(network, torch.zeros(1, len(place), dtype=torch.float64), words, columns, MISSING)

    def state(self) -> dict[str, Any]:
        """For checkpoints."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TableFeatures:
        """Read back what `state` gave."""
        columns = tuple(
            Column(each["name"], each["missing"], None if each["levels"] is None else tuple(each["levels"]))
            for each in state["columns"]
        )
        return cls(columns, tuple(state["mean"]), tuple(state["deviation"]))


def numbers_of(table: pd.DataFrame, names: Sequence[str]) -> Tensor:
    """Columns of numbers, shape (n, d), float64, NaN where one is missing."""
    if not names:
        return torch.zeros(len(table), 0, dtype=torch.float64)
    return torch.from_numpy(table[[*names]].to_numpy(dtype=np.float64, na_value=np.nan).copy())
