"""Numbers in texts: next to Python's and pandas' of what has been written by hand."""

from __future__ import annotations

import io
import math

import numpy as np
import pandas as pd
import pytest

from fedlit.data.tables.values import NumberFormat, cells, lines

POINT, COMMA = NumberFormat(), NumberFormat(",")


@pytest.mark.parametrize(
    ("given", "text", "number"),
    [
        *((POINT, text, float(text)) for text in ("1.5", "-2", "+3.25", ".5", "5.", "1e3", "1.5E-3", "007", " 8 ")),
        (COMMA, "1.234,56", 1234.56),
        (COMMA, "1.234", 1234.0),
        (COMMA, "-1.234.567,5", -1234567.5),
        (COMMA, ",5", 0.5),
        (COMMA, "1,5e3", 1500.0),
        (COMMA, "\u22125,5", -5.5),
        (NumberFormat(".", ","), "1,234.5", 1234.5),
        (NumberFormat(".", "'"), "1'234'567.5", 1234567.5),
        (NumberFormat(".", "'"), "1\u2019234", 1234.0),
        (NumberFormat(",", " "), "1\u202f234,5", 1234.5),
        (NumberFormat(",", " "), "1\u00a0234", 1234.0),
        (NumberFormat(",", ""), "1234,5", 1234.5),
    ],
)
def test_numbers_are_read_by_the_signs_that_were_given(given: NumberFormat, text: str, number: float) -> None:
    assert given.number(text) == number


@pytest.mark.parametrize(
    ("given", "text"),
    [
        *((COMMA, text) for text in ("12.5", "0.123", "1.23", "1234.567", "1.2345", "1.23.456", "1,234,567", "1.234.")),
        *((POINT, text) for text in ("1,5", "1,234", "1'234", "1 234", "1_000", "0x10", "1.2.3")),
        *((POINT, text) for text in ("", "-", ".", "e5", "nan", "NA", "1e", "12 mg", "10%", "€5", "<5")),
        (NumberFormat(",", ""), "1.234"),
        (NumberFormat(".", " "), "1 2 3"),
        (NumberFormat(".", "'"), "1'234\u2019567"),
    ],
)
def test_texts_that_break_the_format_are_no_numbers(given: NumberFormat, text: str) -> None:
    assert given.number(text) is None


def test_a_column_is_that_of_pandas() -> None:
    random = np.random.default_rng(1)
    texts = [f"{number:,.3f}".translate(str.maketrans(",.", ".,")) for number in random.normal(size=50) * 5000]
    expected = pd.read_csv(io.StringIO("a\n" + "\n".join(texts)), sep=";", decimal=",", thousands=".")["a"]
    assert COMMA.numbers(pd.Series(texts)).tolist() == expected.tolist()
    mixed = pd.Series(["1,5", None, 2, 2.5, True, "x"], dtype=object)
    np.testing.assert_equal(COMMA.numbers(mixed).to_numpy(), [1.5, np.nan, 2, 2.5, np.nan, np.nan])
    np.testing.assert_equal(POINT.numbers(pd.Series([1, None], dtype="Int64")).to_numpy(), [1, np.nan])
    assert POINT.numbers(pd.Series(["inf", "-Infinity"])).tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize(
    ("given", "texts", "way_out"),
    [
        (POINT, ["16,5", "3"], "give decimal=','"),
        (POINT, ["1.234,5"], "give decimal=','"),
        (POINT, ["1,234.5", "7"], "give thousands=','"),
        (POINT, ["1'234.5"], 'give thousands="\'"'),
        (POINT, ["1 234,5"], "give decimal=',' and thousands=' '"),
        (COMMA, ["12.5", "3"], "give decimal='.'"),
    ],
)
def test_the_way_out_names_the_arguments_that_read_all(given: NumberFormat, texts: list[str], way_out: str) -> None:
    assert given.way_out(texts).startswith(f"{way_out} if all tables are written so")


def test_what_has_two_meanings_is_asked_for_and_what_has_none_has_no_way_out() -> None:
    assert POINT.way_out(["1,234", "2,345"]) == (
        "if the commas separate thousands, give thousands=','; if the commas stand before decimals, give decimal=','"
    )
    assert COMMA.way_out(["12.5", "1,5"]) == ""
    assert POINT.way_out(["1", "n/d"]) == ""


@pytest.mark.parametrize(
    ("texts", "unit"),
    [
        (["12 mg", "13 mg", "14 mg"], "mg"),
        (["10%", "20 %", "5%"], "%"),
        (["€5", "€6,5", "€7"], "€"),
        ([f"{number}cm" for number in range(12)], "cm"),
        (["2 doors", "4 doors"], None),  # which may be categories
        (["9th", "10th", "11th"], None),
        (["1st", "2nd", "3rd"], None),
        (["10-19", "20-29", "30-39"], None),
        (["<5", "<6", "<7"], None),
        (["12 mg", "13 ml", "14 mg"], None),
    ],
)
def test_units_are_told_from_categories(texts: list[str], unit: str | None) -> None:
    assert POINT.unit(texts) == unit


def test_cells_are_told_with_their_lines() -> None:
    found = pd.Series(["x", "y", "x"], index=pd.Index([2, 5, 9], name="line"))
    assert cells(found) == "['x', 'y'] (lines 2, 5, 9)"
    assert cells(found[:1]) == "['x'] (line 2)"
    many = pd.Series(range(8), index=pd.RangeIndex(1, 9, name="row"))
    assert cells(many) == "[0, 1, 2, 3, 4] and 3 more (rows 1, 2, 3, 4, 5 and 3 more)"
    assert lines(many.index[:2]) == "rows 1, 2"
