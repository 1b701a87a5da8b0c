"""Tables of one's own: what is read, agreed on and refused; next to pandas and scikit-learn on all of them together."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from clinics import ARGUMENTS, CLINICS, clinic, write
from fedlit.data import CSVDomains, DatasetLayoutError, DatasetNotFoundError
from fedlit.data.table_features import TableFeatures
from fedlit.federation import RosterError


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write(tmp_path, *CLINICS)


def make(files, **arguments: Any):
    return CSVDomains(files, **(ARGUMENTS | arguments))


def test_features_are_those_of_scikit_learn_on_all_training_samples(files):
    data = make(files)
    assert data.classes == ["no", "yes"]
    assert data.feature_names() == [
        *("age", "marker", "marker missing", "sex=f", "sex=m"),
        *("ward=a", "ward=b", "ward=east", "ward=north", "ward=south", "ward=west", "ward=(missing)"),
    ]
    assert data.in_features == 12
    together = pd.concat([clinic(name).iloc[data.split(name).train.tolist()] for name in CLINICS])
    wards = sorted(set(together["ward"].dropna()) | {"east", "north", "south", "west"})
    numbers = together[["age", "marker"]]
    mean, std = numbers.mean().to_numpy(), numbers.std(ddof=0).to_numpy()
    for name in CLINICS:
        table = clinic(name)
        z = (table[["age", "marker"]].to_numpy() - mean) / std
        ones = OneHotEncoder(categories=[["f", "m"], [*wards, "?"]], sparse_output=False)
        levels = ones.fit_transform(table[["sex", "ward"]].fillna("?"))
        expected = np.column_stack([np.nan_to_num(z), table["marker"].isna(), levels])
        np.testing.assert_allclose(data._domain(name).x.numpy(), expected, atol=1e-5)


def test_a_clinics_own_statistics_are_of_its_training_samples_alone(files):
    data = make(files, statistics="own")
    assert [channel.name for channel in data.channels] == ["levels"]
    for name in CLINICS:
        train = data.split(name).train
        scaled = StandardScaler().fit(clinic(name)[["age"]].iloc[train.tolist()]).transform(clinic(name)[["age"]])
        np.testing.assert_allclose(data._domain(name).x[:, :1].numpy(), scaled, atol=1e-5)


def test_labels_that_are_not_known_are_no_labels(files):
    data = make(files)
    known = clinic("south")["ill"].notna().to_numpy()
    split = data.split("south")
    assert data._domain("south").y.ge(0).tolist() == known.tolist()
    assert split.labelled.tolist() == [row for row in split.train.tolist() if known[row]]
    table = clinic("south").drop(columns="ill")
    table.to_csv("south.csv", index=False)
    assert not make(files, target_labels=0)._domain("south").y.ge(0).any()
    table.assign(ill=-1).to_csv("south.csv", index=False)
    assert not make(files, target_labels=0)._domain("south").y.ge(0).any()


def test_ids_are_those_of_the_rows_in_order(files):
    data = make(files)
    rows = clinic("south")["patient"].tolist()
    assert data.ids("south", "test") == [rows[row] for row in data.split("south").test.tolist()]
    assert data.ids("south", "predict") == data.ids("south", "test")
    assert make(files, id=None, leave_out=["patient"]).ids("south", "test") is None


def test_one_file_a_folder_and_parquet_are_the_same(files, tmp_path):
    first = make(files)
    together = pd.concat([clinic(name).assign(clinic=name) for name in CLINICS])
    together.to_csv("all.csv", index=False)
    (tmp_path / "folder").mkdir()
    for name in CLINICS:
        clinic(name).to_parquet(tmp_path / "folder" / f"{name}.parquet")
    same = [
        CSVDomains("all.csv", site="clinic", **ARGUMENTS),
        CSVDomains("folder", **ARGUMENTS | {"clients": [*CLINICS]}),
    ]
    for data in same:
        assert data.feature_names() == first.feature_names()
        for name in CLINICS:
            assert torch.equal(data._domain(name).x, first._domain(name).x)
            assert torch.equal(data._domain(name).y, first._domain(name).y)
    assert [client.name for client in CSVDomains("folder", **ARGUMENTS).clients] == sorted(CLINICS)


def test_other_separators_decimals_and_encodings_are_read_when_they_are_named(files):
    first = make(files)._domain("north").x
    for name in CLINICS:
        table = clinic(name)
        table["sex"] = table["sex"].replace("f", "é")
        table.to_csv(f"{name}.csv", index=False, sep=";", decimal=",", encoding="latin-1")
    with pytest.raises(DatasetLayoutError, match=r"north.csv' has 1 column with separator=','.*give separator=';'"):
        make(files, encoding="latin-1").class_names()
    with pytest.raises(DatasetLayoutError, match=r"is not written in encoding='utf-8'.*such as 'latin-1'"):
        make(files, separator=";").class_names()
    with pytest.raises(
        DatasetLayoutError, match=r"'age' of 'north.csv' has numbers that are written as .*give decimal=','"
    ):
        make(files, separator=";", encoding="latin-1").feature_names()
    data = make(files, separator=";", encoding="latin-1", decimal=",")
    assert torch.equal(data._domain("north").x[:, :3], first[:, :3])
    assert "sex=é" in data.feature_names()


def test_levels_that_are_given_need_not_be_agreed_on(files):
    wards = ["a", "b", "north", "east", "west", "south", "attic"]
    data = make(files, categories={"sex": ["m", "f"], "ward": wards}, statistics="own")
    assert data.channels == ()
    assert data.feature_names()[3:5] == ["sex=m", "sex=f"]
    assert "ward=attic" in data.feature_names()
    assert [channel.name for channel in make(files, categories={"sex": None, "ward": wards}).channels] == [
        *("levels", "magnitudes", "statistics")
    ]
    for name in CLINICS:  # one table has decimals, as it has missing values
        decades = clinic(name)["age"].round(-1)
        clinic(name).assign(age=decades if name == "east" else decades.astype(int)).to_csv(f"{name}.csv", index=False)
    names = [name for name in make(files, categories=["age", "ward"]).feature_names() if name.startswith("age")]
    assert names == sorted({f"age={age:.0f}" for name in CLINICS for age in clinic(name)["age"].round(-1)})


def test_numbers_can_be_predicted(files):
    data = make(files, label="age", task="regression", leave_out=["ill"], target_labels=0)
    assert data.classes == ["age"]
    np.testing.assert_allclose(data._domain("west").y.numpy(), clinic("west")["age"].to_numpy(), rtol=1e-6)


def test_new_rows_of_the_target_are_predicted(files, recwarn):
    new = clinic("south", seed=5).drop(columns="ill").assign(ward="cellar")
    new.to_csv("new.csv", index=False)
    data = make(files, predict_file="new.csv")
    (loader,) = [data.predict_dataloader()]
    assert list(loader.datasets) == ["south"]
    x = loader.datasets["south"].x
    assert len(x) == len(new)
    assert x[:, 5:].sum() == 0
    assert data.ids("south", "predict") == new["patient"].tolist()
    assert any(
        "'ward' of predict_file='new.csv' has ['cellar'], which no client had" in str(w.message) for w in recwarn
    )
    new.drop(columns="age").to_csv("new.csv", index=False)
    with pytest.raises(DatasetLayoutError, match=r"predict_file='new.csv' has no column 'age'"):
        make(files, predict_file="new.csv").predict_dataloader()


def test_features_are_read_back_from_their_state(files):
    features = make(files).features_of("north")
    assert TableFeatures.from_state(features.state()) == features


ELSEWHERE = {"clients": [*CLINICS], "classes": ["no", "yes"]}


def test_a_process_without_tables_knows_who_takes_part_and_what_is_agreed_on(files):
    data = make(None, **ELSEWHERE)
    assert data.elsewhere
    assert not make(files).elsewhere
    assert data.clients == make(files).clients
    assert (data.target, data.classes, data.num_classes) == ("south", ["no", "yes"], 2)
    assert data.channels == make(files).channels
    assert data.domain_names() == []
    assert str(data) == (
        "CSVDomains: north (source, elsewhere), east (source, elsewhere), west (source, elsewhere), "
        "south (target, elsewhere); 2 classes"
    )
    numbers = make(None, label="age", task="regression", clients=[*CLINICS])
    assert numbers.classes == ["age"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": ["no", "yes"]}, r"clients must be given with files=None, .* got None: give the names of all"),
        ({"clients": [*CLINICS]}, r"classes must be given with files=None, .* got None: give their names"),
        ({"label": "age", "task": "regression"}, r"clients must be given with files=None"),
    ],
)
def test_a_process_without_tables_is_told_what_they_would_tell(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(None, **arguments)


@pytest.mark.parametrize(
    "look",
    [
        lambda data: data.feature_names(),
        lambda data: data.in_features,
        lambda data: data.raw_inputs(),
        lambda data: data.table("south"),
        lambda data: data.dataset("south", "test"),
        lambda data: data.train_dataloader(),
        lambda data: data.predict_dataloader(),
    ],
)
def test_a_process_without_tables_says_where_to_predict(look):
    with pytest.raises(DatasetNotFoundError, match=r"this process was given nobody's.* predict and export where"):
        look(make(None, **ELSEWHERE))


def test_a_process_may_name_its_own_table_alone(files):
    data = make({"east": "east.csv"}, **ELSEWHERE)
    assert data.clients == make(files).clients
    assert data.domain_names() == ["east"]
    assert torch.equal(data._y("east"), make(files)._y("east"))
    with pytest.raises(RosterError, match=r"clients \['north', 'west', 'south'\] are not among the domains"):
        make({"east": "east.csv"}, clients=["north", "west", "south"])


# What is refused: with file, column, and a way out.


def changed(column, change):
    def edit(table):
        table[column] = change(table)
        return table

    return edit


NOTHING: dict[str, object] = {}
TROUBLE = {
    "renamed column": (
        lambda t: t.rename(columns={"age": "years"}), NOTHING,
        r"'north' alone has \['age'\] and 'east' alone has \['years'\]: rename them, or leave them out",
    ),
    "texts among numbers": (
        changed("age", lambda t: ["?", *map(str, t["age"][1:])]), NOTHING,
        r"'age' of 'east.csv' has numbers and texts such as \['\?'\].*missing_values",
    ),
    "another type": (
        changed("age", lambda t: ["old" if age > 50 else "young" for age in t["age"]]), NOTHING,
        r"'age' must hold the same at each client, but is \{'north': 'number', 'east': 'category'",
    ),
    "free text": (
        changed("ward", lambda t: [f"note {i}" for i in range(len(t))]), NOTHING,
        r"'ward' of 'east.csv' has 60 different texts.*leave it out if it is free text, a date or a name",
    ),
    "infinity": (changed("age", lambda t: np.inf), NOTHING, r"'age' of 'east.csv' has infinite numbers"),
    "duplicate ids": (
        changed("patient", lambda t: ["p1", "p1", *t["patient"][2:]]), NOTHING,
        r"rows of 'east.csv' have the 'patient' \['p1'\] more than once: keep one of each",
    ),
    "no id": (
        changed("patient", lambda t: [None, *t["patient"][1:]]), NOTHING, r"1 rows of 'east.csv' have no 'patient'",
    ),
    "no label column": (
        lambda t: t.rename(columns={"ill": "iil"}), NOTHING,
        r"label='ill' is no column of 'east.csv'.*did you mean 'iil'\?",
    ),
    "unlabelled source": (
        changed("ill", lambda t: [None, None, *t["ill"][2:]]), NOTHING,
        r"label='ill' of 'east.csv' is empty or -1 in 2 of 60 rows, .* only the target \('south'\) may",
    ),
    "another class": (
        changed("ill", lambda t: ["perhaps", *t["ill"][1:]]), {"classes": ["no", "yes"]},
        r"label='ill' of 'east.csv' has \['perhaps'\], which classes \['no', 'yes'\] lack",
    ),
    "continuous label": (
        changed("ill", lambda t: t["age"]), NOTHING,
        r"label='ill' of 'east.csv' looks continuous.*give task: regression",
    ),
    "no rows": (lambda t: t[:0], NOTHING, "'east.csv' has no rows"),
    "level that others lack": (
        lambda t: t, {"categories": {"sex": ["f", "m"], "ward": ["a", "b"]}},
        r"column 'ward' of 'north.csv' has \['north'\], which categories\['ward'\] lack: add them",
    ),
    "category that is not named": (
        lambda t: t, {"categories": {"sex": ["f", "m"]}},
        r"column 'ward' of 'north.csv' has texts such as .*, and categories do not name it",
    ),
    "long level": (
        changed("ward", lambda t: "x" * 61), NOTHING,
        r"'ward' of 'east.csv' has a level of 61 bytes.*60 can be agreed on",
    ),
    "times": (
        changed("ward", lambda t: pd.Timestamp("2020-01-01")), {"files": {"east": "east.parquet"}},
        r"'ward' of 'east.parquet' has times",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "arguments", "message"), TROUBLE.values(), ids=TROUBLE)
def test_trouble_is_told_with_file_column_and_way_out(files, change, arguments, message):
    table = change(clinic("east"))
    table.to_csv("east.csv", index=False)
    table.to_parquet("east.parquet")
    files = files | arguments.get("files", {})
    with pytest.raises(DatasetLayoutError, match=message):
        make(files, **{key: value for key, value in arguments.items() if key != "files"}).feature_names()


def test_empty_and_constant_columns_are_told(files, recwarn):
    for name in CLINICS:
        clinic(name).assign(unit=5, note=None).to_csv(f"{name}.csv", index=False)
    with pytest.raises(DatasetLayoutError, match=r"column 'note' is empty at every client: leave it out"):
        make(files).feature_names()
    data = make(files, leave_out=["note"])
    assert data._domain("north").x[:, 2].abs().max() == 0
    told = [str(warning.message) for warning in recwarn]
    for name in CLINICS:
        many = len(data._training(name))
        assert any(
            f"column 'unit' (always 5) holds one value in the {many} training samples of" in line for line in told
        )


def changed(column, values, name="east"):
    table = clinic(name)
    table[column] = [*values, *table[column][len(values) :]] if isinstance(values, list) else values
    return table


def test_labels_and_levels_are_the_texts_of_the_files(files):
    """pandas would read 01 as 1 and TRUE as True where all of a file is so, and as texts in another."""
    for name in CLINICS:
        codes = ["01", "A1"] if name in ("east", "south") else ["01", "02"]
        table = clinic(name)
        table["ill"] = [codes[row % 2] for row in range(len(table))]
        table["smokes"] = [
            ("TRUE", "FALSE", "maybe" if name == "east" else "TRUE")[row % 3] for row in range(len(table))
        ]
        table.to_csv(f"{name}.csv", index=False)
    data = make(files, classes=["01", "02", "A1"])
    assert {int(label) for label in data._domain("north").y} == {0, 1}
    assert {int(label) for label in data._domain("east").y} == {0, 2}
    assert [name for name in data.feature_names() if "smokes" in name] == [
        "smokes=FALSE",
        "smokes=TRUE",
        "smokes=maybe",
    ]
    assert make(files).class_names() == ["01", "02", "A1"]


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("age", ["n/d"] * 40, "has numbers and texts such as"),
        ("age", ["10%", "20%", "5%", "7%"] * 15, "has numbers that are written as .*: take all signs but that before"),
        ("age", ["16,702", "1,200"] * 30, "has numbers that are written as .*: if the commas separate thousands"),
        ("age", ["16,5", "1,2", "3"] * 20, r"has numbers that are written as .*: give decimal=','"),
        ("sex", ["F", "m"] * 30, r"column 'sex' has the levels \['F', 'f'\] at the clients, which differ in capitals"),
        ("ward", ["(missing)"], r"has '\(missing\)', which is what missing values are called"),
        ("ill", ["Yes", "No"], "which differ in capitals alone"),
    ],
)
def test_what_would_be_misread_is_refused(files, column, values, says):
    changed(column, values).to_csv("east.csv", index=False)
    with pytest.raises(DatasetLayoutError, match=says):
        make(files, **({} if column == "ill" else {"classes": ["no", "yes"]})).feature_names()


def test_levels_that_are_named_may_differ_in_capitals(files):
    changed("sex", ["F", "m"] * 30).to_csv("east.csv", index=False)
    data = make(files, classes=["no", "yes"], categories={"sex": ["F", "f", "m"], "ward": None})
    assert [name for name in data.feature_names() if "sex" in name] == ["sex=F", "sex=f", "sex=m"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (date(2020, 1, 2), "has times: turn them into numbers"),
        (b"1", "has values of type bytes, which are neither numbers nor texts"),
        ([1, 2], "has values of type ndarray, which are neither numbers nor texts"),
    ],
)
def test_types_of_parquet_that_are_no_features_are_refused(files, value, says):
    changed("age", [value] * 60).to_parquet("east.parquet")
    with pytest.raises(DatasetLayoutError, match=says):
        make({**files, "east": "east.parquet"}).feature_names()


def test_exact_decimals_of_parquet_are_numbers(files):
    table = clinic("east")
    table["age"] = [Decimal(str(value)) for value in table["age"]]
    table.loc[3, "age"] = None
    table.to_parquet("east.parquet")
    data = make({**files, "east": "east.parquet"})
    assert "age" in data.feature_names()
    assert data.table("east")["age"].iloc[:3].tolist() == clinic("east")["age"].iloc[:3].tolist()


def test_names_of_classes_and_levels_are_no_missing_values(files):
    """NA is a class here, and a ward, but stays what it is where it is not named."""
    for name in CLINICS:
        table = clinic(name)
        table["ill"] = table["ill"].map({"no": "NA", "yes": "ill"})
        table["ward"] = table["ward"].map({"a": "NA", "b": "b"} | dict.fromkeys(CLINICS, "c"))
        table["sex"] = table["sex"].where(table.index % 5 > 0, "NA")
        table.to_csv(f"{name}.csv", index=False)
    data = make(files, classes=["NA", "ill"], categories={"ward": ["NA", "b", "c"], "sex": None})
    assert {int(label) for label in data._domain("north").y} == {0, 1}
    names = [name for name in data.feature_names() if "=" in name]
    assert names == ["sex=f", "sex=m", "sex=(missing)", "ward=NA", "ward=b", "ward=c", "ward=(missing)"]
    with pytest.raises(DatasetLayoutError, match="None, NA and the like count as empty unless classes name them"):
        make(files, categories={"ward": None, "sex": None}, classes=["no", "ill"]).feature_names()


def test_an_index_without_a_name_is_refused_and_capitals_of_a_suffix_are_none(files):
    clinic("east").to_csv("east.csv")
    with pytest.raises(DatasetLayoutError, match=r"column 1 of 'east\.csv' has no name: .*index=False"):
        make(files).feature_names()
    clinic("east").to_csv("east.CSV", index=False)
    assert make({**files, "east": "east.CSV"}).feature_names()


@pytest.mark.parametrize(("value", "says"), [(None, "is empty in 1 of"), (float("inf"), "has infinite numbers in")])
def test_numbers_to_predict_are_finite_at_sources(files, value, says):
    table = clinic("east")
    table.loc[3, "age"] = value
    table.to_csv("east.csv", index=False)
    with pytest.raises(DatasetLayoutError, match=says):
        make(files, label="age", task="regression", leave_out=["ill"])._domain("east")


def test_kinds_in_one_file_are_those_of_its_sites(files):
    tables = [clinic(name).assign(site=name) for name in CLINICS]
    tables[1]["marker"] = ["low", "high"] * (len(tables[1]) // 2)
    pd.concat(tables).to_csv("all.csv", index=False)
    with pytest.raises(DatasetLayoutError, match="column 'marker' must hold the same at each client"):
        make("all.csv", site="site").feature_names()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("p1,50", r"line 2 of 'east.csv' has 2 fields, and its first line names 6 columns: mend it"),
        ("p1,50,1,f,a,yes,more", r"line 2 of 'east.csv' has 7 fields"),
        ("p1,50,1,f,a\0b,yes", r"line 2 of 'east.csv' has a NUL byte"),
    ],
)
def test_rows_that_pandas_would_fill_shift_or_cut_are_refused(files, line, says):
    table = clinic("east")
    lines = table.to_csv(index=False).splitlines()
    with open("east.csv", "w") as file:
        file.write("\n".join([lines[0], line, *lines[1:]]))
    with pytest.raises(DatasetLayoutError, match=says):
        make(files).feature_names()
    assert len(lines[0].split(",")) == 6
    # all of them one longer than the header, which pandas takes for names of the rows
    with open("east.csv", "w") as file:
        file.write("\n".join([lines[0], *(f"{each}," for each in lines[1:])]))
    with pytest.raises(DatasetLayoutError, match=r"line 2 of 'east\.csv' has 7 fields"):
        make(files).feature_names()


def test_columns_that_tell_nothing_at_one_client_are_told_with_its_file(files):
    clinic("east").assign(marker=3.5, sex=None).to_csv("east.csv", index=False)
    with pytest.warns(UserWarning, match="shows nothing there") as told:
        make(files).feature_names()
    lines = [str(warning.message) for warning in told]
    constant, unknown = (next(line for line in lines if name in line) for name in ("'marker'", "'sex'"))
    assert "'marker' (always 3.5) holds one value" in constant
    assert "'east.csv'" in constant
    assert "'sex' is missing in all of the" in unknown
    assert "'east.csv'" in unknown
    assert not any("north" in line or "south" in line for line in (constant, unknown))


def test_a_client_without_a_class_is_told(files):
    clinic("east").query("ill == 'no'").to_csv("east.csv", index=False)
    with pytest.warns(UserWarning, match=r"client 'east' has no sample of the classes \['yes'\] in 'east.csv'"):
        make(files).feature_names()


def test_files_that_are_not_there_or_twice_are_refused(files, tmp_path):
    with pytest.raises(DatasetNotFoundError, match=r"none of files=.* is there, looked for from"):
        make({"a": "nowhere.csv", "south": "else.csv"})
    with pytest.raises(DatasetNotFoundError, match="must be a folder of tables"):
        make("nowhere")
    with pytest.raises(DatasetLayoutError, match=r"files of clients are \['north.csv'\] more than once"):
        make(files | {"east": "north.csv"})
    (tmp_path / "folder").mkdir()
    with pytest.raises(DatasetLayoutError, match=r"must hold tables .*, got none"):
        make("folder")
    clinic("north").to_csv("folder/north.csv", index=False)
    clinic("north").to_parquet("folder/north.parquet")
    with pytest.raises(DatasetLayoutError, match=r"are called \['north'\] more than once: keep one for each client"):
        make("folder")
    (tmp_path / "south.csv").unlink()
    with pytest.raises(RuntimeError, match="agree on features when training starts"):
        make(files, classes=["no", "yes"]).feature_names()
    with pytest.raises(DatasetNotFoundError, match="there is no table of client 'south' here"):
        make(files).table("south")
    with pytest.raises(RosterError, match="target 'moon' is not among"):
        make(files, target="moon")


def test_files_that_are_no_tables_are_refused(files, tmp_path):
    for content, message in (
        (b"", "has 0 column"),
        (b"\x00\xff\xfe" * 20, "is not written in encoding|cannot be read|has 1 column"),
        (b"a,b\n1,2,3,4\n1,2\n", r"cannot be read as a table|is no column|has 4 fields"),
        (b"a,a,ill\n1,2,yes\n", r"columns of 'north.csv' are called \['a'\] more than once: rename them"),
    ):
        (tmp_path / "north.csv").write_bytes(content)
        with pytest.raises(DatasetLayoutError, match=message):
            make(files).class_names()
    (tmp_path / "north.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DatasetLayoutError, match="cannot be read as a table"):
        make(files | {"north": "north.parquet"}).class_names()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "guessing"}, "task must be"),
        ({"statistics": "mine"}, "statistics must be"),
        ({"classes": ["yes"]}, "classes must name at least 2"),
        ({"site": "clinic"}, "site='clinic' is for one file with all clients"),
    ],
)
def test_arguments_out_of_range_are_refused(files, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(files, **arguments)


def test_a_table_that_excel_has_saved_is_read(files, tmp_path):
    (tmp_path / "north.csv").write_text(clinic("north").to_csv(index=False), encoding="utf-8-sig")
    assert next(iter(make(files).table("north").columns)) == "patient"
