"""Names that people would take for one, and names that YAML has read as something else."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
import yaml

from fedlit.data import Digits
from fedlit.federation import RosterError
from fedlit.federation.client import make_roster
from fedlit.federation.names import alike, check_list, check_texts, difference, not_text, shown
from fedlit.remote import Server

COMPOSED = "Zürich"
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)


@pytest.mark.parametrize(
    ("pair", "what"),
    [
        *((pair, "capitals alone") for pair in (["North", "north"], ["STRASSE", "straße"])),
        *((pair, "blanks alone") for pair in (["ward 1", "ward  1"], ["ward 1", "ward\u00a01"])),
        *((pair, "Unicode normal form alone") for pair in ([COMPOSED, DECOMPOSED], ["\uff21", "A"])),
        (["north", "north\u200b"], "capitals, blanks or Unicode normal form alone"),
        (["ZÜRICH", DECOMPOSED], "capitals, blanks or Unicode normal form alone"),
    ],
)
def test_names_that_look_alike_are_found_with_what_they_differ_in(pair: list[str], what: str) -> None:
    assert alike(["other", pair[0], "others", pair[1], pair[0]]) == [pair]
    assert difference(pair) == what


@pytest.mark.parametrize("pair", [["a", "b"], ["north", "north-2"], ["1", "01"], ["a_b", "a b"], ["o", "ö"]])
def test_names_that_differ_in_more_are_not_alike(pair: list[str]) -> None:
    assert alike(pair) == []


def test_what_looks_the_same_is_escaped() -> None:
    assert shown([COMPOSED, DECOMPOSED, "north\u200b"]) == r"['Zürich', 'Zu\u0308rich', 'north\u200b']"


def test_clients_whose_names_are_alike_are_no_roster() -> None:
    with pytest.raises(RosterError, match="differ in capitals alone"):
        make_roster(["North", "north", "target"], "target")


@pytest.mark.parametrize(
    ("text", "read", "quoted"),
    [
        *(("no", False, "no"), ("Yes", True, "yes"), ("off", False, "no"), ("12", 12, "12"), ("1.5", 1.5, "1.5")),
        *(("null", None, "null"), ("~", None, "null")),
    ],
)
def test_how_to_quote_what_yaml_reads_otherwise(text: str, read: object, quoted: str) -> None:
    value = yaml.safe_load(text)
    assert value == read
    problem = not_text(value)
    assert problem is not None
    assert f"as in '{quoted}'" in problem
    for call in (lambda: make_roster([value, "south"], "south"), lambda: Digits(clients=[value, "fonts"])):
        with pytest.raises(RosterError, match=f"quote it, as in '{quoted}'"):
            call()


def test_dates_and_other_types_are_no_texts() -> None:
    assert "as a date" in str(not_text(yaml.safe_load("2020-01-02")))
    assert "of type list" in str(not_text(["a"]))
    assert not_text("no") is None
    check_texts("files", {"a": 1})
    check_texts("files", None)
    with pytest.raises(TypeError, match="files must have"):
        check_texts("files", {False: "no.csv"})
    with pytest.raises(TypeError, match="classes must be a list"):
        check_list("classes", "yes")


@pytest.mark.parametrize(("argument", "value"), [("target", False), ("target", 3), ("clients", "fonts")])
def test_a_data_modules_target_and_clients_are_texts(argument: str, value: Any) -> None:
    with pytest.raises(RosterError, match=f"{argument} must be"):
        Digits(**{argument: value})


@pytest.mark.parametrize(
    ("sites", "error", "message"),
    [
        ([False, "se"], TypeError, "sites must have"),
        ({"a": [True]}, TypeError, r"sites\['a'\] must have"),
        ({1: ["a"]}, TypeError, "sites must have"),
        (["North", "north"], ValueError, "differ in capitals"),
        ({"a": ["x"], "b": ["X"]}, ValueError, r"\['x', 'X'\]"),
    ],
)
def test_a_servers_sites_are_texts_and_differ(sites: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Server("localhost:1", sites, certificate="c", key="k", ca="a")
