"""Certificates of a trial, and files that do not fit together."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlit.remote.certificates import check_files, make_certificates
from refused import refused


def test_each_has_a_certificate_of_the_authority_and_a_key_that_nobody_else_reads(tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "made", "fed.example.org", ["north", "south"])
    assert sorted(file.name for file in files) == sorted(
        f"{name}.{suffix}" for name in ("ca", "server", "north", "south") for suffix in ("crt", "key")
    )
    for name in ("server", "north", "south"):
        check_files(*(tmp_path / "made" / each for each in (f"{name}.crt", f"{name}.key", "ca.crt")))
    assert all(file.stat().st_mode & 0o077 == 0 for file in files if file.suffix == ".key")


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    make_certificates(tmp_path, "localhost", ["north"])
    before = (tmp_path / "ca.key").read_bytes()
    with refused("out"):
        make_certificates(tmp_path, "localhost", ["south"])
    assert (tmp_path / "ca.key").read_bytes() == before


@pytest.mark.parametrize(
    ("argument", "sites", "server", "days"),
    [
        *(("sites", sites, "localhost", 1) for sites in ([], ["a", "A"], ["a b", "a  b"], ["ca"], ["CA"], ["Server"])),
        *(("sites", sites, "localhost", 1) for sites in (["../x"], [""], ["a" * 64])),
        *(("server", ["a"], server, 1) for server in ("", "host:80", "a b")),
        *(("days", ["a"], "localhost", days) for days in (0, 3651)),
    ],
)
def test_names_and_days_that_cannot_be_are_refused(
    argument: str, sites: list[str], server: str, days: int, tmp_path: Path
) -> None:
    with refused(argument):
        make_certificates(tmp_path, server, sites, days)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("rule", "files"),
    [
        ("key must be that of the certificate", ("one/north.crt", "one/south.key", "one/ca.crt")),
        ("certificate must be signed by", ("one/north.crt", "one/north.key", "other/ca.crt")),
        ("certificate must be a certificate", ("text", "one/north.key", "one/ca.crt")),
        ("key must be a private key", ("one/north.crt", "text", "one/ca.crt")),
        ("ca must be a file", ("one/north.crt", "one/north.key", "one/none.crt")),
    ],
)
def test_files_that_do_not_fit_are_named(rule: str, files: tuple[str, str, str], tmp_path: Path) -> None:
    make_certificates(tmp_path / "one", "localhost", ["north", "south"])
    make_certificates(tmp_path / "other", "localhost", ["north"])
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match=rule) as raised:
        check_files(*(tmp_path / file for file in files))
    assert "\n" not in str(raised.value)
