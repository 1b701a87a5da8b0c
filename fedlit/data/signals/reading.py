"""Recordings from arrays and from tables in files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from csv import reader
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedlit.data.samples import DatasetLayoutError, check_data, refuse_data
from fedlit.data.signals.recordings import Numbers, Recording
from fedlit.data.tables.values import check_once, some
from fedlit.federation.labels import UNLABELLED

if TYPE_CHECKING:
    import pandas as pd

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Of units of time stamps."""

_PACKED = frozenset({".gz", ".bz2", ".zip", ".xz", ".zst", ".tar"})
"""Endings of files that pandas unpacks."""


@dataclass(frozen=True)
class Names:
    """Names of columns that are no channels; `SignalDomains` documents them."""

    domain: str | None
    label: str
    recording: str
    time: str | None
    time_unit: str
    no_label: frozenset[str]

    @property
    def others(self) -> set[str]:
        """All of them."""
        return {self.label, self.recording} | {name for name in (self.domain, self.time) if name is not None}


@dataclass(frozen=True)
class Table:
    """Samples in the order of time, and a value of each in some columns.

    Args:
        where: File, or what has the samples otherwise, for messages.
        name: How recordings are called after it.
        x: Shape (T, C).
        channels: Names of the C channels.
        columns: Arrays of shape (T,).
        scale: Of each channel, by which samples are multiplied; ``None`` for 1.
        rate: Samples a second, if the table states it.
    """

    where: str
    name: str
    x: Numbers
    channels: tuple[str, ...]
    columns: Mapping[str, Numbers]
    scale: Numbers | None = None
    rate: float | None = None

    def recordings(self, names: Names, domain: str | None = None, class_name: str | None = None) -> Iterator[Recording]:
        """Yield the recordings of a ``domain``, or all; of one class if ``class_name`` is passed.

        Rows with one value in the column of the recording, and in that of the domain, are a recording; if they do not
        follow one another, they are several, unless they have time stamps that increase.
        """
        rows = np.arange(len(self.x))
        if domain is not None:
            values = self.columns[str(names.domain)]
            named = {value for value in dict.fromkeys(values.tolist()) if text_of(value) == domain}
            rows = np.flatnonzero(np.isin(values, [*named]) if values.dtype != object else [v in named for v in values])
        times: dict[str, int] = {}
        for part in self._parts(rows, names):
            name = self.name
            if names.recording in self.columns:
                name = f"{name}#{text_of(self.columns[names.recording][part[0]])}"
            times[name] = times.get(name, 0) + 1
            if times[name] > 1:
                name = f"{name}#{times[name]}"
            yield self._part(name, part, names, class_name)

    def _parts(self, rows: npt.NDArray[np.int64], names: Names) -> Iterator[npt.NDArray[np.int64]]:
        """Yield rows of each recording, of some rows."""
        groups = [rows]
        if names.recording in self.columns:
            codes = coded(self.columns[names.recording][rows], ())[0]
            groups = [rows[codes == code] for code in dict.fromkeys(codes.tolist())]
        for group in groups:
            if names.time in self.columns and len(group):
                time = _seconds(self.columns[str(names.time)][group], names.time_unit, self.where)
                if (np.diff(time) >= 0).all():  # rows of several recordings may take turns
                    yield group
                    continue
            breaks = np.flatnonzero(np.diff(group) > 1) + 1
            yield from (part for part in np.split(group, breaks) if len(part))

    def _part(self, name: str, rows: npt.NDArray[np.int64], names: Names, class_name: str | None) -> Recording:
        x = self.x[rows]
        if self.scale is not None:
            x = (x * self.scale).astype(np.float32)
        labels: npt.NDArray[np.int64] | None = None
        classes: tuple[str, ...] = ()
        if class_name is not None:
            labels, classes = np.zeros(len(x), dtype=np.int64), (class_name,)
        elif names.label in self.columns:
            labels, classes = coded(self.columns[names.label][rows], names.no_label)
        time = None
        if names.time is not None:
            check_data(names.time in self.columns, f"time (of {self.where})", "a column", "none called so")
            time = _seconds(self.columns[names.time][rows], names.time_unit, self.where)
        return Recording(name, x, self.channels, labels, classes, time, self.rate)


