"""Tables of clients: features and labels next to scikit-learn on all of them together, and what is refused."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from clinics import ARGUMENTS, CLINICS, clinic, write
from fedlit.data import CSVDomains, DatasetLayoutError, DatasetNotFoundError
from fedlit.federation import RosterError
from refused import refused

COLUMNS = [
    *("age", "marker", "marker missing", "sex=f", "sex=m"),
    *("ward=a", "ward=b", "ward=east", "ward=north", "ward=south", "ward=west", "ward=(missing)"),
]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write(tmp_path, *CLINICS)


def make(files, **arguments: Any):
    return CSVDomains(files, **(ARGUMENTS | arguments))


def rewrite(change, *names: str) -> None:
    """Write tables of some clinics, of all by default, after a change of them."""
    for name in names or CLINICS:
        change(clinic(name)).to_csv(f"{name}.csv", index=False)


def put(column, values):
    """A change of one column: of its first rows, or of all."""

    def change(table):
        if isinstance(values, list):
            return table.assign(**{column: [*values, *table[column][len(values) :]]})
        return table.assign(**{column: values(table[column]) if callable(values) else values})

    return change


@pytest.mark.parametrize(
    "layout",
    ["folder of parquet", "other signs", *(pytest.param(x, marks=pytest.mark.slow) for x in ("files", "site"))],
)
def test_features_are_those_of_scikit_learn_on_all_training_samples(files, layout):
    data = make(files)
    first = {name: data.all_samples(name) for name in CLINICS}  # before the files are rewritten
    if layout == "site":
        pd.concat([clinic(name).assign(clinic=name) for name in CLINICS]).to_csv("all.csv", index=False)
        data = make("all.csv", site="clinic")
    if layout == "folder of parquet":
        Path("folder").mkdir()
        for name in CLINICS:
            clinic(name).to_parquet(f"folder/{name}.parquet")
        assert [client.name for client in make("folder").clients] == sorted(CLINICS)
        data = make("folder", clients=[*CLINICS])
    if layout == "other signs":
        for name in CLINICS:
            table = clinic(name).rename(columns={"sex": "größe"})
            table.to_csv(f"{name}.csv", index=False, sep=";", decimal=",", encoding="latin-1")
        data = make(files, separator=";", encoding="latin-1", decimal=",")
        written = {"sep": ";", "decimal": ",", "encoding": "latin-1"}
        assert data.raw_inputs().reading == written | {"skipinitialspace": True}
    assert data.feature_names() == [
        name.replace("sex", "größe" if layout == "other signs" else "sex") for name in COLUMNS
    ]
    assert data.classes == ["no", "yes"]
    assert data.in_features == 12
    together = pd.concat([clinic(name).iloc[data.split(name).train.tolist()] for name in CLINICS])
    numbers = together[["age", "marker"]]
    mean, std = numbers.mean().to_numpy(), numbers.std(ddof=0).to_numpy()
    for name in CLINICS:
        table = clinic(name)
        z = (table[["age", "marker"]].to_numpy() - mean) / std
        ones = OneHotEncoder(
            categories=[["f", "m"], [*"ab", "east", "north", "south", "west", "?"]], sparse_output=False
        )
        levels = ones.fit_transform(table[["sex", "ward"]].fillna("?"))
        expected = np.column_stack([np.nan_to_num(z), table["marker"].isna(), levels])
        np.testing.assert_allclose(data.all_samples(name).x.numpy(), expected, atol=1e-5)
        assert torch.equal(data.all_samples(name).x, first[name].x)
        assert torch.equal(data.labels(name), first[name].y)


def test_a_clinics_own_statistics_are_of_its_training_samples_alone(files):
    data = make(files, statistics="own")
    assert [channel.name for channel in data.channels] == ["levels"]
    for name in ("north", "south"):
        age = clinic(name)[["age"]]
        scaled = StandardScaler().fit(age.iloc[data.split(name).train.tolist()]).transform(age)
        np.testing.assert_allclose(data.all_samples(name).x[:, :1].numpy(), scaled, atol=1e-5)


def test_the_target_may_lack_labels_and_ids_are_those_of_its_rows(files):
    data, table = make(files), clinic("south")
    known = table["ill"].notna().to_numpy()
    split = data.split("south")
    assert data.labels("south").ge(0).tolist() == known.tolist()
    assert split.labelled.tolist() == [row for row in split.train.tolist() if known[row]]
    assert data.ids("south", "predict") == data.ids("south", "test") == table["patient"].iloc[split.test].tolist()
    assert make(files, id=None, leave_out=["patient"]).ids("south", "test") is None
    for other in (table.drop(columns="ill"), table.assign(ill=-1)):
        other.to_csv("south.csv", index=False)
        assert not make(files, target_labels=0).labels("south").ge(0).any()


def test_levels_that_are_named_need_not_be_agreed_on(files):
    wards = ["a", "b", "north", "east", "west", "south", "attic"]
    data = make(files, categories={"sex": ["m", "f"], "ward": wards}, statistics="own")
    assert data.channels == ()
    assert data.feature_names()[3:5] == ["sex=m", "sex=f"]
    assert "ward=attic" in data.feature_names()
    channels = make(files, categories={"sex": None, "ward": wards}).channels
    assert [channel.name for channel in channels] == ["levels", "magnitudes", "statistics"]
    for name in CLINICS:  # one table has decimals, as if it had missing values
        decades = clinic(name)["age"].round(-1)
        rewrite(put("age", decades if name == "east" else decades.astype(int)), name)
    names = [name for name in make(files, categories=["age", "ward"]).feature_names() if name.startswith("age")]
    assert names == sorted({f"age={age:.0f}" for name in CLINICS for age in clinic(name)["age"].round(-1)})


def test_new_rows_of_the_target_are_predicted(files):
    new = clinic("south", seed=5).drop(columns="ill").assign(ward="cellar")
    new.to_csv("new.csv", index=False)
    data = make(files, predict_file="new.csv")
    with pytest.warns(UserWarning, match=r"\['cellar'\]"):
        (x,) = (dataset.x for dataset in data.predict_dataloader().datasets.values())
    assert len(x) == len(new)
    assert x[:, 5:].sum() == 0
    assert data.ids("south", "predict") == new["patient"].tolist()


ELSEWHERE = {"clients": [*CLINICS], "classes": ["no", "yes"]}


def test_a_process_without_tables_knows_who_takes_part_and_what_is_agreed_on(files):
    data, here = make(None, **ELSEWHERE), make(files)
    assert (data.elsewhere, here.elsewhere) == (True, False)
    assert (data.clients, data.channels) == (here.clients, here.channels)
    assert (data.target, data.classes, data.domain_names()) == ("south", ["no", "yes"], [])
    assert str(data).count("elsewhere") == 4
    assert make(None, label="age", task="regression", clients=[*CLINICS]).classes == ["age"]


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [("clients", {"classes": ["no", "yes"]}), ("classes", {"clients": [*CLINICS]})],
)
def test_a_process_without_tables_needs_the_names_in_them(argument, arguments):
    with refused(argument):
        make(None, **arguments)


@pytest.mark.parametrize(
    "look",
    [
        lambda data: data.in_features,
        lambda data: data.raw_inputs(),
        lambda data: data.dataset("south", "test"),
        lambda data: data.predict_dataloader(),
    ],
)
def test_a_process_without_tables_refuses_to_look_into_them(look):
    with pytest.raises(DatasetNotFoundError, match="are not here"):
        look(make(None, **ELSEWHERE))


def test_a_process_may_name_its_own_table_alone(files):
    data = make({"east": "east.csv"}, **ELSEWHERE)
    assert data.clients == make(files).clients
    assert data.domain_names() == ["east"]
    with pytest.raises(RuntimeError, match="agree on features"):
        data.feature_names()
    with pytest.raises(DatasetNotFoundError, match="'south'"):
        data.table("south")
    with refused("clients", RosterError):
        make({"east": "east.csv"}, clients=["north", "west", "south"])


NAMED = {"classes": ["no", "yes"]}
AGES = {"label": "age", "task": "regression", "leave_out": ["ill"]}
TROUBLE = [  # what is refused, how the table of one clinic is changed, and other arguments
    ("columns", lambda t: t.rename(columns={"age": "years"}), {}),
    ("age", put("age", ["?"]), {}),
    ("age", put("age", ["n/d"] * 40), NAMED),
    ("age", put("age", lambda age: np.where(age > 50, "old", "young")), {}),  # numbers elsewhere
    ("ward", put("ward", [f"note {i}" for i in range(60)]), {}),
    ("id", put("patient", ["p1", "p1"]), {}),
    ("id", put("patient", [None]), {}),
    ("label", lambda t: t.rename(columns={"ill": "iil"}), {}),
    ("label", put("ill", [None, None]), {}),
    ("label", put("ill", ["perhaps"]), NAMED),
    ("label", put("ill", ["Yes", "No"]), {}),
    ("label", put("age", [None]), AGES),
    ("label", put("age", [np.inf]), AGES),
    ("leave_out", lambda t: t, {"leave_out": ["wart"]}),
    ("east.csv", lambda t: t[:0], {}),
    ("east.csv", lambda t: t[["patient", "ill"]], {}),
    ("ward", lambda t: t, {"categories": {"sex": ["f", "m"], "ward": ["a", "b"]}}),
    ("ward", lambda t: t, {"categories": {"sex": ["f", "m"]}}),
    ("ward", put("ward", "x" * 61), {}),
    ("ward", put("ward", ["(missing)"]), NAMED),
    ("sex", put("sex", ["F", "m"] * 30), NAMED),
]
PARQUET = [
    ("ward", put("ward", pd.Timestamp("2020-01-01")), {}),
    *(("age", put("age", [value] * 60), {}) for value in (date(2020, 1, 2), b"1", [1, 2])),
]


@pytest.mark.parametrize(
    ("suffix", "argument", "change", "arguments"),
    [("csv", *each) for each in TROUBLE] + [("parquet", *each) for each in PARQUET],
)
def test_what_cannot_be_used_is_refused_by_its_name(files, suffix, argument, change, arguments):
    table, name = change(clinic("east")), f"east.{suffix}"
    table.to_csv(name, index=False) if suffix == "csv" else table.to_parquet(name)
    with refused(argument, DatasetLayoutError):
        make(files | {"east": name}, **arguments).feature_names()


def test_columns_that_show_nothing_are_warned_of_or_refused(files):
    rewrite(lambda t: t.assign(unit=5, note=None))
    with refused("note", DatasetLayoutError):
        make(files).feature_names()
    rewrite(lambda t: t.assign(unit=5))
    rewrite(lambda t: t.assign(unit=5, marker=3.5, sex=None), "east")
    with pytest.warns(UserWarning, match="shows nothing there") as warned:
        assert make(files).all_samples("north").x[:, 2].abs().max() == 0
    texts = [str(each.message) for each in warned]
    assert sum("'unit' (always 5)" in text for text in texts) == 4
    (constant,), (unknown,) = ([text for text in texts if name in text] for name in ("'marker'", "'sex'"))
    assert "'marker' (always 3.5)" in constant
    assert "east.csv" in constant
    assert "east.csv" in unknown


def test_labels_and_levels_are_the_texts_of_the_files(files):
    # pandas would read 01 as 1 and TRUE as True where all of a file is so, and as texts in another
    for name in CLINICS:
        codes = ["01", "A1"] if name in ("east", "south") else ["01", "02"]
        truths = ["TRUE", "FALSE", "maybe" if name == "east" else "TRUE"]
        table, rows = clinic(name), range(CLINICS[name])
        table["ill"], table["smokes"] = [codes[row % 2] for row in rows], [truths[row % 3] for row in rows]
        table.to_csv(f"{name}.csv", index=False)
    data = make(files, classes=["01", "02", "A1"])
    assert {int(label) for label in data.labels("north")} == {0, 1}
    assert {int(label) for label in data.labels("east")} == {0, 2}
    levels = [name for name in data.feature_names() if "smokes" in name]
    assert levels == ["smokes=FALSE", "smokes=TRUE", "smokes=maybe"]
    assert make(files).class_names() == ["01", "02", "A1"]


def test_exact_decimals_of_parquet_are_numbers(files):
    ages = [Decimal(str(value)) for value in clinic("east")["age"]]
    clinic("east").assign(age=[None, *ages[1:]]).to_parquet("east.parquet")
    data = make({**files, "east": "east.parquet"})
    assert "age missing" in data.feature_names()
    assert data.table("east")["age"].iloc[1:].tolist() == clinic("east")["age"].iloc[1:].tolist()


def test_names_of_classes_and_levels_are_no_missing_values(files):
    wards = {"a": "NA", "b": "b"} | dict.fromkeys(CLINICS, "c")
    rewrite(lambda t: t.assign(ill=t["ill"].map({"no": "NA", "yes": "ill"}), ward=t["ward"].map(wards)))
    data = make(files, classes=["NA", "ill"], categories={"ward": ["NA", "b", "c"], "sex": None})
    assert {int(label) for label in data.labels("north")} == {0, 1}
    names = [name for name in data.feature_names() if "=" in name]
    assert names == ["sex=f", "sex=m", "ward=NA", "ward=b", "ward=c", "ward=(missing)"]
    with refused("label", DatasetLayoutError):
        make(files, categories={"ward": None, "sex": None}, classes=["no", "ill"]).feature_names()


def test_a_client_without_a_class_is_warned_of(files):
    rewrite(lambda t: t.query("ill == 'no'"), "east")
    with pytest.warns(UserWarning, match=r"'east' has no sample of the classes \['yes'\]"):
        make(files).feature_names()


def test_files_that_are_not_there_or_twice_are_refused(files):
    Path("folder").mkdir()
    with pytest.raises(DatasetNotFoundError, match="none of files"):
        make({"a": "nowhere.csv", "south": "else.csv"})
    with pytest.raises(RosterError, match="target 'moon'"):
        make(files, target="moon")
    with refused("files", DatasetNotFoundError):
        make("nowhere")
    for given in (files | {"east": "north.csv"}, files | {"east": "folder/../north.csv"}, "folder"):
        with refused("files", DatasetLayoutError):
            make(given)
    clinic("north").to_csv("folder/north.csv", index=False)
    clinic("north").to_parquet("folder/north.parquet")
    with refused("files", DatasetLayoutError):
        make("folder")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff\xfe" * 20,
        b"a,b\n1,2,3,4\n1,2\n",
        b"a,b,ill\n1,yes\n",
        b"a,b,ill\n1,2,yes,\n1,2,yes,\n",  # whose first column pandas takes for names of the rows
        b"a,b,ill\n1,2,y\0es\n",
        b"a,a,ill\n1,2,yes\n",
        b",a,ill\n1,2,yes\n",
        b"a;b;ill\n1;2;yes\n",
        b"sep=;\na;b;ill\n1;2;yes\n",
        "a,b\n1,\u00e9\n".encode("latin-1"),
        b"PAR1 no",
    ],
)
def test_files_that_are_no_tables_are_refused(files, content):
    name = "north.parquet" if content[:4] == b"PAR1" else "north.csv"
    Path(name).write_bytes(content)
    with refused(name, DatasetLayoutError):
        make(files | {"north": name}).class_names()


@pytest.mark.parametrize(
    ("argument", "value"), [("task", "guessing"), ("statistics", "mine"), ("classes", ["yes"]), ("site", "clinic")]
)
def test_arguments_out_of_range_are_refused(files, argument, value):
    with refused(argument):
        make(files, **{argument: value})
