"""Time series of one's own: recordings of several channels in .npz files, tables or arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fedlit.checks import check, check_one_of, refuse
from fedlit.data.decoding import subfolders
from fedlit.data.files import check_names, read_npz
from fedlit.data.samples import DatasetNotFoundError, DomainDataset, check_data, refuse_data
from fedlit.data.signals.module import SignalModule, in_parts
from fedlit.data.signals.reading import (
    SECONDS,
    Names,
    Table,
    read_columns,
    table_of_arrays,
    table_of_file,
    text_of,
)
from fedlit.data.signals.recordings import Recording, Windows, same_rate
from fedlit.data.tables.reader import SUFFIXES
from fedlit.federation.names import check_list, check_texts


class SignalDomains(SignalModule):
    """Windows of recordings of several channels, such as acceleration: one client for each person, device or room.

    - ``.npz`` file, or a dictionary of such arrays: ``x`` (T, C), samples in the order of time, and columns of T
      values: ``label``, ``domain``, and optionally ``recording`` and ``time``. Optionally ``scale`` (C,), which
      samples are multiplied by to be in their units, ``channels`` (C,), their names, and ``rate``, samples a second.
    - folder ``DOMAIN/recording.csv`` (or ``.tsv``, ``.txt``, ``.parquet``), each a recording, with a column of labels
      and a column for each channel, named in the first line.
    - folder ``DOMAIN/CLASS/recording.csv``, with a column for each channel.
    - with ``domain``, a column that names the client: one such table, or a folder of them, however deep.

    At the target, the column of labels may be missing or empty; then all windows are kept.

    Args:
        path: The file, the folder or the arrays. ``None`` is a process without data, such as the server's, which is
            given ``clients`` and ``classes``.
        domain: Column of the client's name; ``None`` takes the names of folders.
        label: Column of labels.
        recording: Column that tells recordings in a table apart, if there is one. Rows of one that do not follow one
            another are several, unless they have time stamps that increase.
        time: Column of time stamps, which increase in a recording: numbers, or dates and times as in ISO 8601.
        time_unit: Of time stamps that are numbers.
        no_label: Labels that stand for none, as an empty one does.
        separator: Between columns of CSV files.
        decimal: Sign before decimals in CSV files.
        encoding: Of the text of CSV files.
        predict_file: Table or ``.npz`` file of the target, with columns as in training but for labels, all windows of
            which are predicted in place of its test windows.
        target: The domain that is adapted to; ``None`` takes the last of the clients.
        kwargs: See `SignalModule`.

    Raises:
        DatasetNotFoundError: If there is nothing at ``path``.
        DatasetLayoutError: If it is laid out in another way, or a recording cannot be used.
        ImportError: If pandas is not installed, which reads tables and is the extra ``tables``.
    """

    def __init__(
        self,
        path: str | dict[str, Any] | None = None,
        *,
        domain: str | None = None,
        label: str = "label",
        recording: str = "recording",
        time: str | None = None,
        time_unit: Literal["s", "ms", "us", "ns"] = "s",
        no_label: list[str] | None = None,
        separator: str = ",",
        decimal: str = ".",
        encoding: str = "utf-8",
        predict_file: str | None = None,
        target: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(target=target, **kwargs)
        for argument, name in {"domain": domain, "label": label, "recording": recording, "time": time}.items():
            check_texts(argument, name)
        check_one_of("time_unit", time_unit, [*SECONDS])
        check_list("no_label", no_label)
        none = frozenset(["-1"] if no_label is None else no_label)
        self._columns_named = Names(domain, label, recording, time, time_unit, none)
        self._csv = {"sep": separator, "decimal": decimal, "encoding": encoding}
        self.predict_file = None if predict_file is None else Path(predict_file)
        self._given = path
        self._last: tuple[Path, Table] | None = None
        self.elsewhere = path is None
        if path is None:
            rule = "named with path=None, in a process without recordings to find them in"
            way_out = "name all, in the order that all processes have, or give path if there are recordings here"
            check(self._client_names is not None, "clients", rule, None, way_out)
            check(self._wanted is not None, "classes", rule, None, way_out)
        self.check_roster()
        self.class_names()

    # ---------------------------------------------------------------- where recordings are

    @cached_property
    def _arrays(self) -> Table | None:
        """Samples of arrays, if they come as such."""
        if isinstance(self._given, Mapping):
            arrays, where = self._given, "path (arrays)"
        elif self._given is not None and Path(self._given).suffix.lower() == ".npz" and self._path.exists():
            arrays, where = read_npz(self._path), str(self._path)
        else:
            return None
        rule = "the column that names each sample's client"
        check(self._columns_named.domain is not None, "domain", rule, None, f"one of {[*arrays]}")
        return table_of_arrays(arrays, where, self._columns_named)

    @property
    def _path(self) -> Path:
        path = Path(str(self._given))
        if not path.exists():
            rule = "an .npz file, a folder of recordings, or a table"
            refuse("path", rule, str(path), f"looked for {str(path.absolute())!r}", DatasetNotFoundError)
        return path

    @cached_property
    def _files(self) -> dict[str, list[tuple[Path, str | None]]]:
        """Tables of each domain, each with its class if a folder names it."""
        if self._given is None:
            return {}
        path, suffixes, domain = self._path, ", ".join(SUFFIXES), self._columns_named.domain
        if domain is not None:
            tables = [path] if path.is_file() else _tables_in(path, deep=True)
            check_data(bool(tables), "path", f"a folder with tables ({suffixes})", f"{str(path)!r} without any")
            files: dict[str, list[tuple[Path, str | None]]] = {}
            for each in tables:
                column = read_columns(each, self._csv, {domain})
                if domain not in column:
                    there = [*read_columns(each, self._csv, None).columns]
                    way_out = "name one of them, or write a first line of names"
                    refuse_data(f"domain ({domain!r} of {each})", "a column of the table", f"columns {there}", way_out)
                for value in column[domain].unique():
                    files.setdefault(text_of(value), []).append((each, None))
            check_data("" not in files, f"domain ({domain!r} of {path})", "in all rows", "empty ones", "fill it in")
            return files
        way_out = "give domain, the column of the client's name, or a folder with one folder for each client"
        check_data(path.is_dir(), "path", f"a folder (DOMAIN/recording{SUFFIXES[0]})", f"the file {path}", way_out)
        files = {folder.name: _files_of(folder) for folder in subfolders(path)}
        rule = f"a folder with one folder of tables ({suffixes}) for each domain"
        check_data(bool(files), "path", rule, f"{str(path)!r} without any", way_out)
        for name, found in files.items():
            check_data(bool(found), str(path / name), f"a folder with tables ({suffixes})", "none")
        return files

    def domain_names(self) -> list[str]:
        """Return names of folders, sorted, or values of the column ``domain``, in the order in which they occur."""
        if self.elsewhere:
            return []
        return self._array_domains if self._arrays is not None else [*self._files]

    @cached_property
    def _array_domains(self) -> list[str]:
        assert self._arrays is not None
        values = self._arrays.columns[str(self._columns_named.domain)]
        names = [text_of(value) for value in dict.fromkeys(values.tolist())]
        check_data("" not in names, f"domain (of {self._arrays.where})", "of each sample", "empty ones", "fill it in")
        return names

    def recordings(self, domain: str) -> list[Recording]:
        """Return the recordings of a domain, files by name."""
        names = self._columns_named
        if self._arrays is not None:
            return [*self._arrays.recordings(names, domain)]
        recordings: list[Recording] = []
        for path, class_name in self._files[domain]:
            table = self._table(path)
            of_domain = domain if names.domain is not None else None
            recordings += table.recordings(names, of_domain, class_name)
        if domain != self.target:
            for each in recordings:
                rule = f"with labels in a column {names.label!r} (label), or in a folder of its class"
                way_out = "name the column in label, leave the client out of clients, or make it the target"
                check_data(each.labels is not None, each.name, rule, f"none, at source {domain!r}", way_out)
        return recordings

    def _table(self, path: Path) -> Table:
        """Samples of a file; the last one is kept, as it may have several domains."""
        if self._last is None or self._last[0] != path:
            name = path.name if path == self._path else path.relative_to(self._path).as_posix()
            channels = self._channels if self._names_channels else None
            self._last = (path, table_of_file(path, name, self._columns_named, channels, self._csv))
        return self._last[1]

    # ---------------------------------------------------------------- prediction

    @cached_property
    def _new_windows(self) -> Windows:
        """All windows of ``predict_file``, without labels."""
        path, names = self.predict_file, self._columns_named
        assert path is not None
        if not path.is_file():
            rule = f"an .npz file or a table ({', '.join(SUFFIXES)})"
            refuse("predict_file", rule, str(path), error=DatasetNotFoundError)
        if path.suffix.lower() == ".npz":
            table = table_of_arrays(read_npz(path), str(path), names)
        else:
            table = table_of_file(path, path.name, names, self.channel_names(), self._csv)
        column = table.columns.get(str(names.domain))
        others = [] if column is None else sorted({text_of(value) for value in column} - {self.target})
        rule = f"of samples of the target ({self.target!r})"
        check_data(not others, f"predict_file ({path})", rule, others, "leave the others out")
        unlabelled = [
            replace(each, labels=None, classes=()).selected(self.channel_names()) for each in table.recordings(names)
        ]
        windows = self.window_rules.cut(self.target, unlabelled, self.class_names(), is_target=True)
        self._domain(self.target)
        trained = self._windows[self.target].rate
        way_out = "give rate, to which all are resampled, in training too"
        rule = f"{trained}, as in training (samples a second)"
        check_data(same_rate(windows.rate, trained), f"rate of predict_file ({path})", rule, windows.rate, way_out)
        return windows

    def predict_dataloader(self) -> Any:
        """Return the target's test windows, or all windows of ``predict_file``, in order."""
        if self.predict_file is None or self.target not in self._local_names():
            return super().predict_dataloader()
        new = self._new_windows
        return self._loader_of({self.target: DomainDataset(in_parts(self.raw_inputs().network, new.x), new.y)})

    def ids(self, client: str, stage: str) -> list[str]:
        """Return each window's recording, and where it begins, in seconds or (without a rate) in samples."""
        new = stage == "predict" and self.predict_file is not None
        return self._new_windows.texts() if new else super().ids(client, stage)


def _tables_in(folder: Path, deep: bool = False) -> list[Path]:
    files = folder.rglob("*") if deep else folder.iterdir()
    found = sorted(each for each in files if each.suffix.lower() in SUFFIXES and each.is_file() and each.name[0] != ".")
    check_names(found)
    return found


def _files_of(folder: Path) -> list[tuple[Path, str | None]]:
    """Tables of a domain, with the class that their folder names."""
    direct, classes = _tables_in(folder), subfolders(folder)
    way_out = "move the tables into the folders of their classes, or take the folders away"
    check_data(not (direct and classes), str(folder), "of tables, or of one folder per class", "both", way_out)
    return [(each, None) for each in direct] or [(each, inner.name) for inner in classes for each in _tables_in(inner)]
