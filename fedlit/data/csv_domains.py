"""Tables of one's own: a CSV or Parquet file per client, or one file with a column that names each row's client."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fedlit.checks import check, check_one_of
from fedlit.data.base import DomainDataModule
from fedlit.data.raw_inputs import RawRows
from fedlit.data.samples import DatasetNotFoundError, Domain, DomainDataset, check_data, refuse_data
from fedlit.data.source import check_classes
from fedlit.data.tables.columns import Columns, LabelReader, check_levels, column, type_of, warn_of_constants
from fedlit.data.tables.features import (
    LEVELS,
    MAGNITUDES,
    STATISTICS,
    Column,
    TableFeatures,
    agree_on_levels,
    common_columns,
    numbers_of,
    total_over,
)
from fedlit.data.tables.files import check_ids, find_tables, read_new_rows, split_by_site
from fedlit.data.tables.reader import TableReader
from fedlit.data.tables.values import NumberFormat, as_texts, cells, named_levels, texts_of
from fedlit.federation import Summed
from fedlit.federation.labels import UNLABELLED, TaskName
from fedlit.federation.names import alike, check_list, check_texts, difference, folded, shown

if TYPE_CHECKING:
    import pandas as pd

    from fedlit.functional.table_moments import Total


class CSVDomains(DomainDataModule):
    """Tables, CSV or Parquet, of classes or numbers to predict from numbers and categories.

    Each process reads the tables of its clients; those of others need not be there, nor be named in ``files`` if
    ``clients`` has the names of all. Names and types of columns are announced when training starts, and must be the
    same at each client, in any order. A column of numbers is standardised, one of texts is a category; missing values
    are allowed in both. What clients agree on is summed through the channels ``"levels"``, ``"magnitudes"`` and
    ``"statistics"``, over all clients whoever is the target, and lies in the checkpoint.

    Args:
        files: File for each client; or a folder, in which each table is a client of its name; or one file, with
            ``site``. ``None`` is a process without tables, such as the server's, which is given ``clients`` and
            ``classes``.
        label: Column to predict; in regression also several, ``[a, b]``, whose numbers are predicted together. The
            target's table may lack it, or have it empty or -1 where a label is not known; of several, all or none.
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
            ``decimal`` is a comma, so that ``1.234,5`` is 1234.5, and otherwise none. A blank is one of any width.
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
        label: str | list[str],
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
        check_one_of("task", task, ("classification", "regression"))
        check_one_of("statistics", statistics, ("federated", "own"))
        labels = label if isinstance(label, list) else [label]
        for argument, names in {"files": files, "label": labels, "site": site, "id": id}.items():
            check_texts(argument, names)
        if isinstance(label, list):
            each_once = 0 < len(set(label)) == len(label)
            check(each_once and task == "regression", "label", "one column, or several in regression, each once", label)
        check_list("leave_out", leave_out)
        check_list("categories", categories)
        check_classes(classes)
        one_file = not isinstance(files, dict) or site is None
        check(one_file, "site", "left out with a file for each client in files", site)
        numbers = NumberFormat(decimal, thousands)
        self.task = task
        self.label, self.site, self.id, self._label_names = label, site, id, labels
        self.leave_out = list(leave_out or ())
        named = categories if isinstance(categories, dict) else dict.fromkeys(categories or ())
        self.categories: dict[str, list[str] | None] = {
            name: None if levels is None else named_levels(f"categories[{name!r}]", levels, numbers)
            for name, levels in named.items()
        }
        self._asks_for_levels = categories is None or None in self.categories.values()
        self.statistics = statistics
        self.predict_file = None if predict_file is None else Path(predict_file)
        self._classes = None if classes is None else named_levels("classes", classes, numbers)
        self._named_classes = self._classes
        texts = [*self.categories, *filter(None, (site, id)), *(labels if task == "classification" else ())]
        known = {name: levels or [] for name, levels in self.categories.items()}
        if task == "classification":
            known[labels[0]] = self._named_classes or []
        missing = as_texts("missing_values", missing_values or (), numbers)
        self.reader = TableReader(separator, numbers, encoding, missing, texts, id, [*labels, *self.leave_out], known)
        self.elsewhere = files is None
        if self.elsewhere:
            rule = "named with files=None, in a process without tables to find them in"
            way_out = "name all, in the order that all processes have, or give files if there are tables here"
            check(self._client_names is not None, "clients", rule, None, way_out)
            check(classes is not None or task == "regression", "classes", rule, None, way_out)
        is_one = site is not None and isinstance(files, str)
        self._paths = {} if files is None or is_one else find_tables(files)
        self._tables: dict[str, pd.DataFrame] = {}
        self._numbers: dict[str, Tensor] = {}  # labels, by client
        self._columns: Columns | None = None
        self._samples: dict[str, int] = {}
        self._features: dict[str, TableFeatures] = {}
        self._width: int | None = None
        self._file = files
        self._one = split_by_site(Path(str(files)), str(site), self.reader, self._key) if is_one else None
        self.check_roster()

    # ---------------------------------------------------------------- tables

    def domain_names(self) -> list[str]:
        """Return the clients whose tables are here."""
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
        """Return the file of a client, for messages."""
        return str(self._paths[client]) if self._one is None else f"{self._file} (rows of {client!r})"

    def table(self, client: str) -> pd.DataFrame:
        """Return a client's rows, with all columns of its file."""
        if client not in self._tables:
            self._check_here(client)
            table = self.reader.read(self._paths[client]) if self._one is None else self._one[client]
            way_out = "leave the client out, or give it data"
            check_data(len(table) > 0, self.where(client), "a table with rows", "none", way_out)
            check_ids(table, self.id, self.where(client))
            self._tables[client] = table
        return self._tables[client]

    def ids(self, client: str, stage: str) -> list[str] | None:
        """Return ids of a client's rows; without a column of them ``None``, or numbers from 0 in ``predict_file``."""
        if stage == "predict" and self.predict_file is not None:
            rows = self._new_rows()
            return [str(number) for number in range(len(rows))] if self.id is None else [*texts_of(rows[self.id])]
        if self.id is None:
            return None
        positions: Tensor = getattr(self.split(client), "test" if stage == "predict" else stage)
        return [*texts_of(self.table(client)[self.id].iloc[positions.tolist()])]

    # ---------------------------------------------------------------- labels

    def class_names(self) -> list[str]:
        """Return the classes, in the order of their labels; in regression, the columns to predict."""
        if self.task == "regression":
            return [*self._label_names]
        if self._classes is None:
            (labels,) = self._label_readers
            texts = [labels.texts(self.table(name), name, self.where(name)).dropna() for name in self._names_here()]
            found = {text for each in texts for text in each}
            numeric = all(text.removeprefix("-").isdecimal() for text in found)
            self._classes = sorted(sorted(found), key=int if numeric else str)
            what, way_out = f"label ({self.label!r})", "mend the labels, or name all in classes"
            self._check_written_alike(what, self._classes, way_out)
            rule = f"of 2 classes at least in the tables that are here, where {UNLABELLED} is no label"
            check_data(len(found) > 1, what, rule, self._classes, "name all in classes")
        return self._classes

    @property
    def _label_readers(self) -> list[LabelReader]:
        return [
            LabelReader(label, self.reader.numbers, self._named_classes, self.target) for label in self._label_names
        ]

    def _y(self, client: str) -> Tensor:
        if client not in self._numbers:
            table, where, (reader, *others) = self.table(client), self.where(client), self._label_readers
            if self.task == "regression":
                numbers = [each.numbers_to_predict(table, client, where) for each in (reader, *others)]
                self._numbers[client] = torch.stack(numbers, dim=1) if others else numbers[0]
            else:
                self._numbers[client] = reader.class_numbers(table, self.class_names(), client, where)
        return self._numbers[client]

    def _train(self, client: str) -> Tensor:
        """Positions of a client's training samples, before its features are known."""
        return self._make_split(client, self._y(client)).train

    # ---------------------------------------------------------------- columns

    def _columns_of(self, client: str) -> Columns:
        table, where = self.table(client), self.where(client)
        for argument in ("leave_out", "categories"):
            for name in getattr(self, argument):
                column(table, name, argument, where)
        others = {*self._label_names, self.site, self.id, *self.leave_out}
        columns: Columns = {}
        for name in [str(name) for name in table.columns if name not in others]:
            values = table[name]
            type_ = type_of(name, values, where, name in self.categories, self.reader.numbers)
            if type_ == "category":
                values = texts_of(values)
                levels = [*dict.fromkeys(values.dropna())]
                check_levels(name, levels, self.categories.get(name), self._asks_for_levels, where)
            columns[name] = (type_, bool(values.isna().any()))
        rule = f"a table with columns besides {sorted(map(str, others - {None}))} to predict from"
        check_data(bool(columns), where, rule, "none")
        return columns

    def facts(self, client: str) -> dict[str, Any]:
        """Return what a client announces of its data: columns, classes and the number of its training samples."""
        members = self._members(client)
        has = self._classes_of(client, [self._y(name) for name in members])
        absent = [name for name, occurs in zip(self.class_names(), has or (), strict=False) if not occurs]
        if absent:
            files = ", ".join(map(self.where, members))
            warnings.warn(f"client {client!r} has no sample of the classes {absent} in {files}", stacklevel=2)
        return {
            "shapes": [], "classes": self.class_names(), "has": has,
            "columns": {name: self._columns_of(name) for name in members},
            "samples": {name: len(self._train(name)) for name in members},
            "levels": self.categories,
        }  # fmt: skip

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """As of the base; columns must be the same at all clients, and then it is known what they hold."""
        super().check_facts(facts)
        self._columns = common_columns(facts, self._texts_beside_numbers)
        self._samples = {name: number for each in facts.values() for name, number in each["samples"].items()}

    def _texts_beside_numbers(self, name: str, types: Mapping[str, str]) -> str:
        """Where a column that is of texts at some clients has numbers there, too; empty if the tables are elsewhere."""
        for client in [client for client, type_ in types.items() if type_ == "category" and self.is_here(client)]:
            texts = texts_of(self.table(client)[name]).dropna()
            others = texts[self.reader.numbers.numbers(texts).isna()]
            if 0 < len(others) < len(texts):
                return f"; {self.where(client)} has {cells(others)} beside numbers"
        return ""

    # ---------------------------------------------------------------- what clients agree on

    @property
    def channels(self) -> tuple[Summed, ...]:
        """Channels over which clients agree on features."""
        chosen = (LEVELS,) if self._asks_for_levels else ()
        return chosen + ((MAGNITUDES, STATISTICS) if self.statistics == "federated" else ())

    def setup(self, stage: str | None = None) -> None:
        """Agree with the other clients on columns, levels and statistics, before networks are built."""
        super().setup(stage)
        federation = self._federation()
        if federation is not None and stage == "fit":
            federation.channels.declare(self.channels)  # of a Trainer with another strategy
            self._agree(total_over(federation, self._members))
            widths = federation.all_gather("the number of features", lambda client: len(self.feature_names()))
            self._width = next(iter(widths.values()))  # which a process without clients has no table to find in

    def _agree(self, total: Total) -> None:
        """Find what features are made with: levels, mean and deviation."""
        from fedlit.functional.table_moments import agree_on_moments, own_moments

        assert self._columns is not None
        numbers = [name for name, (type_, _) in self._columns.items() if type_ == "number"]
        levels = {name: [*(self.categories.get(name) or ())] for name in self._columns if name not in numbers}
        asked = [name for name in levels if self.categories.get(name) is None]
        if asked:
            levels |= agree_on_levels(asked, lambda domain: self._levels(domain, asked), total)
            way_out = "write them alike in all tables, or name all levels in categories if they are different things"
            for name in asked:
                self._check_written_alike(f"{name} (levels)", levels[name], way_out)
        columns = tuple(
            Column(name, missing, None if type_ == "number" else tuple(levels[name]))
            for name, (type_, missing) in self._columns.items()
        )

        def train_numbers(domain: str) -> Tensor:
            return numbers_of(self.table(domain), numbers)[self._train(domain)]

        common = None
        if self.statistics == "federated" and numbers:
            common = agree_on_moments(len(numbers), train_numbers, self._samples, total)
        features = {}
        for name in self._hosted():
            mean, deviation = common or own_moments(train_numbers(name))
            features[name] = TableFeatures(columns, tuple(mean.tolist()), tuple(deviation.tolist()))
            rows = self.table(name).iloc[self._train(name).tolist()]
            warn_of_constants(rows, self._columns, self.reader.numbers, self.where(name))
        self._set_features(features)

    def _levels(self, domain: str, names: Sequence[str]) -> dict[str, list[str]]:
        return {name: [*dict.fromkeys(texts_of(self.table(domain)[name]).dropna())] for name in names}

    def _total_here(self, channel: str, message: Callable[[str], Tensor]) -> Tensor:
        """Sum over tables that are all here, for a look at them without a run."""
        return torch.stack([message(client.name) for client in self.check_roster()]).sum(dim=0)

    def _key(self, name: str) -> object:
        """Equal for classes, levels and sites that people would take for one: 01 is 1, and YES is yes."""
        number = None if any(map(str.isalpha, name)) else self.reader.numbers.number(name)
        return folded(name) if number is None else number

    def _check_written_alike(self, what: str, names: Sequence[str], way_out: str) -> None:
        """Refuse one class or level that is written in two ways, as true and TRUE of two programs are."""
        for group in alike(names, self._key):
            refuse_data(what, "written in one way", f"{shown(group)}, which differ in {difference(group)}", way_out)

    def _hosted(self) -> list[str]:
        """Domains of the clients that this process hosts."""
        return [name for client in self._local_names() for name in self._members(client)]

    def _set_features(self, features: dict[str, TableFeatures]) -> None:
        if features != self._features:
            self._features = features
            self._domains.clear()
            self._datasets.clear()

    # ---------------------------------------------------------------- features

    def features_of(self, client: str) -> TableFeatures:
        """Return what makes features of a client's rows.

        Raises:
            RuntimeError: If clients have not agreed on it yet, and their tables are not all here.
        """
        if not self._features:
            self._check_elsewhere(client)
            if not all(self.is_here(each.name) for each in self.check_roster()):
                raise RuntimeError(
                    "clients agree on features when training starts, or a checkpoint brings what they agreed on: leave "
                    "in_features of networks out, and train, or give ckpt_path"
                )
            self.check_facts({client.name: self.facts(client.name) for client in self._roster_of_run()})
            self._agree(self._total_here)
        return self._features[client]

    def feature_names(self) -> list[str]:
        """Return names of the features."""
        self.features_of(next(iter(self._hosted()), self.target))
        return next(iter(self._features.values())).names

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Number of features; in a process that hosts no client, as received from the others."""
        if self._width is not None and not self._hosted():
            return (self._width,)
        return (len(self.feature_names()),)

    def load(self, domain: str) -> Domain:
        """Return features and labels of a client's rows."""
        return Domain(self.features_of(domain).of(self.table(domain)), self._y(domain))

    def predict_dataloader(self) -> Any:
        """Return the target's test samples, or the rows of ``predict_file``, in order."""
        local = self._local_names()
        if self.target in local:
            self._check_elsewhere(self.target)
        if self.predict_file is None or self.target not in local:
            return super().predict_dataloader()
        x = self.features_of(self.target).of(self._new_rows())
        unknown, several = nan if self.task == "regression" else UNLABELLED, len(self._label_names) > 1
        y = torch.full((len(x), len(self._label_names)) if several else (len(x),), unknown)
        return self._loader_of({self.target: DomainDataset(x, y)})

    def _new_rows(self) -> pd.DataFrame:
        assert self.predict_file is not None
        features = self.features_of(self.target)
        return read_new_rows(self.predict_file, self.reader, features, self.id, self.site, self.target)

    def raw_inputs(self) -> RawRows:
        """Return rows of the target's table, and the network that makes features of them."""
        raw = self.features_of(self.target).raw()
        if self.is_here(self.target):
            self.table(self.target)  # shows how its numbers are written
        return replace(raw, reading=self.reader.reading([name for name, _ in raw.columns]))

    # ---------------------------------------------------------------- checkpoints

    def client_state(self, client: str) -> dict[str, Any]:
        """Return what makes features of a client's rows."""
        features = {name: self._features[name].state() for name in self._members(client) if name in self._features}
        return {"data": features} if features else {}

    def load_state(self, clients: Mapping[str, Mapping[str, Any]], public: Mapping[str, Any], resumes: bool) -> None:
        """Make features as in the run of a checkpoint; refuse to go on if clients have agreed on others now."""
        states = {name: each for state in clients.values() for name, each in state.get("data", {}).items()}
        if not states:
            return
        restored = {name: TableFeatures.from_state(each) for name, each in states.items()}
        now = {name: self._features.get(name) for name in restored}
        if resumes and self.trainer is not None and now != restored:
            way_out = "give the tables, seed and arguments of that run, or train anew"
            refuse_data("files", "those of the checkpoint", f"tables of {[*restored]} with other features", way_out)
        self._set_features(self._features | restored)
