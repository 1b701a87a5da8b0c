"""Files that anybody may have made: read, or refused by one kind of error, and never the end of the process."""

from __future__ import annotations

import gzip
import io
import os
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat
from scipy.sparse import csc_matrix

from fedlit.data import DatasetLayoutError
from fedlit.data import files as data_files
from fedlit.data.files import read_mat, read_npz, unzipped
from refused import refused


def mat(tmp_path: Path, **content: Any) -> Path:
    path = tmp_path / "a.mat"
    savemat(path, content)
    return path


def npz(**content: Any) -> bytes:
    made = io.BytesIO()
    np.savez(made, **content)
    return made.getvalue()


def archive(**members: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name, member in members.items():
            file.writestr(f"{name}.npy", member)
    return made.getvalue()


def npy(header: str) -> bytes:
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def unread(read: Callable[[Path], Any], path: Path) -> str:
    """The error of a file that is refused."""
    with refused(str(path), DatasetLayoutError) as caught:
        read(path)
    return str(caught.value)


FLOATS = "{'descr': '<f8', 'fortran_order': False, 'shape': "


class MakesFolder:
    def __reduce__(self) -> Any:
        return os.mkdir, ("stolen",)


def test_arrays_come_back_from_both_formats(tmp_path: Path) -> None:
    x, sparse = np.arange(6.0).reshape(2, 3), csc_matrix(np.eye(3))
    read = read_mat(mat(tmp_path, fts=x, sparse=sparse, words="text", cells=np.array([[1], "a"], dtype=object)))
    assert sorted(read) == ["fts", "sparse"]
    assert np.array_equal(read["fts"], x)
    assert np.array_equal(read["sparse"], np.eye(3))
    (tmp_path / "a.npz").write_bytes(npz(x=x, n=np.array(3)))
    assert np.array_equal(read_npz(tmp_path / "a.npz")["x"], x)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no zip",
        npy(FLOATS + "(1,)}") + bytes(8),  # an .npy file
        npz(x=np.arange(3))[:-30],
        npz(x=np.array([MakesFolder()])),
        archive(x=b"no array"),
        *(archive(x=npy(f"{FLOATS}{shape}}}")) for shape in ("(10**15,)", "(10,)", "(-1,)", "(" * 3000)),
        archive(x=npy(FLOATS.replace("<f8", "nonsense") + "(1,)}")),
        archive(x=npy("__import__('os').mkdir('stolen')")),
    ],
)
def test_what_is_no_npz_file_is_an_error_of_one_kind(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.npz").write_bytes(content)
    unread(read_npz, tmp_path / "a.npz")
    assert not (tmp_path / "stolen").exists()


def test_what_unpacks_to_more_than_there_is_memory_is_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "MOST_BYTES", 10**6)
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x.npy", npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2000000,)}") + bytes(2 * 10**6))
    assert (tmp_path / "a.npz").stat().st_size < 5000
    assert "unpacks to 20000" in unread(read_npz, tmp_path / "a.npz")
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(2 * 10**6)))
    assert "unpacks to 2000000 bytes" in unread(unzipped, tmp_path / "a.gz")


@pytest.mark.parametrize(
    "content",
    [b"", b"text", bytes(200), gzip.compress(b"text")[:-3], gzip.compress(b"text")[:12]],
    ids=["empty", "text", "zeros", "cut off", "header"],
)
def test_what_is_no_gz_file_is_an_error_of_one_kind(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(content)
    if not content:
        assert unzipped(tmp_path / "a.gz") == b""
        return
    unread(unzipped, tmp_path / "a.gz")


@pytest.mark.parametrize("content", [b"text", b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM"])
def test_what_is_no_mat_file_is_an_error_of_one_kind(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    path.write_bytes(content)
    unread(read_mat, path)


def test_a_mat_file_that_ends_the_process_that_reads_it_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = mat(tmp_path, fts=np.eye(2))
    monkeypatch.setattr(data_files, "_READ_MAT", "import os; os.abort()")
    assert "ended with -6" in unread(read_mat, path)
    monkeypatch.setattr(data_files, "_READ_MAT", "import time; time.sleep(9)")
    assert "takes longer" in unread(partial(read_mat, seconds=0.2), path)
