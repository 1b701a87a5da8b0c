"""Arrays from files that anybody may have made: read within bounds, or refused by one type of error."""

from __future__ import annotations

import gzip
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from fedlit.data.samples import check_data, refuse_data
from fedlit.data.tables.values import some
from fedlit.federation.transport import MOST_BYTES

Arrays = dict[str, npt.NDArray[Any]]

_SAVE_MAT = "save it from MATLAB with version '-v7' or as .npz"

# MATLAB's files are read by compiled code that ends the process at some that are malformed, so in one of its own
_READ_MAT = """
import sys
import numpy as np
from scipy.io import loadmat
arrays = {}
for number, path in enumerate(sys.stdin.read().splitlines()):
    print(number, flush=True)
    content = {key: value for key, value in loadmat(path).items() if not key.startswith("__")}
    if sys.argv[2]:
        cells = {key: value for key, value in content.items() if value.dtype == object}
        content |= {f"{key}{[*at]}": cell for key, value in cells.items() for at, cell in np.ndenumerate(value)}
    content = {key: value.toarray() if hasattr(value, "toarray") else value for key, value in content.items()}
    arrays |= {f"{number}/{key}": value for key, value in content.items() if value.dtype.kind in "biufc"}
np.savez(sys.argv[1], **arrays)
"""


def check_names(paths: Iterable[Path]) -> None:
    """Refuse names that are not UTF-8, such as of an old archive: no table of predictions could have them."""
    others = [ascii(path.name)[1:-1] for path in paths if not _is_text(path.name)]
    if others:
        folder = str(next(iter(paths)).parent)
        refuse_data(f"names in {folder!r}", "in UTF-8", some(others), "rename these, such as with convmv")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_npz(path: str | Path) -> Arrays:
    """Read the arrays of an .npz file.

    Raises:
        DatasetLayoutError: If it is no such file, holds objects, or unpacks to more than this machine's memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_size(sum(member.file_size for member in archive.infolist()))
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        for key, array in arrays.items():
            if not isinstance(array, np.ndarray):
                raise ValueError(f"{key!r} is no array")
            if array.dtype.kind == "U":
                array.tolist()  # raises where a file names characters that do not exist
        return arrays
    except Exception as error:  # at bytes of another format, libraries raise errors of any kind
        refuse_data(str(path), "an .npz file", _message_of(error), "save plain arrays with numpy.savez")


def read_mat(path: str | Path, seconds: float = 600.0) -> Arrays:
    """Read the numeric arrays of a MATLAB file of version 7 or older, sparse ones as full ones.

    Raises:
        DatasetLayoutError: If it is no such file, or reading it takes longer than so many ``seconds``.
    """
    return read_mats([path], seconds)[0]


def read_mats(paths: Sequence[str | Path], seconds: float = 600.0, cells: bool = False) -> list[Arrays]:
    """Do the same with many files, in one process; an error names the first that cannot be read.

    With ``cells``, the arrays in those of a cell array, too, under its name and their place (``"x[0, 1]"``).
    """
    content: list[Arrays] = [{} for _ in paths]
    with TemporaryDirectory() as folder:
        read = Path(folder, "read.npz")
        progress = Path(folder, "progress.txt")
        late, code, errors = False, 0, ""
        with progress.open("w") as output:
            try:
                done = subprocess.run(
                    [sys.executable, "-c", _READ_MAT, str(read), "cells" * cells],
                    input="\n".join(map(str, paths)), stdout=output, stderr=subprocess.PIPE, timeout=seconds,
                    check=False, text=True, errors="replace",
                )  # fmt: skip
                code, errors = done.returncode, done.stderr
            except subprocess.TimeoutExpired:
                late = True
        at = str(paths[int((progress.read_text().split() or ["0"])[-1])]) if paths else ""
        check_data(not late, at, f"read in {seconds:g} s", "one that takes longer", _SAVE_MAT)
        lines = errors.strip().splitlines()
        shown = lines[-1] if lines else f"one whose reader ended with {code}"
        check_data(not code, at, "a .mat file", shown, _SAVE_MAT)
        for key, array in read_npz(read).items():
            number, _, name = key.partition("/")
            content[int(number)][name] = array
    return content


def unzipped(path: str | Path) -> bytes:
    """Read the content of a .gz file.

    Raises:
        DatasetLayoutError: If it is no such file, or unpacks to more than this machine's memory.
    """
    parts, size = [], 0
    try:
        with gzip.open(path) as file:
            while part := file.read(1 << 24):
                parts.append(part)
                size += len(part)
                _check_size(size)
    except Exception as error:  # at bytes of another format, libraries raise errors of any kind
        refuse_data(str(path), "a .gz file", _message_of(error), "get it again")
    return b"".join(parts)


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise ValueError(f"it unpacks to {size} bytes or more, and this machine has {MOST_BYTES}")


def _message_of(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