def text_of(value: Any) -> str:
    """Return a value of a column as a text, a whole number without decimals, a missing one as an empty text."""
    if isinstance(value, bytes):
        return value.decode(errors="replace").strip()
    if value is None or (isinstance(value, float | np.floating) and not np.isfinite(value)):
        return ""
    is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value)) if is_whole else str(value).strip()


def coded(values: Numbers, no_label: Collection[str]) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Return indices of the classes of labels, -1 for none, and names of the classes."""
    different: dict[Any, int] = {}
    if values.dtype.kind in "iufb":
        uniques, codes = np.unique(values, return_inverse=True)
        texts = [text_of(value) for value in uniques]
    else:
        codes = np.fromiter((different.setdefault(text_of(v), len(different)) for v in values), np.int64, len(values))
        texts = [*different]
    names = tuple(sorted({text for text in texts if text and text not in no_label}))
    index = {name: number for number, name in enumerate(names)}
    return np.array([index.get(text, UNLABELLED) for text in texts], dtype=np.int64)[codes.reshape(-1)], names


def _seconds(values: Numbers, unit: str, where: str) -> npt.NDArray[np.float64]:
    """Time stamps from the first one on."""
    if values.dtype.kind in "iuf":
        seconds: npt.NDArray[np.float64] = (values - values[0]).astype(np.float64) * SECONDS[unit]
        return seconds
    import pandas as pd

    try:
        stamps = pd.DatetimeIndex(pd.to_datetime(values, format="ISO8601", utc=True)).as_unit("ns")
    except Exception as error:  # libraries raise errors of any kind
        rule = "numbers, or dates and times as in ISO 8601"
        shown = (
            str(error).splitlines()[0].removesuffix(" You might want to try:")
        )  # pandas goes on with its own way out
        refuse_data(f"time stamps of {where}", rule, shown, "mend them, or name another column")
    since: npt.NDArray[np.float64] = np.asarray((stamps - stamps[0]).total_seconds(), dtype=np.float64)
    return since


# ---------------------------------------------------------------- arrays


def table_of_arrays(arrays: Mapping[str, Any], where: str, names: Names) -> Table:
    """Return samples of arrays: ``x``, (T, C), columns (T,), and optionally ``scale``, ``channels`` and ``rate``."""
    check_data("x" in arrays, where, "of an array x, shape (T, C)", [*arrays])
    x = np.asarray(arrays["x"])
    fits = x.ndim == 2 and x.dtype.kind in "iuf" and x.size > 0
    check_data(fits, f"x (of {where})", "numbers of shape (T, C)", f"shape {x.shape} of {x.dtype}")
    scale = np.asarray(arrays["scale"]) if "scale" in arrays else None
    if scale is not None:
        usable = scale.shape == (x.shape[1],) and scale.dtype.kind in "iuf" and bool(np.isfinite(scale).all())
        rule = f"finite numbers of shape ({x.shape[1]},), one for each channel"
        check_data(usable, f"scale (of {where})", rule, f"shape {scale.shape} of {scale.dtype}")
    channels = [text_of(name) for name in arrays.get("channels", np.arange(x.shape[1]))]
    check_data(len(channels) == x.shape[1], f"channels (of {where})", f"{x.shape[1]} names, as x has", channels)
    check_once(channels, f"channels (of {where})", "name each once")
    columns = {}
    for key in names.others & {*arrays}:
        values = np.asarray(arrays[key])
        rule = f"as long as x ({len(x)} samples)"
        check_data(values.shape == (len(x),), f"{key} (of {where})", rule, f"shape {values.shape}")
        columns[key] = values
    missing = [name for name in (names.domain, names.time) if name is not None and name not in columns]
    check_data(not missing, where, "of the columns that domain and time name", f"none called {some(missing)}")
    rate = None
    if "rate" in arrays:
        given = np.asarray(arrays["rate"])
        usable = given.size == 1 and given.dtype.kind in "iuf" and bool(np.isfinite(given).all() and (given > 0).all())
        check_data(usable, f"rate (of {where})", "one positive number, samples a second", f"shape {given.shape}")
        rate = float(given.reshape(()))
    return Table(where, Path(where).name, x, tuple(channels), columns, scale, rate)


# ---------------------------------------------------------------- files


def table_of_file(path: Path, name: str, names: Names, channels: Sequence[str] | None, csv: Mapping[str, str]) -> Table:
    """Return samples of a CSV or Parquet file, of which ``csv`` has the arguments of reading.

    Columns that ``names`` has not are channels, or those of ``channels``.
    """
    table = read_columns(path, csv, None if channels is None else {*channels, *names.others})
    others = [column for column in table.columns if column in names.others]
    given = [column for column in table.columns if column not in others] if channels is None else channels
    missing = [column for column in given if column not in table]
    way_out = "name the channels that all recordings have in channels, or rename them in the file"
    check_data(not missing, f"channels of {path}", f"{[*given]}", f"none called {some(missing)}", way_out)
    check_data(bool(given) and len(table) > 0, str(path), "a table of channels, with rows", f"{[*table.columns]}")
    import pandas as pd

    texts = [column for column in given if not pd.api.types.is_numeric_dtype(table[column])]
    way_out = (
        "name the column in label, domain, recording or time if it is one of these, or the channels in channels, or "
        "mend what is no number (decimal=',' if numbers have commas)"
    )
    for first in texts[:1]:
        is_text = table[first].notna() & pd.to_numeric(table[first], errors="coerce").isna()
        shown = f"others in {some(texts)}, of which {first!r} at row {int(is_text.argmax()) + 1} below the names"
        refuse_data(f"channels of {path}", "numbers", shown, way_out)
    x = table[[*given]].to_numpy(dtype=np.float32, na_value=np.nan)
    columns = {column: _values(table[column]) for column in others}
    return Table(str(path), name, x, tuple(given), columns)


def _values(column: pd.Series[Any]) -> Numbers:
    if column.dtype.kind in "iuf":
        return column.to_numpy()
    return column.astype(object).where(column.notna(), None).to_numpy(dtype=object)


def _check_fields(path: Path, number: int, csv: Mapping[str, str]) -> None:
    """Refuse lines of another number of fields, which pandas fills up, or whose first it takes for a name."""
    if path.suffix.lower() in _PACKED:
        return
    with path.open(newline="", encoding=csv["encoding"]) as file:
        lines = reader(file, delimiter=csv["sep"])
        for row in lines:
            fits = len(row) in (0, number)
            shown = f"{len(row)} in line {lines.line_num}"
            check_data(fits, str(path), f"of {number} fields in each line", shown, "mend it, or export it again")


def read_columns(path: Path, csv: Mapping[str, str], wanted: Collection[str] | None) -> pd.DataFrame:
    """Return columns of a CSV or Parquet file, of those ``wanted``, or all."""
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError("reading tables needs: pip install 'fedlit[tables]'") from error
    try:
        if path.suffix.lower() == ".parquet":
            table = pd.read_parquet(path)
            if any(name is not None for name in table.index.names):  # such as time stamps
                table = table.reset_index()
            table = table if wanted is None else table[[name for name in table.columns if name in wanted]]
        else:
            header = [*pd.read_csv(path, nrows=0, **csv).columns]  # type: ignore[call-overload]
            other = next((sign for sign in (";", "\t", "|", ",") if len(header) == 1 and sign in header[0]), None)
            rule, shown = f"of columns with separator={csv['sep']!r}", f"one, {header[0][:80] if header else ''!r}"
            check_data(other is None, str(path), rule, shown, f"give separator={other!r}")
            _check_fields(path, len(header), csv)
            keeps = None if wanted is None else (lambda name: str(name).strip() in wanted)
            table = pd.read_csv(path, usecols=keeps, skipinitialspace=True, low_memory=False, **csv)  # type: ignore[call-overload]
        table.columns = pd.Index([str(name).strip() for name in table.columns])
    except (DatasetLayoutError, ImportError):
        raise
    except UnicodeError as error:
        refuse_data(
            str(path), f"written in encoding={csv['encoding']!r}", error, "give its encoding, such as 'latin-1'"
        )
    except Exception as error:  # at bytes of another format, libraries raise errors of any kind
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        refuse_data(str(path), "a table with a line of names", reason, "mend or export it again")
    unnamed = [name for name in table.columns if name.startswith("Unnamed: ")]
    way_out = "write the table without numbers of rows (in pandas, to_csv(index=False)), or name channels"
    check_data(not unnamed, str(path), "of columns with names", some(unnamed), way_out)
    check_once([*table.columns], f"{path} (names of columns)", "rename them")
    return table
