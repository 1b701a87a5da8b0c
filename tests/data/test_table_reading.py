"""What is read of tables that are written otherwise than others: numbers, labels, names and rows; nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedlit.data import CSVDomains, DatasetLayoutError
from fedlit.federation import RosterError
from refused import refused

ROWS = 12
VALUES = [1234.56, 1345.0, 99.5, 1455.44] * 3


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def table(name: str, **columns: Any) -> pd.DataFrame:
    rows = {"id": [f"{name}{row}" for row in range(ROWS)], "kind": ["x", "y"] * 6, "y": ["no", "yes"] * 6}
    return pd.DataFrame(rows | columns)


def write(separator: str = ";", **tables: pd.DataFrame) -> dict[str, str]:
    for name, each in tables.items():
        each.to_csv(f"{name}.csv", sep=separator, index=False)
    return {name: f"{name}.csv" for name in tables}


def make(files: Any, **arguments: Any) -> CSVDomains:
    usual = {"label": "y", "id": "id", "separator": ";", "val_fraction": 0.0, "test_fraction": 0.0}
    return CSVDomains(files, **(usual | arguments))


def said(argument: str, files: Any, **arguments: Any) -> str:
    """The error that names an argument, file or column."""
    with refused(argument, DatasetLayoutError) as caught:
        make(files, **arguments).feature_names()
    return str(caught.value)


def german(values: list[float], form: str = ",.2f") -> list[str]:
    return [format(value, form).translate(str.maketrans(",.", ".,")) for value in values]


@pytest.mark.parametrize("where", ["files", "site", "parquet", "predict_file"])
def test_points_for_thousands_beside_a_decimal_comma_are_read_everywhere(where: str) -> None:
    here, there = table("a", v=german(VALUES)), table("b", v=german([value + 1 for value in VALUES]))
    files: Any = write(a=here, b=there)
    arguments: dict[str, Any] = {"decimal": ","}
    if where == "site":
        other = table("c", v=["low", "high"] * 6)  # so that pandas has texts in the whole column
        pd.concat([each.assign(clinic=name) for name, each in (("a", here), ("b", there), ("c", other))]).to_csv(
            "all.csv", sep=";", index=False
        )
        files, arguments = "all.csv", {"decimal": ",", "site": "clinic", "clients": ["a", "b"]}
    if where == "parquet":
        here.to_parquet("a.parquet")
        files["a"] = "a.parquet"
    if where == "predict_file":
        write(new=table("n", v=german(VALUES)))
        arguments["predict_file"] = "new.csv"
    data = make(files, target="b", **arguments)
    assert data.feature_names() == ["v", "kind=x", "kind=y"]
    both = np.array([*VALUES, *(value + 1 for value in VALUES)])
    features = data.features_of("a")
    assert features.mean == pytest.approx([both.mean()])
    assert features.deviation == pytest.approx([both.std()])
    expected = torch.tensor((np.array(VALUES) - both.mean()) / both.std(), dtype=torch.float32)
    x = data.predict_dataloader().datasets["b"].x if where == "predict_file" else data.all_samples("a").x
    torch.testing.assert_close(x[:, 0], expected)


def test_labels_are_numbers_by_the_same_signs() -> None:
    files = write(a=table("a", y=german(VALUES)), b=table("b", y=["1.234"] * 11 + [""]))
    data = make(files, decimal=",", task="regression")
    assert data.labels("a").tolist() == pytest.approx(VALUES)
    assert data.labels("b")[0] == 1234
    assert data.labels("b")[-1].isnan()
    files = write(a=table("a", y=[*german(VALUES[:-2]), "n/d", "12.5"]), b=table("b", y=german(VALUES)))
    assert "['n/d', '12.5'] (lines 12, 13)" in said("label", files, decimal=",", task="regression")
    write(a=table("a", y=german(VALUES)))
    assert "give decimal=','" in said("label", files, task="regression")


def test_minus_one_is_a_class_that_is_named() -> None:
    files = write(a=table("a", y=[-1, 1] * 6), b=table("b", y=[1, -1] * 6))
    assert make(files, classes=["-1", "1"]).labels("a").tolist() == [0, 1] * 6


def test_classes_that_are_one_number_are_one_class() -> None:
    files = write(a=table("a", y=["1,0", "2,0"] * 6), b=table("b", y=["1", "2"] * 6))
    data = make(files, decimal=",")
    assert data.classes == ["1", "2"]
    assert data.labels("a").tolist() == [0, 1] * 6
    assert make(files, decimal=",", classes=["2,0", "1,0"]).labels("b").tolist() == [1, 0] * 6
    assert make(files, decimal=",", classes=[2, 1]).labels("a").tolist() == [1, 0] * 6
    table("a", y=[1.0, 2.0] * 6).to_parquet("a.parquet")
    assert make(files | {"a": "a.parquet"}, decimal=",").classes == ["1", "2"]


BROKEN = [
    ([*map("{},5".format, range(11)), "n/d"], ",", "['n/d'] (line 13)", "missing_values"),
    (["12.5", "1,5", "3", "4,5"] * 3, ",", "['12.5'] (lines 2, 6, 10)", "signs but that before decimals"),
    (["0.5", "1.234"] * 6, ",", "['0.5'] (lines 2, 4, 6, 8, 10 and 1 more)", "give decimal='.'"),
    (["1,234", "2"] * 6, ".", "['1,234'] (lines 2", "if the commas separate thousands, give thousands=','; if"),
    (["12 mg", "13 mg", "14 mg"] * 4, ".", "['12 mg', '13 mg', '14 mg']", "unit 'mg'"),
    (["10%", "20", "30%"] * 4, ".", "['10%', '30%'] (lines 2, 4", "signs but that before decimals"),
    (["1", "inf"] * 6, ".", "[inf] (lines 3, 5, 7, 9, 11 and 1 more)", "leave_out"),
    (["1", "-1.797693e308"] * 6, ".", "(lines 3, 5", "leave_out"),  # whose square is infinite
]


@pytest.mark.parametrize(("values", "decimal", "shown", "way_out"), BROKEN)
def test_cells_that_break_the_rule_are_named_with_their_lines_and_no_others(
    values: list[str], decimal: str, shown: str, way_out: str
) -> None:
    files = write(a=table("a", v=values), b=table("b", v=["1", "2"] * 6))
    message = said("v", files, decimal=decimal)
    assert f"got {shown}" in message or shown in message.partition(": ")[0]
    assert way_out in message


def test_a_category_whose_levels_are_written_in_two_ways_is_refused_unless_they_are_named() -> None:
    files = write(a=table("a", grade=["1", "2"] * 6), b=table("b", grade=["01", "2"] * 6))
    assert "how one number is written" in said("grade", files, categories=["grade"])
    named = make(files, categories={"grade": ["01", "1", "2"], "kind": None}).feature_names()
    assert named[-3:] == ["grade=01", "grade=1", "grade=2"]
    assert "['01', '1']" in said("label", files, label="grade")


@pytest.mark.parametrize(
    ("labels", "classes", "shown"),
    [
        (["0.5", "1.5"], None, "such as ['0.5', '1.5'] (lines 2, 3, 4"),
        (["0,5", "1,5"], None, "give decimal=','"),
        (["-1", "1"], None, "-1 is no label"),
        (["-1", "1"], ["0", "1"], "in 6 of 12 rows, lines 2, 4, 6, 8, 10 and"),
    ],
)
def test_labels_that_are_no_classes_are_shown_with_their_lines(
    labels: list[str], classes: list[str] | None, shown: str
) -> None:
    files = write(a=table("a", y=labels * 6), b=table("b", y=["1", ""] * 6))
    assert shown in said("label", files, classes=classes)


def test_missing_values_are_the_same_in_csv_and_parquet() -> None:
    one = table("a", v=[-9.0, *range(1, ROWS)], kind=["?", "NA", *"xy" * 5])
    files = write(a=one, b=table("b", v=range(ROWS)))
    one.to_parquet("a.parquet")
    csv, parquet = (
        make(files | {"a": name}, missing_values=["?", "-9"], target="b") for name in ("a.csv", "a.parquet")
    )
    assert csv.feature_names() == parquet.feature_names() == ["v", "v missing", "kind=x", "kind=y", "kind=(missing)"]
    assert torch.equal(csv.all_samples("a").x, parquet.all_samples("a").x)
    assert csv.all_samples("a").x[0].tolist() == [0, 1, 0, 0, 1]


def test_blanks_at_the_end_are_no_part_of_cells_and_names() -> None:
    files = write(a=table("a", v=range(ROWS)), b=table("b", v=range(ROWS)))
    text = Path("a.csv").read_text().replace(";x;no", ";x ;NA ").replace("id;kind;y;v", "id;kind ;y ; v")
    Path("a.csv").write_text(text)
    data = make(files, target="a", missing_values=["?"], classes=["no", "yes"])
    assert data.labels("a").tolist() == [-1, 1] * 6
    assert data.feature_names() == ["v", "kind=x", "kind=y"]


def test_an_index_of_parquet_is_a_column_where_it_is_named_and_told_where_it_is_not() -> None:
    files = write(a=table("a"), b=table("b"))
    table("a").set_index("id").to_parquet("a.parquet")
    data = make(files | {"a": "a.parquet"})
    assert data.ids("a", "train") == [f"a{row}" for row in range(ROWS)]
    with pytest.warns(UserWarning, match=r"\['id'\] as index"):
        make(files | {"a": "a.parquet"}, id=None).table("a")


@pytest.mark.parametrize(
    ("argument", "text", "where"),
    [
        ("a.csv", "id;y;v\na;no;1\nb;yes;2\n;;\n;;\n", "(lines 4, 5)"),
        ("v", 'id;y;v\n\na;no;1\n"a\nb";no;2\n' + "".join(f"{n};yes;{n}\n" for n in range(9)) + "z;no;n/d", "line 15"),
    ],
)
def test_what_cannot_be_used_is_named_by_its_line(argument: str, text: str, where: str) -> None:
    files = write(b=pd.DataFrame({"id": ["c", "d"], "y": ["no", "yes"], "v": [1, 2]}))
    Path("a.csv").write_text(text)
    assert where in said(argument, {"a": "a.csv"} | files)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("id", lambda t: t.assign(id="n1")),
        ("predict_file", lambda t: t[:0]),
        ("predict_file", lambda t: t.rename(columns={"v": "vv"})),
        ("predict_file", lambda t: t.assign(v="high")),
        ("predict_file", lambda t: t.assign(clinic=["b"] * 11 + ["a"])),
    ],
)
def test_new_rows_that_do_not_fit_are_refused(argument: str, change: Any) -> None:
    pd.concat([table(name, v=VALUES).assign(clinic=name) for name in "ab"]).to_csv("all.csv", sep=";", index=False)
    write(new=change(table("n", v=VALUES)))
    with refused(argument, DatasetLayoutError):
        make("all.csv", site="clinic", predict_file="new.csv").predict_dataloader()


def test_ids_are_the_texts_of_the_file() -> None:
    versions = [f"{row}.0" for row in range(ROWS)]
    files = write(a=table("a", id=versions), b=table("b"))
    assert make(files).ids("a", "train") == versions


def test_rows_that_quotes_make_one_are_told() -> None:
    files = write(a=table("a"), b=table("b"))
    lines = Path("a.csv").read_text().splitlines()
    lines[3], lines[6] = lines[3].replace(";no", ';"no'), f'{lines[6]}"'
    Path("a.csv").write_text("\n".join(lines))
    with pytest.warns(UserWarning, match="lines 4 to 7 of 'a.csv' are one row"):
        assert len(make(files).table("a")) == ROWS - 3


def test_levels_of_new_rows_are_texts_as_in_training() -> None:
    files = write(**{name: table(name, kind=["01", "02", "A1"] * 4) for name in "ab"}, new=table("n", kind="01"))
    data = make(files, clients=["a", "b"], predict_file="new.csv")
    assert data.predict_dataloader().datasets["b"].x.tolist() == [[1, 0, 0]] * ROWS


def test_files_that_may_be_tables_are_not_left_out_without_a_word() -> None:
    Path("all").mkdir()
    for name in "ab":
        table(name).to_csv(f"all/{name}.csv", sep=";", index=False)
    Path("all/c.xlsx").touch()
    Path("all/notes.md").touch()
    with pytest.warns(UserWarning, match=r"left out \['c.xlsx'\] of files='all'") as told:
        assert [client.name for client in make("all").clients] == ["a", "b"]
    assert len(told) == 1


def test_the_mark_of_unicode_is_no_part_of_a_name() -> None:
    files = write(A=table("a"), b=table("b")) | {"A": "a.CSV"}
    Path("a.CSV").write_text(Path("A.csv").read_text(), encoding="utf-8-sig")
    assert make(files).classes == ["no", "yes"]
    assert "mark of Unicode" in said("a.CSV", files, encoding="latin-1")


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (("Zürich", "Zu\u0308rich"), "Unicode normal form alone"),
        (("1", "01"), "how one number is written"),
    ],
)
def test_sites_that_are_alike_are_no_two_clients(names: tuple[str, str], what: str) -> None:
    rows = [table(name[0], id=[f"{place}{row}" for row in range(ROWS)]) for place, name in enumerate((*names, "south"))]
    pd.concat([each.assign(clinic=name) for each, name in zip(rows, (*names, "south"), strict=True)]).to_csv(
        "all.csv", sep=";", index=False
    )
    message = said("site", "all.csv", site="clinic", clients=[names[0], "south"])
    assert "12 and 12 rows" in message
    assert f"differ in {what}" in message


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"clients": [False, "se"]}, RosterError),
        ({"target": False}, RosterError),
        *(({"files": files}, TypeError) for files in ({False: "no.csv", "se": "se.csv"}, {1: "no.csv", 2: "se.csv"})),
        *(({"classes": value}, TypeError) for value in ([True, False], "ab")),
        *(({"categories": value}, TypeError) for value in ({"kind": [True, False]}, [False], {False: None})),
        *(({"leave_out": value}, TypeError) for value in ([False], "id")),
        *(({"missing_values": value}, TypeError) for value in ([-9, None], "n/a")),
        *(({name: False}, TypeError) for name in ("label", "id", "site")),
    ],
)
def test_names_that_yaml_reads_as_something_else_are_to_be_quoted(arguments: dict[str, Any], error: Any) -> None:
    files = write(no=table("a"), se=table("b"))
    with pytest.raises(error, match=rf"{next(iter(arguments))}.*(quote it|write \[)"):
        make(**({"files": files} | arguments))


@pytest.mark.parametrize(
    ("argument", "value"), [("decimal", "no"), ("thousands", "."), ("separator", ";;"), ("classes", ["1", "1.0"])]
)
def test_signs_that_cannot_be_are_refused_at_once(argument: str, value: Any) -> None:
    with refused(argument):
        make(write(a=table("a"), b=table("b")), **{argument: value})


DATES = [
    *("31.1.20", "2020-01-31T10:30:05.123Z", "2020-01-31 10:30:00+01:00", "12 März 2020", "9:15:01 pm"),
]


@pytest.mark.parametrize("cell", DATES)
def test_dates_and_times_in_texts_are_no_categories_unless_they_are_named(cell: str) -> None:
    files = write(a=table("a", d=cell), b=table("b", d=cell))
    assert "turn dates and times into numbers" in said("d", files)
    assert make(files, categories={"d": None, "kind": None}).feature_names() == ["kind=x", "kind=y", f"d={cell}"]
    assert make(files, leave_out=["d"]).feature_names() == ["kind=x", "kind=y"]


def test_ranges_and_codes_stay_categories() -> None:
    columns = {"d": ["10-20", "20-30"], "e": ["1/2", "2/3"], "f": ["v1", "v2"], "g": ["3-4-x", "stage 10:1b"]}
    files = write(**{name: table(name, **{key: cells * 6 for key, cells in columns.items()}) for name in "ab"})
    levels = [f"{key}={cell}" for key, cells in columns.items() for cell in cells]
    assert make(files).feature_names()[2:] == levels


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_codes_whose_zeros_in_front_a_number_loses_are_named(suffix: str, recwarn: pytest.WarningsRecorder) -> None:
    here = table("a", zip=["01234", "20000"] * 6, month=["1", "10"] * 6, other="007")
    files = write(a=here, b=here.assign(id=[f"b{row}" for row in range(ROWS)]))
    if suffix == "parquet":
        here.to_parquet("a.parquet")
        files["a"] = "a.parquet"
    where = "lines 2, 4, 6, 8, 10" if suffix == "csv" else "rows 1, 3, 5, 7, 9"
    data = make(files, leave_out=["other"])
    assert data.feature_names()[:2] == ["zip", "month"]
    told = [str(each.message) for each in recwarn if "zeros in front" in str(each.message)]
    assert len(told) == 2
    assert f"'zip' of 'a.{suffix}' has ['01234'] ({where} and 1 more), which are read as numbers" in told[0]
    recwarn.clear()
    data = make(files, leave_out=["other"], categories={"zip": None, "kind": None})
    assert data.feature_names() == ["month", "kind=x", "kind=y", "zip=01234", "zip=20000"]
    assert not [each for each in recwarn if "zeros in front" in str(each.message)]


@pytest.mark.parametrize("name", ["Unnamed: 0", "__index_level_0__"])
def test_an_index_that_was_saved_without_a_name_is_no_feature(name: str) -> None:
    here = table("a", v=VALUES).assign(**{name: range(ROWS)})
    files = write(a=table("a", v=VALUES).assign(**{name: range(ROWS)}), b=here)
    here.to_parquet("b.parquet", index=False)
    for each in (files, files | {"b": "b.parquet", "a": "b.csv"}):
        assert name in said(each["a"], each, id=None)
    assert name not in make(files, leave_out=[name]).feature_names()


def test_numbers_that_are_one_in_double_precision_are_called_constant() -> None:
    files = write(a=table("a", v=[2**62 + row for row in range(ROWS)]), b=table("b", v=[2**62] * ROWS))
    with pytest.warns(UserWarning, match=r"'v' \(always 4611686018427387904\)"):
        assert make(files).all_samples("a").x[:, 0].tolist() == [0.0] * ROWS


def test_utf_8_that_a_federation_of_another_encoding_would_read_wrongly_is_refused() -> None:
    files = write(a=table("a", kind=["müde", "wach"] * 6), b=table("b", kind=["müde", "wach"] * 6))
    assert "'a0;mÃ¼de;no': give encoding='utf-8'" in said("a.csv", files, encoding="cp1252")
    for path in files.values():
        Path(path).write_text(Path(path).read_text("utf-8"), "cp1252")
    assert make(files, encoding="cp1252").feature_names() == ["kind=müde", "kind=wach"]
