"""Features of tables, and the agreement of clients on their columns, levels, mean and deviation, by sums alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedlit.data.raw_inputs import RawRows, TableNetwork
from fedlit.data.samples import check_data, refuse_data
from fedlit.data.source import agreed
from fedlit.data.tables.columns import MISSING, Columns
from fedlit.data.tables.values import texts_of
from fedlit.federation import Federation, Summed

if TYPE_CHECKING:
    import pandas as pd
    from sklearn.compose import ColumnTransformer

    from fedlit.functional.table_moments import Total

_EXACT = (
    "what tables agree on is exact: name the levels of each category in categories, and give statistics='own', or "
    "let a mechanism blur other channels alone"
)
LEVELS, MAGNITUDES, STATISTICS = (
    Summed(name, content, how_often="once", fixed=True, unblurred=_EXACT)
    for name, content in (
        ("levels", "which levels categories have, and how many clients have each"),
        ("magnitudes", "how many clients have numbers of which power of two"),
        ("statistics", "mean and deviation of all numbers, and how many are known"),
    )
)

_COUNTED = 1024
"""Levels that are counted as one, so that the number of levels is one of the small range of fixed-point numbers."""


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


def common_columns(facts: Mapping[str, Any], where_mixed: Callable[[str, Mapping[str, str]], str]) -> Columns:
    """Return the columns that all clients announced in `CSVDomains.facts`; a `DatasetLayoutError` if they differ.

    ``where_mixed`` takes a column and its type at each client to where texts stand beside numbers, for the error.
    """
    agreed("levels", facts, "name the same levels in categories at each client")
    tables: dict[str, Columns] = {name: table for each in facts.values() for name, table in each["columns"].items()}
    (first, columns), *others = tables.items()
    for name, table in others:
        here, there = ([each for each in a if each not in b] for a, b in ((columns, table), (table, columns)))
        shown = f"{here} at {first!r} alone and {there} at {name!r} alone"
        check_data(
            not here + there, "columns", "the same in all tables", shown, "rename them, or name them in leave_out"
        )
    common: Columns = {}
    for column in columns:
        types = {name: table[column][0] for name, table in tables.items() if table[column][0] != "empty"}
        check_data(bool(types), column, "a column with values at some client", "none", "name it in leave_out")
        if len(set(types.values())) > 1:
            way_out = (
                "name it in categories if it is one, or mend the texts among the numbers, or name those for missing "
            )
            way_out += "values in missing_values"
            refuse_data(column, "a column of one type at all clients", f"{types}{where_mixed(column, types)}", way_out)
        common[column] = (next(iter(types.values())), any(table[column][1] for table in tables.values()))
    return common


def agree_on_levels(
    names: Sequence[str], levels_of: Callable[[str], Mapping[str, Sequence[str]]], total: Total
) -> dict[str, list[str]]:
    """Return the levels of categories at any client, sorted, from two sums over the channel ``"levels"``.

    ``names`` are the same in every process; ``levels_of`` a domain have at most 60 bytes each.

    Raises:
        DatasetLayoutError: If what was summed cannot be read.
    """
    # data without tables need no such libraries
    from fedlit.functional.set_union import read_union, union_cells, union_table

    def elements(domain: str) -> list[bytes]:
        return [
            names.index(name).to_bytes(2, "big") + level.encode()
            for name, levels in levels_of(domain).items()
            for level in levels
        ]

    found: dict[str, list[str]] = {name: [] for name in names}
    count = total("levels", lambda domain: torch.tensor([len(elements(domain)) / _COUNTED], dtype=torch.float64))
    cells = 0 if count is None else union_cells(round(float(count) * _COUNTED))
    table = total("levels", lambda domain: union_table(elements(domain), cells))
    if table is None:
        return found
    try:
        union = read_union(table, cells)
    except ValueError as error:
        refuse_data("categories", f"given with levels for {[*names]}", f"a sum that cannot be read ({error})")
    for element in union:
        found[names[int.from_bytes(element[:2], "big")]].append(element[2:].decode())
    return found


def total_over(federation: Federation, members: Callable[[str], Sequence[str]]) -> Total:
    """Return secure sums over the domains (``members``) of all clients of a run, also those absent from a round."""

    def total(channel: str, message: Callable[[str], Tensor]) -> Tensor | None:
        payloads = {
            client.name: {"table": torch.stack([message(name) for name in members(client.name)]).sum(dim=0)}
            for client in federation.local_clients
        }
        received = federation.mean(channel, payloads, absent_too=True)
        mean = next(iter(received.values()), None)
        return None if mean is None else len(federation.clients) * mean["table"].double().cpu()

    return total
