"""Certificates of a trial, and what is said of files that do not fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedlit.remote.certificates import check_files, make_certificates


def test_each_has_a_certificate_of_the_authority_and_a_key_that_nobody_else_reads(tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "made", "fed.example.org", ["north", "south"])
    assert sorted(file.name for file in files) == sorted(
        f"{name}.{kind}" for name in ("ca", "server", "north", "south") for kind in ("crt", "key")
    )
    for name in ("server", "north", "south"):
        check_files(*(tmp_path / "made" / each for each in (f"{name}.crt", f"{name}.key", "ca.crt")))
    assert all(file.stat().st_mode & 0o077 == 0 for file in files if file.suffix == ".key")


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    make_certificates(tmp_path, "localhost", ["north"])
    before = (tmp_path / "ca.key").read_bytes()
    with pytest.raises(ValueError, match="out must be a folder without these files"):
        make_certificates(tmp_path, "localhost", ["south"])
    assert (tmp_path / "ca.key").read_bytes() == before


@pytest.mark.parametrize(
    "sites", [[], ["a", "A"], ["a b", "a  b"], ["ca"], ["CA"], ["Server"], ["../x"], [""], ["a" * 64]]
)
def test_names_that_cannot_be_are_refused(sites: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sites must be"):
        make_certificates(tmp_path, "localhost", sites)
    assert not [*tmp_path.iterdir()]


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    make_certificates(tmp_path / "one", "localhost", ["north", "south"])
    make_certificates(tmp_path / "other", "localhost", ["north"])
    one, other = tmp_path / "one", tmp_path / "other"
    (tmp_path / "text").write_text("hello")
    cases = {
        "key must be that of the certificate": (one / "north.crt", one / "south.key", one / "ca.crt"),
        "certificate must be signed by the ca": (one / "north.crt", one / "north.key", other / "ca.crt"),
        "certificate must be a certificate in PEM": (tmp_path / "text", one / "north.key", one / "ca.crt"),
        "key must be a private key in PEM": (one / "north.crt", tmp_path / "text", one / "ca.crt"),
        "ca must be a file that can be read": (one / "north.crt", one / "north.key", one / "none.crt"),
    }
    for words, files in cases.items():
        with pytest.raises(ValueError, match=re.escape(words)) as raised:
            check_files(*files)
        assert "\n" not in str(raised.value)
