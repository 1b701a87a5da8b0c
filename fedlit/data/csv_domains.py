"""Tables of one's own: a CSV or Parquet file per client, or one file with a column that names each row's client."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fedlit.data.base import DatasetLayoutError, DatasetNotFoundError, Domain, DomainDataModule, DomainDataset, agreed
from fedlit.data.raw_inputs import RawRows
from fedlit.data.table_features import MISSING, Column, TableFeatures, numbers_of
from fedlit.data.table_files import NO_TABLES, SUFFIXES, TableReader, check_once, column, kind_of, texts_of
from fedlit.data.table_numbers import SHOWN, NumberFormat, cells, lines, some
from fedlit.federation import Federation, Summed
from fedlit.federation.labels import UNLABELLED, TaskName
from fedlit.federation.loader import FederatedLoader
from fedlit.federation.names import alike, check_list, check_texts, difference, folded, not_text, shown

if TYPE_CHECKING:
    import pandas as pd

    from fedlit.functional.table_moments import Total

_EXACT = (
    "what tables agree on is exact: name the levels of each category in categories, and give statistics='own', or "
    "let a mechanism blur other channels alone"
)
_CHANNELS = (
    Summed(
        "levels", "which levels categories have, and how many clients have each", how_often="once", fixed=True,
        unblurred=_EXACT,
    ),
    Summed(
        "magnitudes", "how many clients have numbers of which power of two", how_often="once", fixed=True,
        unblurred=_EXACT,
    ),
    Summed(
        "statistics", "mean and deviation of all numbers, and how many are known", how_often="once", fixed=True,
        unblurred=_EXACT,
    ),
)  # fmt: skip
_MOST_CLASSES = 50
_MOST_BYTES = 60
"""Of a level that is agreed on."""
_LONG = 20


class CSVDomains(DomainDataModule):
    """Tables, CSV or Parquet, of classes or numbers to predict from numbers and categories.

    Each process reads the tables of its own clients; those of others need not be there, nor be named in ``files`` if
    ``clients`` has the names of all. Names and types of columns are announced when training starts. They must be the
    same at each client, in any order. A column of numbers is standardised, one of texts is a category; missing values
    are allowed in both. What clients must agree on to write the same features is summed through the channels
    ``"levels"``, ``"magnitudes"`` and ``"statistics"``, over all clients whoever is the target, and lies in the
    checkpoint.

    Args:
        files: File for each client; or a folder, in which each table is a client of its name; or one file, with
            ``site``. ``None`` is a process without tables, such as the server's, which is given ``clients`` and
            ``classes``.
        label: Column to predict. The target's table may lack it, or have it empty or -1 where a label is not known.
        site: Column of the client's name, if all are in one file.
        id: Column that names the rows, for predictions; it is no feature.
        leave_out: Columns that are no features.
        categories: Columns of categories that look like numbers, and categories whose levels are known:
            ``{column: [level, ...]}``, or ``{column: null}`` to agree on the levels of what all clients have, as for
            columns of texts. Levels are then sent to all, with how many clients have each, and not which.
        classes: Names of the classes, in the order of their labels; ``None`` takes those of the tables that are here,
            sorted, which must be the same for each process.
        task: ``"classification"`` or ``"regression"``.
        statistics: Mean and deviation that numbers are standardised with, and missing ones replaced by: of all
            clients' training samples (``"federated"``), or of the client's ``"own"``, of which nothing is sent.
        predict_file: Table of the target whose rows are predicted, instead of its test samples.
        separator: Between the columns of CSV files.
        decimal: Sign before the decimals of numbers that are written as texts, in CSV and Parquet files.
        thousands: Sign between groups of three digits in them; empty for none. ``None`` takes the point where
            ``decimal`` is a comma, so that ``1.234,5`` is 1234.5, and otherwise none. A blank stands for blanks of any
            width.
        encoding: Of the text of CSV files.
        missing_values: Texts that stand for missing values, besides empty, ``NA``, ``NaN``, ``null`` and the like; of
            numbers, all that are equal to one. A class that ``classes`` names, or a level that ``categories`` names,
            is none in its column.
        target: The client that is adapted to; ``None`` takes the last.
        kwargs: See `DomainDataModule`.

    Raises:
        DatasetNotFoundError: If there is no table at ``files``.
        DatasetLayoutError: If a table cannot be used; the message has file, column and a way out.
        ImportError: If pandas is not installed, which is the extra ``tables``.
    """

    spread = True

    def __init__(
        self,
        files: str | dict[str, str] | None = None,
        *,
        label: str,
        site: str | None = None,
        id: str | None = None,  # noqa: A002 (what everybody calls it)
        leave_out: list[str] | None = None,
        categories: list[str] | dict[str, list[str] | None] | None = None,
        classes: list[str] | None = None,
        task: TaskName = "classification",
        statistics: Literal["federated", "own"] = "federated",
        predict_file: str | None = None,
        separator: str = ",",
        decimal: str = ".",
        thousands: str | None = None,
        encoding: str = "utf-8",
        missing_values: list[str] | None = None,
        target: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(target=target, **kwargs)
        if task not in ("classification", "regression"):
            raise ValueError(f"task must be 'classification' or 'regression', got {task!r}")
        if statistics not in ("federated", "own"):
            raise ValueError(f"statistics must be 'federated' or 'own', got {statistics!r}")
        for argument, given in {"files": files, "label": [label], "site": site, "id": id}.items():
            check_texts(argument, given)
        check_list("leave_out", leave_out)
        check_list("categories", categories)
        if classes is not None and len(set(classes)) < max(2, len(classes)):
            raise ValueError(f"classes must name at least 2 classes, each once, got {classes}")
        numbers = NumberFormat(decimal, thousands)
        self.task = task
        self.label, self.site, self.id = label, site, id
        self.leave_out = list(leave_out or ())
        named = categories if isinstance(categories, dict) else dict.fromkeys(categories or ())
        self.categories: dict[str, list[str] | None] = {
            name: None if levels is None else _levels(f"categories[{name!r}]", levels, numbers)
            for name, levels in named.items()
        }
        self._asks_for_levels = categories is None or None in self.categories.values()
        self.statistics = statistics
        self.predict_file = None if predict_file is None else Path(predict_file)
        as_they_are = (site, id, label if task == "classification" else None)
        texts = [*self.categories, *(name for name in as_they_are if name is not None)]
        self._wanted = None if classes is None else _levels("classes", classes, numbers)
        known = {name: levels or [] for name, levels in self.categories.items()}
        if task == "classification":
            known[label] = self._wanted or []
        self.reader = TableReader(
            separator, numbers, encoding, _names("missing_values", missing_values or (), numbers), texts, id,
            [label, *self.leave_out], known,
        )  # fmt: skip
        self.elsewhere = files is None
        for name, value, what in (
            ("clients", self._client_names, "the names of all"),
            ("classes", classes if task == "classification" else (), "their names"),
        ):
            if self.elsewhere and value is None:
                raise ValueError(
                    f"{name} must be given with files=None, a process without tables to find them in, got None: give "
                    f"{what}, in the order that all processes have, or files if there are tables here"
                )
        self._paths = {} if files is None else self._find(files)
        self._tables: dict[str, pd.DataFrame] = {}
        self._columns: dict[str, tuple[str, bool]] | None = None
        self._samples: dict[str, int] = {}
        self._features: dict[str, TableFeatures] = {}
        self._classes: list[str] | None = None
        self._width: int | None = None
        self._file = files
        self._one = self._split_by_site(Path(files)) if site is not None and isinstance(files, str) else None
        self.check_roster()

    # ---------------------------------------------------------------- files

    def _find(self, files: str | dict[str, str]) -> dict[str, Path]:
        if isinstance(files, str):
            path = Path(files)
            if self.site is not None:
                return {}
            if not path.is_dir():
                raise DatasetNotFoundError(
                    f"files={files!r} must be a folder of tables (looked for {str(path.absolute())!r}), "
                    "{client: file}, or one file with site, the column that names each row's client"
                )
            found = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.name[0] != ".")
            check_once([file.stem for file in found], f"tables in {files!r} are called", "keep one for each client")
            others = sorted(file.name for file in path.iterdir() if file.suffix.lower() in NO_TABLES)
            if others:
                warnings.warn(
                    f"left out {some(others)} of files={files!r}, as tables are {', '.join(SUFFIXES)}: export them as "
                    "CSV if they are clients' tables",
                    stacklevel=2,
                )
            if not found:
                raise DatasetLayoutError(f"folder files={files!r} must hold tables ({', '.join(SUFFIXES)}), got none")
            return {file.stem: file for file in found}
        if self.site is not None:
            raise ValueError(f"site={self.site!r} is for one file with all clients, and files names one for each")
        paths = {name: Path(path) for name, path in files.items()}
        check_once([str(path) for path in paths.values()], "files of clients are", "give each client its own")
        check_once([str(path.resolve()) for path in paths.values()], "files of clients are", "give each client its own")
        return paths

    def _split_by_site(self, path: Path) -> dict[str, pd.DataFrame]:
        assert self.site is not None
        table = self.reader.read(path)
        names = texts_of(column(table, self.site, "site", repr(str(path))))
        nameless = table.index[names.isna()]
        if len(nameless):
            raise DatasetLayoutError(
                f"{len(nameless)} rows of {str(path)!r} have no {self.site!r} ({lines(nameless)}): name their client, "
                "or leave them out"
            )
        for group in alike(dict.fromkeys(names), self._key):
            rows = " and ".join(str(int((names == name).sum())) for name in group)
            raise DatasetLayoutError(
                f"site={self.site!r} of {str(path)!r} has {shown(group)}, with {rows} rows, which differ in "
                f"{difference(group)}: write them alike, or rename one if they are different clients"
            )
        return {name: self.reader.numbers_in(table[names == name].copy()) for name in dict.fromkeys(names)}

    def domain_names(self) -> list[str]:
        """Clients whose tables are here."""
        return [name for name, path in self._paths.items() if path.is_file()] if self._one is None else [*self._one]

    def check_roster(self) -> Any:
        """As of the base; all clients that ``files`` names take part, wherever their tables are."""
        if self._client_names is None and self._paths:
            self._client_names = [*self._paths]
        if self._paths and not self.domain_names():
            raise DatasetNotFoundError(
                f"none of files={ {name: str(path) for name, path in self._paths.items()} } is there, looked for from "
                f"{str(Path.cwd())!r}: give the paths of this machine's tables"
            )
        return super().check_roster()

    def where(self, client: str) -> str:
        """The file of a client, for messages."""
        return repr(str(self._paths[client])) if self._one is None else f"the rows of {client!r} in {self._file!r}"

    def table(self, client: str) -> pd.DataFrame:
        """A client's rows, with all columns of its file."""
        if client not in self._tables:
            if not self.is_here(client):
                self._check_here(client)
                raise DatasetNotFoundError(
                    f"there is no table of client {client!r} here, which has those of {self.domain_names()}: give "
                    "each process the clients whose tables it has (placement of the strategy), or mend files"
                )
            table = self.reader.read(self._paths[client]) if self._one is None else self._one[client]
            if not len(table):
                raise DatasetLayoutError(f"{self.where(client)} has no rows: leave the client out, or give it data")
            self._check_ids(table, self.where(client))
            self._tables[client] = table
        return self._tables[client]

    def _check_ids(self, table: pd.DataFrame, where: str) -> None:
        """Refuse rows without a name, or with that of another."""
        if self.id is None:
            return
        ids = texts_of(column(table, self.id, "id", where))
        nameless = table.index[ids.isna()]
        if len(nameless):
            raise DatasetLayoutError(
                f"{len(nameless)} rows of {where} have no {self.id!r} ({lines(nameless)}): name all rows"
            )
        twice = ids[ids.duplicated(keep=False)]
        if len(twice):
            raise DatasetLayoutError(
                f"rows of {where} have the {self.id!r} {some(twice)} more than once: keep one of each "
                f"({lines(twice.index)})"
            )

    def ids(self, client: str, stage: str) -> list[str] | None:
        """What names a client's rows in one stage, in order; without a column of ids ``None``.

        Rows of ``predict_file`` are then counted from 0.
        """
        if stage == "predict" and self.predict_file is not None:
            rows = self._new_rows()
            return [str(place) for place in range(len(rows))] if self.id is None else [*texts_of(rows[self.id])]
        if self.id is None:
            return None
        positions: Tensor = getattr(self.split(client), "test" if stage == "predict" else stage)
        return [*texts_of(self.table(client)[self.id].iloc[positions.tolist()])]

    # ---------------------------------------------------------------- labels

    def class_names(self) -> list[str]:
        """Classes, in the order of their labels; in regression, the column to predict."""
        if self.task == "regression":
            return [self.label]
        if self._wanted is not None:
            return self._wanted
        if self._classes is None:
            found = {text for name in self._members_here() for text in self._label_texts(name).dropna()}
            numeric = all(text.removeprefix("-").isdecimal() for text in found)
            self._classes = sorted(sorted(found), key=int if numeric else str)
            self._check_written_alike(
                f"label={self.label!r} has the classes", self._classes, "mend the labels, or name all in classes"
            )
            if len(found) < 2:
                raise DatasetLayoutError(
                    f"label={self.label!r} has the classes {self._classes} in the tables that are here, where "
                    f"{UNLABELLED} is no label, and there must be 2 at least: name all in classes"
                )
        return self._classes

    def _members_here(self) -> list[str]:
        return [client.name for client in self.check_roster() if self.is_here(client.name)]

    def _labels_of(self, client: str) -> pd.Series[Any]:
        table = self.table(client)
        if self.label not in table and client == self.target:
            return table.iloc[:, 0].map(lambda value: None)
        return column(table, self.label, "label", self.where(client))

    def _label_texts(self, client: str) -> pd.Series[Any]:
        """Classes of a client's rows as texts; missing where one is not known."""
        texts = texts_of(self._labels_of(client))
        known, written = texts.dropna(), self.reader.numbers
        numbers = written.numbers(known)
        others, fractions = known[numbers.isna()], known[numbers % 1 != 0]
        if self._wanted is None:
            way_out = written.way_out({*known}) if len(others) else ""
            if way_out:
                raise DatasetLayoutError(
                    f"label={self.label!r} of {self.where(client)} has numbers that are written as {cells(others)}, "
                    f"with decimal={written.decimal!r}: {way_out}; if they are names, name the classes in classes"
                )
            if (len(fractions) and not len(others)) or known.nunique() > _MOST_CLASSES:
                raise DatasetLayoutError(
                    f"label={self.label!r} of {self.where(client)} looks continuous, with {known.nunique()} different "
                    f"values, such as {cells(fractions if len(fractions) else known)}: give task: regression, name the "
                    "classes in classes, or choose another column"
                )
        if str(UNLABELLED) in (self._wanted or ()):
            return texts
        return texts.where(written.numbers(texts) != UNLABELLED, None)

    def _y(self, client: str) -> Tensor:
        if self.task == "regression":
            values = self._labels_of(client)
            written = self.reader.numbers
            numbers = written.numbers(values)
            wrong = values[numbers.isna() & values.notna()]
            if len(wrong):
                way_out = written.way_out({*texts_of(values).dropna()})
                raise DatasetLayoutError(
                    f"label={self.label!r} of {self.where(client)} must be numbers with decimal={written.decimal!r}, "
                    f"got {cells(wrong)}: "
                    + (way_out or "mend them, name them in missing_values, or give task: classification")
                )
            lacking = values.index[numbers.isna()]
            if len(lacking) and client != self.target:
                raise DatasetLayoutError(
                    f"label={self.label!r} of {self.where(client)} is empty in {len(lacking)} of {len(numbers)} rows "
                    f"({lines(lacking)}), and only the target ({self.target!r}) may lack labels: leave these rows out"
                )
            infinite = values[numbers.abs() == float("inf")]
            if len(infinite):
                raise DatasetLayoutError(
                    f"{self.where(client)} has infinite numbers in {self.label!r} (label, {lines(infinite.index)}): "
                    "mend them"
                )
            return torch.tensor([*numbers.astype(float)], dtype=torch.float64)
        texts = self._label_texts(client)
        number_of = {name: place for place, name in enumerate(self.class_names())}
        unknown = texts[texts.notna() & ~texts.isin([*number_of])]
        if len(unknown):
            raise DatasetLayoutError(
                f"label={self.label!r} of {self.where(client)} has {some(unknown)}, which classes {[*number_of]} "
                f"lack ({lines(unknown.index)}): name all in classes, or mend the labels"
            )
        missing = texts.index[texts.isna()]
        if len(missing) and client != self.target:
            raise DatasetLayoutError(
                f"label={self.label!r} of {self.where(client)} is empty or -1 in {len(missing)} of {len(texts)} rows, "
                f"{lines(missing)}, where None, NA and the like count as empty unless classes name them, and -1, too; "
                f"only the target ({self.target!r}) may lack labels: leave these rows out, make {client!r} the target, "
                "or name all in classes if one of these is a class"
            )
        return torch.tensor([number_of.get(text, UNLABELLED) for text in texts], dtype=torch.int64)

    # ---------------------------------------------------------------- columns

    def _kinds(self, client: str, table: pd.DataFrame | None = None) -> dict[str, tuple[str, bool]]:
        """What each column of a client that is a feature holds, and whether any of it is missing."""
        given = table is not None
        table = self.table(client) if table is None else table
        where = "predict_file" if given else self.where(client)
        for name in self.leave_out:
            _ = given or column(table, name, "leave_out", where)
        for name in self.categories:
            column(table, name, "categories", where)
        others = {self.label, self.site, self.id, *self.leave_out}
        kinds: dict[str, tuple[str, bool]] = {}
        for name in [name for name in table.columns if name not in others]:
            values = table[name]
            kind = kind_of(values, f"column {name!r} of {where}", name in self.categories, self.reader.numbers)
            missing = values.isna()
            if kind == "category":
                texts = texts_of(values)
                missing = texts.isna()
                if not given:
                    self._check_levels(name, [*dict.fromkeys(texts.dropna())], where)
            kinds[str(name)] = (kind, bool(missing.any()))
        if not kinds:
            raise DatasetLayoutError(
                f"{where} has no column besides {sorted(map(str, others - {None}))} to predict from"
            )
        return kinds

    def _check_levels(self, name: str, levels: list[str], where: str) -> None:
        """Refuse levels that others could not know."""
        if MISSING in levels:
            raise DatasetLayoutError(
                f"column {name!r} of {where} has {MISSING!r}, which is what missing values are called: name it in "
                "missing_values, or rename it"
            )
        named = self.categories.get(name)
        if named is not None:
            unknown = [level for level in levels if level not in named]
            if unknown:
                raise DatasetLayoutError(
                    f"column {name!r} of {where} has {unknown[:SHOWN]}, which categories[{name!r}] lack: add them at "
                    "each client, or give null there to agree on the levels"
                )
        elif not self._asks_for_levels:
            raise DatasetLayoutError(
                f"column {name!r} of {where} has texts such as {levels[:SHOWN]}, and categories do not name it: give "
                "its levels there, or null to agree on them, or leave it out (leave_out)"
            )
        long = next((level for level in levels if len(level.encode()) > _MOST_BYTES), None)
        if long is not None and named is None:
            raise DatasetLayoutError(
                f"column {name!r} of {where} has a level of {len(long.encode())} bytes, {long[:_LONG]!r}..., and "
                f"{_MOST_BYTES} can be agreed on: shorten it, give its levels in categories, or leave it out"
            )

    def facts(self, client: str) -> dict[str, Any]:
        """Return what a client announces of its data: columns, classes and the number of its training samples."""
        members = self._members(client)
        has: list[bool] | None = None
        if self.task == "classification" and (client != self.target or self.target_labels):
            y = torch.cat([self._y(name) for name in members])
            has = [bool((y == label).any()) for label in range(self.num_classes)]
            lacking = [name for name, there in zip(self.class_names(), has, strict=True) if not there]
            if lacking:
                files = ", ".join(map(self.where, members))
                warnings.warn(f"client {client!r} has no sample of the classes {lacking} in {files}", stacklevel=2)
        return {
            "shapes": [], "classes": self.class_names(), "has": has,
            "columns": {name: self._kinds(name) for name in members},
            "samples": {name: len(self._training(name)) for name in members},
            "levels": self.categories,
        }  # fmt: skip

    def check_facts(self, told: Mapping[str, Any]) -> None:
        """As of the base; columns must be the same at all clients, and then it is known what they hold."""
        super().check_facts(told)
        agreed("levels", told, "name the same levels in categories at each client")
        kinds = {name: found for each in told.values() for name, found in each["columns"].items()}
        (first, columns), *others = kinds.items()
        for name, found in others:
            if found.keys() != columns.keys():
                one, other = ([each for each in a if each not in b] for a, b in ((columns, found), (found, columns)))
                raise DatasetLayoutError(
                    f"tables of all clients must have the same columns, but {first!r} alone has {one} and {name!r} "
                    f"alone has {other}: rename them, or leave them out (leave_out)"
                )
        self._columns = {}
        for column_name in columns:
            what = {name: found[column_name][0] for name, found in kinds.items() if found[column_name][0] != "empty"}
            if not what:
                raise DatasetLayoutError(f"column {column_name!r} is empty at every client: leave it out (leave_out)")
            if len(set(what.values())) > 1:
                raise DatasetLayoutError(
                    f"column {column_name!r} must hold the same at each client, but is {what}"
                    f"{self._texts_beside_numbers(column_name, what)}: name it in categories if it is one, or mend the "
                    "texts among the numbers (missing_values has those for missing ones)"
                )
            missing = any(found[column_name][1] for found in kinds.values())
            self._columns[column_name] = (next(iter(what.values())), missing)
        self._samples = {name: number for each in told.values() for name, number in each["samples"].items()}

    def _texts_beside_numbers(self, name: str, kinds: Mapping[str, str]) -> str:
        """Where a column that is of texts at some clients has numbers there, too; empty if the tables are elsewhere."""
        for client in [client for client, kind in kinds.items() if kind == "category" and self.is_here(client)]:
            texts = texts_of(self.table(client)[name]).dropna()
            others = texts[self.reader.numbers.numbers(texts).isna()]
            if 0 < len(others) < len(texts):
                return f"; {self.where(client)} has {cells(others)} beside numbers"
        return ""

    def _training(self, client: str) -> Tensor:
        return self._make_split(client, self._y(client)).train

    # ---------------------------------------------------------------- what clients agree on

    @property
    def channels(self) -> tuple[Summed, ...]:
        """Channels over which clients agree on features."""
        levels, magnitudes, statistics = _CHANNELS
        chosen = (levels,) if self._asks_for_levels else ()
        return chosen + ((magnitudes, statistics) if self.statistics == "federated" else ())

    def setup(self, stage: str | None = None) -> None:
        """Agree with the other clients on columns, levels and statistics, before networks are built."""
        super().setup(stage)
        federation = self._federation()
        if federation is not None and stage == "fit":
            federation.channels.declare(self.channels)  # of a Trainer with another strategy
            self._agree(self._total_over(federation))
            widths = federation.all_gather("the number of features", lambda client: len(self.feature_names()))
            self._width = next(iter(widths.values()))  # which a process without clients has no table to find in

    def _total_over(self, federation: Federation) -> Total:
        """Secure sums over the clients of a run, whoever takes part in its first round."""

        def total(channel: str, message: Callable[[str], Tensor]) -> Tensor | None:
            payloads = {
                client.name: {"table": torch.stack([message(name) for name in self._members(client.name)]).sum(dim=0)}
                for client in federation.local_clients
            }
            received = federation.mean(channel, payloads, absent_too=True)
            mean = next(iter(received.values()), None)
            return None if mean is None else len(federation.clients) * mean["table"].double().cpu()

        return total

    def _total_here(self, channel: str, message: Callable[[str], Tensor]) -> Tensor:
        """The same of tables that are all here, for a look at them without a run."""
        names = [client.name for client in self.check_roster()]
        return torch.stack([message(name) for name in names]).sum(dim=0)

    def _agree(self, total: Total) -> None:
        """Find what features are made with."""
        # imports libraries that data without tables do not need
        from fedlit.data.table_agreement import agree_on_levels
        from fedlit.functional.table_moments import agree_on_moments, own_moments

        assert self._columns is not None
        numbers = [name for name, (kind, _) in self._columns.items() if kind == "number"]
        levels = {name: [*(self.categories.get(name) or ())] for name in self._columns if name not in numbers}
        asked = [name for name in levels if self.categories.get(name) is None]
        if asked:

            def own(domain: str) -> dict[str, list[str]]:
                table = self.table(domain)
                return {name: [*dict.fromkeys(texts_of(table[name]).dropna())] for name in asked}

            levels |= agree_on_levels(asked, own, total)
            for name in asked:
                self._check_written_alike(
                    f"column {name!r} has the levels", levels[name],
                    "write them alike in all tables, or name all levels in categories if they are different things",
                )  # fmt: skip
        columns = tuple(
            Column(name, missing, None if kind == "number" else tuple(levels[name]))
            for name, (kind, missing) in self._columns.items()
        )
        moments: tuple[Tensor, Tensor] | None = None
        if self.statistics == "federated" and numbers:
            moments = agree_on_moments(
                len(numbers), lambda domain: self._numbers(domain, numbers), self._samples, total
            )
        found: dict[str, TableFeatures] = {}
        for name in self._hosted():
            mean, deviation = moments or own_moments(self._numbers(name, numbers))
            found[name] = TableFeatures(columns, tuple(mean.tolist()), tuple(deviation.tolist()))
            self._warn_of_columns(name)
        self._take(found)

    def _key(self, name: str) -> object:
        """Equal for classes, levels and sites that people would take for one: 01 is 1, and YES is yes."""
        number = None if any(map(str.isalpha, name)) else self.reader.numbers.number(name)
        return folded(name) if number is None else number

    def _check_written_alike(self, what: str, names: Sequence[str], way_out: str) -> None:
        """Refuse what is one class or level written in two ways, as true and TRUE of two programs are."""
        found = alike(names, self._key)
        if found:
            many = shown(name for name in names if any(name in group for group in found))
            raise DatasetLayoutError(f"{what} {many} at the clients, which differ in {difference(found[0])}: {way_out}")

    def _hosted(self) -> list[str]:
        """Domains of the clients that this process hosts."""
        return [name for client in self._local_names() for name in self._members(client)]

    def _take(self, found: Mapping[str, TableFeatures]) -> None:
        if found != self._features:
            self._features = dict(found)
            self._domains.clear()
            self._datasets.clear()

    def _numbers(self, client: str, numbers: list[str]) -> Tensor:
        """Numbers of a client's training samples, shape (n, d), NaN where one is missing."""
        return numbers_of(self.table(client), numbers)[self._training(client)]

    def _warn_of_columns(self, client: str) -> None:
        """Warn of columns from which nothing can be learnt of a client."""
        rows = self.table(client).iloc[self._training(client).tolist()]
        same: dict[str, list[str]] = {}
        for name, (kind, _) in (self._columns or {}).items():
            is_number, known = kind == "number", rows[name].dropna()
            values = (self.reader.numbers.numbers(known) if is_number else known).unique()[:2]
            same[name] = [self.reader.numbers.text(value) if is_number else str(value) for value in values]
        constant = [
            f"{name!r} (always {value})" for name, values in same.items() if len(values) == 1 for value in values
        ]
        unknown = [repr(name) for name, values in same.items() if not values]
        for found, what in ((constant, "holds one value in"), (unknown, "is missing in all of")):
            if found:
                each = f"column {found[0]}" if len(found) == 1 else f"each of the columns {', '.join(found)}"
                warnings.warn(
                    f"{each} {what} the {len(rows)} training samples of {self.where(client)}, and shows nothing there: "
                    "see whether it was exported rightly, or leave it out at all clients (leave_out)",
                    stacklevel=2,
                )

    # ---------------------------------------------------------------- features

    def features_of(self, client: str) -> TableFeatures:
        """What makes features of a client's rows.

        Raises:
            DatasetNotFoundError: If this process has no tables.
            RuntimeError: If clients have not agreed on it yet, and their tables are not all here.
        """
        if not self._features:
            self._check_here(client)
            if not all(self.is_here(each.name) for each in self.check_roster()):
                raise RuntimeError(
                    "clients agree on features when training starts, or a checkpoint brings what they agreed on: leave "
                    "in_features of networks out, and train, or give ckpt_path"
                )
            self.check_facts({client.name: self.facts(client.name) for client in self._roster_of_run()})
            self._agree(self._total_here)
        return self._features[client]

    def feature_names(self) -> list[str]:
        """What each feature is."""
        self.features_of(next(iter(self._hosted()), self.target))
        return next(iter(self._features.values())).names

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Number of features; in a process that hosts no client, as received from the others."""
        if self._width is not None and not self._hosted():
            return (self._width,)
        return (len(self.feature_names()),)

    def load(self, domain: str) -> Domain:
        """Features and labels of a client's rows."""
        return Domain(self.features_of(domain).of(self.table(domain)), self._y(domain))

    def predict_dataloader(self) -> Any:
        """The target's test samples, or the rows of ``predict_file``, in order."""
        local = self._local_names()
        if self.target in local:
            self._check_here(self.target)
        if self.predict_file is None or self.target not in local:
            return super().predict_dataloader()
        x = self.features_of(self.target).of(self._new_rows())
        y = torch.full((len(x),), torch.nan if self.task == "regression" else UNLABELLED)
        data = {self.target: DomainDataset(x, y if self.task == "regression" else y.long())}
        return FederatedLoader(data, self.eval_batch_size, training=False, guarded=self.target, seed=self.seed)

    def _new_rows(self) -> pd.DataFrame:
        """The rows to predict, with columns as all clients have them."""
        assert self.predict_file is not None
        features = self.features_of(self.target)
        table = self.reader.read(self.predict_file, [*features.categories])
        where = f"predict_file={str(self.predict_file)!r}"
        if not len(table):
            raise DatasetLayoutError(f"{where} has no rows: give it those that are to be predicted")
        self._check_ids(table, where)
        if self.site is not None and self.site in table:
            names = texts_of(table[self.site])
            others = names[names.notna() & (names != self.target)]
            if len(others):
                raise DatasetLayoutError(
                    f"{where} has rows of {cells(others)}, and those of the target ({self.target!r}) are predicted: "
                    "leave the others out"
                )
        for name in features.numbers:
            values, what = column(table, name, None, where), f"column {name!r} of {where}"
            if kind_of(values, what, False, self.reader.numbers) == "category":
                raise DatasetLayoutError(
                    f"column {name!r} of {where} must be numbers, as in training, got {cells(values.dropna())}: mend "
                    "them, or name those that stand for missing values in missing_values"
                )
        for name, levels in features.categories.items():
            found = dict.fromkeys(texts_of(column(table, name, None, where)).dropna())
            new = [level for level in found if level not in levels]
            if new:
                warnings.warn(
                    f"column {name!r} of {where} has {new[:SHOWN]}, which no client had in training: they count as "
                    "none of its levels",
                    stacklevel=2,
                )
        return table

    def raw_inputs(self) -> RawRows:
        """Rows of the target's table, and the network that makes features of them."""
        raw = self.features_of(self.target).raw()
        if self.is_here(self.target):
            self.table(self.target)  # shows how its numbers are written
        return replace(raw, reading=self.reader.options_for_others([name for name, _ in raw.columns]))

    # ---------------------------------------------------------------- checkpoints

    def client_state(self, client: str) -> dict[str, Any]:
        """Return what makes features of a client's rows."""
        features = {name: self._features[name].state() for name in self._members(client) if name in self._features}
        return {"data": features} if features else {}

    def load_state(self, clients: Mapping[str, Mapping[str, Any]], public: Mapping[str, Any], resumes: bool) -> None:
        """Make features as in the run of a checkpoint.

        Raises:
            DatasetLayoutError: If training goes on from it, and clients have agreed on something else now.
        """
        kept = {name: each for state in clients.values() for name, each in state.get("data", {}).items()}
        found = {name: TableFeatures.from_state(each) for name, each in kept.items()}
        now = {name: self._features.get(name) for name in found}
        if not found:
            return
        if resumes and self.trainer is not None and now != found:
            raise DatasetLayoutError(
                f"the checkpoint was trained with other features of {[*found]} than its tables give now: give the "
                "tables, seed and arguments of that run, or train anew"
            )
        self._take(self._features | found)


def _levels(argument: str, levels: Sequence[object], numbers: NumberFormat) -> list[str]:
    """Names of classes or levels, as tables are read."""
    found = [numbers.without_decimals(name) for name in _names(argument, levels, numbers)]
    check_once(found, f"{argument} has", "name each once")
    return found


def _names(argument: str, names: Sequence[object], numbers: NumberFormat) -> list[str]:
    """Names that were given, as texts; numbers are taken for the texts that tables of this format have."""
    check_list(argument, names if isinstance(names, str) else None)
    found = []
    for name in names:
        is_number = isinstance(name, int | float) and not isinstance(name, bool)
        problem = None if is_number else not_text(name)
        if problem is not None:
            raise TypeError(f"{argument} must have texts, {problem}")
        found.append(numbers.text(name) if is_number else str(name).strip())  # type: ignore[arg-type]
    return found
