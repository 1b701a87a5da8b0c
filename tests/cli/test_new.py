"""``fedlit new``: what it writes runs as it is, and with data that somebody has."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

from commands import refusal
from fedlit.cli import main
from fedlit.data import CSVDomains, FeatureDomains, ImageDomains, SignalDomains
from refused import slow


def read_me(folder: Path) -> list[list[str]]:
    text = (folder / "README.md").read_text(encoding="utf-8")
    lines = "\n".join(re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)).splitlines()
    return [shlex.split(line) for line in lines if line]


def follow(folder: Path, monkeypatch: pytest.MonkeyPatch, *short: str) -> None:
    monkeypatch.chdir(folder)
    commands = read_me(Path())
    assert [words[:2] for words in commands] == [["fedlit", each] for each in ("fit", "report", "predict", "export")]
    for _, name, *words in commands:
        found = [sorted(map(str, Path().glob(word))) if "*" in word else [word] for word in words]
        main([name, *(word for each in found for word in each), *(short if name == "fit" else ())])


def configured(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(Path(folder, "experiment.yaml").read_text(encoding="utf-8"))
    return found["data"]["init_args"]


def check_followed(kind: str, labelled: bool = True) -> None:
    (table,) = Path("runs").glob("experiment_*/table.csv")
    with table.open(newline="") as file:
        methods = [row["method"] for row in csv.DictReader(file)]
    assert methods[0] == "SourceOnly"
    assert methods[-1] == "recommended"
    assert len(methods) == 2 + labelled
    (run,) = Path("runs/recommended").glob("*/version_0")
    assert (run / "target.pt2").is_file()
    assert Path("report.html").is_file()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["method"] == "recommended"
    with Path("predictions.csv").open(newline="") as file:
        predicted = {row["id"]: row["predicted"] for row in csv.DictReader(file)}
    truth = TRUTH[kind](configured("."))
    assert predicted.keys() == truth.keys()
    right = sum(predicted[name] == label for name, label in truth.items()) / len(truth)
    if labelled:
        assert right == pytest.approx(summary["oracle_accuracy"], abs=1e-6)


def truth_of_tables(data: dict[str, Any]) -> dict[str, str]:
    with Path(data["files"][data["target"]]).open(newline="") as file:
        return {row[data["id"]]: row[data["label"]] for row in csv.DictReader(file)}


def truth_of_images(data: dict[str, Any]) -> dict[str, str]:
    folder = Path(data["root"], data["target"])
    return {str(path.relative_to(data["root"])): path.parent.name for path in folder.rglob("*.png")}


def truth_of_features(data: dict[str, Any]) -> dict[str, str]:
    with np.load(data["path"]) as arrays:
        y, classes = arrays[f"{data['target']}_y"], arrays["classes"]
    return {str(place): str(classes[label]) for place, label in enumerate(y)}


def truth_of_signals(data: dict[str, Any]) -> dict[str, str]:
    signals = SignalDomains(**data)
    labels = signals.labels(data["target"])[signals.split(data["target"]).test].tolist()
    return dict(zip(signals.ids(data["target"], "test"), [signals.classes[label] for label in labels], strict=True))


TRUTH: dict[str, Callable[[dict[str, Any]], dict[str, str]]] = {
    "csv": truth_of_tables,
    "images": truth_of_images,
    "features": truth_of_features,
    "signals": truth_of_signals,
}


@pytest.mark.parametrize("kind", ["features", slow("csv"), slow("images"), slow("signals")])
def test_the_commands_of_the_readme_run_as_they_are_written(kind, monkeypatch, capsys):
    if kind in ("csv", "signals"):
        pytest.importorskip("pandas")
    main(["new", kind, "study"])
    assert "next: cd study && fedlit fit --config experiment.yaml" in capsys.readouterr().out
    follow(Path("study"), monkeypatch, "--trainer.max_epochs=1")
    check_followed(kind)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "least"), [("csv", 0.65), ("images", 0.9), ("features", 0.8), ("signals", 0.8)])
def test_the_example_is_learnt(kind, least, monkeypatch):
    main(["new", kind, "study"])
    follow(Path("study"), monkeypatch)
    (summary,) = Path("runs/recommended").glob("*/version_0/summary.json")
    assert json.loads(summary.read_text())["oracle_accuracy"] > least


@pytest.mark.parametrize("kind", ["csv", slow("images"), "features", "signals"])
def test_the_example_is_the_same_each_time_and_its_commented_masking_a_configuration(kind):
    for folder in ("one", "two"):
        main(["new", kind, folder])
    text = Path("one/experiment.yaml").read_text(encoding="utf-8")
    whole = re.sub(r"# (privacy:|  class_path: fedlit.privacy)", r"\1", text)
    strategies = [yaml.safe_load(each)["trainer"]["strategy"]["init_args"] for each in (text, whole)]
    masking = {"class_path": "fedlit.privacy.PairwiseMasking"}
    assert [each.get("privacy") for each in strategies] == [None, masking]
    first = {path.relative_to("one"): path.read_bytes() for path in Path("one").rglob("*") if path.is_file()}
    second = {path.relative_to("two"): path.read_bytes() for path in Path("two").rglob("*") if path.is_file()}
    assert len(first) >= 3
    del first[Path("README.md")], second[Path("README.md")]  # which has the folder's name
    assert first == second


def test_nothing_is_written_over():
    main(["new", "features", "study"])
    before = {path: path.read_bytes() for path in Path("study").iterdir()}
    assert "'study' has experiment.yaml and README.md already" in refusal("new", "features", "study")
    Path("study/experiment.yaml").unlink()
    assert "'study' has README.md already" in refusal("new", "csv", "study")
    assert {path: path.read_bytes() for path in Path("study").iterdir()}.items() <= before.items()
    Path("other/data").mkdir(parents=True)
    assert "'other/data' is there, where the example would be" in refusal("new", "csv", "other")
    assert [*Path("other").iterdir()] == [Path("other/data")]
    Path("file").write_text("")
    assert "DIR must be a folder" in refusal("new", "csv", "file")


def test_data_that_are_there_are_not_taken_for_an_example():
    Path("mine").mkdir()
    Path("mine/north.csv").write_text("a,b\n1,2\n")
    assert "'mine' has data already (north.csv)" in refusal("new", "csv", "mine")
    assert "--target is of your own data" in refusal("new", "images", "study", "--target=x")
    assert "--data 'nowhere' is not there" in refusal("new", "csv", "study", "--data=nowhere")
    assert not Path("study").exists()


def machines(folder: Path, labelled: bool = True) -> None:
    """Three plants with tables of machines, of which the second half are broken, as their heat tells."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for place, plant in enumerate(("essen", "lyon", "turin")):
        lines = ["machine,heat,noise,maker,state"]
        for number in range(60):
            broken = number >= 30
            state = ("broken" if broken else "fine") if labelled or plant != "turin" else ""
            heat = random.normal(3 if broken else 0) + place
            lines.append(f"{1000 * place + number},{heat:.3f},{random.normal():.3f},{'ab'[number % 2]},{state}")
        (folder / f"{plant}.csv").write_text("\n".join(lines) + "\n")


def test_own_tables_are_read(capsys):
    pytest.importorskip("pandas")
    machines(Path("plants"))
    words = ["new", "csv", "plants", "--data=plants"]
    columns, names = ["machine", "heat", "noise", "maker", "state"], ["essen", "lyon", "turin"]
    assert f"--label must name the column to predict, and the tables have {columns}" in refusal(*words)
    assert refusal(*words, "--label=state").endswith(f"one of {names}")
    assert f"one of {names}, got 'rome'" in refusal(*words, "--label=state", "--target=rome")
    assert "did you mean 'state'?" in refusal(*words, "--label=stat", "--target=turin")
    assert "must be of a few classes" in refusal(*words, "--label=heat", "--target=turin")
    assert sorted(path.name for path in Path("plants").iterdir()) == ["essen.csv", "lyon.csv", "turin.csv"]
    capsys.readouterr()
    main(["new", "csv", "noted", "--data=plants", "--label=state", "--target=turin"])
    assert "column 'machine' has another whole number in each row" in capsys.readouterr().out
    main([*words, "--label=state", "--target=turin", "--id=machine"])
    data = configured("plants")
    assert data["files"] == {"essen": "essen.csv", "lyon": "lyon.csv", "turin": "turin.csv"}
    assert configured("noted")["files"]["lyon"] == str(Path("plants/lyon.csv").resolve())
    assert (data["label"], data["target"], data["id"]) == ("state", "turin", "machine")


@pytest.mark.slow
@pytest.mark.parametrize("labelled", [True, False])
def test_own_tables_run_at_once_and_without_labels_no_method_that_needs_them(labelled, monkeypatch):
    pytest.importorskip("pandas")
    machines(Path("plants"), labelled)
    main(["new", "csv", "study", "--data=plants", "--label=state", "--target=turin", "--id=machine"])
    follow(Path("study"), monkeypatch, "--trainer.max_epochs=2")
    check_followed("csv", labelled)


@pytest.mark.slow
def test_numbers_are_predicted_as_by_linear_regression(monkeypatch):
    """Of the pooled tables of the sources, on which scikit-learn fits the same; the target's labels are hidden.

    Labels are in tens of thousands, which no learning rate but one of their unit would fit as they are.
    """
    pytest.importorskip("pandas")
    Path("plants").mkdir()
    random, tables = np.random.default_rng(0), {}
    for place, plant in enumerate(("essen", "lyon", "turin")):
        heat, noise = random.normal(size=(2, 60))
        wear = 1000 * (40 + 3 * heat - 2 * noise + place + random.normal(size=60))
        tables[plant] = np.stack([heat, noise, wear], axis=1)
        np.savetxt(f"plants/{plant}.csv", tables[plant], delimiter=",", header="heat,noise,wear", comments="")
    words = ["new", "csv", "study", "--data=plants", "--label=wear", "--target=turin"]
    assert re.search(r"give task: regression.* is an option of fedlit new csv", refusal(*words))
    main([*words, "--task=regression"])
    follow(Path("study"), monkeypatch)
    pooled, target = np.concatenate([tables["essen"], tables["lyon"]]), tables["turin"]
    expected = LinearRegression().fit(pooled[:, :2], pooled[:, 2])
    with Path("predictions.csv").open(newline="") as file:
        predicted = [float(row["wear"]) for row in csv.DictReader(file)]
    assert predicted == pytest.approx(expected.predict(target[:, :2]), abs=200)
    (summary,) = Path("runs/SourceOnly").glob("version_0/summary.json")
    assert json.loads(summary.read_text())["oracle_r2"] == pytest.approx(r2_score(target[:, 2], predicted), abs=1e-4)


def test_one_table_of_all_needs_the_column_of_whose_rows_are():
    pytest.importorskip("pandas")
    machines(Path("plants"))
    rows = [f"plant,{Path('plants/essen.csv').read_text().splitlines()[0]}"]
    for path in sorted(Path("plants").iterdir()):
        rows += [f"{path.stem},{line}" for line in path.read_text().splitlines()[1:]]
    Path("all.csv").write_text("\n".join(rows).replace(",", ";") + "\n")
    words = ["new", "csv", "study", "--data=all.csv", "--label=state", "--target=lyon"]
    assert "'all.csv' is one file: give --site COLUMN" in refusal(*words)
    assert re.search(r"give separator=';'.* is an option of fedlit new csv", refusal(*words, "--site=plant"))
    main([*words, "--site=plant", "--separator=;", "--leave_out", "machine", "noise"])
    data = configured("study")
    assert {key: data[key] for key in ("site", "separator", "leave_out", "target")} == {
        "site": "plant", "separator": ";", "leave_out": ["machine", "noise"], "target": "lyon",
    }  # fmt: skip
    model = yaml.safe_load(Path("study/experiment.yaml").read_text())["model"]["init_args"]
    assert model["optimizer"]["init_args"]["lr"] == 0.63


def plants(columns: int, task: str, labelled: int, rows: int = 60) -> list[str]:
    """Tables of which the target's rows are many and near to one another, and what is to be said of them."""
    Path("plants").mkdir()
    random = np.random.default_rng(0)
    for plant in ("essen", "lyon", "turin"):
        number, spread = (10 * rows, 0.01) if plant == "turin" else (rows, 1.0)
        one = random.normal(size=(number, 1))
        x = spread * (one + 0.01 * random.normal(size=(number, columns)))
        y = [f"{value:.3f}" if task == "regression" else "ab"[int(value > 0)] for value in x.sum(axis=1)]
        kept = labelled if plant == "turin" else number
        lines = [",".join(f"{value:.5f}" for value in row) + f",{'' if place >= kept else y[place]}"
                 for place, row in enumerate(x)]  # fmt: skip
        Path(f"plants/{plant}.csv").write_text("\n".join([",".join([*(f"x{n}" for n in range(columns)), "y"]), *lines]))
    return ["new", "csv", "study", "--data=plants", "--label=y", "--target=turin", f"--task={task}"]


@pytest.mark.parametrize(("task", "columns"), [("classification", 1), ("regression", 2), ("classification", 7)])
def test_the_rate_is_one_at_which_no_loss_of_these_rows_rises(columns, task):
    """By the largest eigenvalue of the curvature, of sources that spread more than all rows together do."""
    pytest.importorskip("pandas")
    main(plants(columns, task, 30))
    tables = {
        path.stem: np.genfromtxt(path, delimiter=",", skip_header=1)[:, :columns] for path in Path("plants").iterdir()
    }
    if columns == 1:
        tables = {name: table.reshape(-1, 1) for name, table in tables.items()}
    every = np.concatenate([*tables.values()])
    sources = (np.concatenate([tables["essen"], tables["lyon"]]) - every.mean(0)) / every.std(0)
    rows = np.column_stack([sources, np.ones(len(sources))])
    highest = np.linalg.eigvalsh(rows.T @ rows / len(rows)).max() * (2 if task == "regression" else 0.5)
    model = yaml.safe_load(Path("study/experiment.yaml").read_text())["model"]["init_args"]["optimizer"]
    rate, momentum = model["init_args"]["lr"], model["init_args"]["momentum"]
    bound = (0.5 if task == "regression" else 2) / (1 + np.square(sources).sum(1).mean())
    assert 0.9 * bound < rate <= bound
    assert rate < 2 * (1 + momentum) / (1 + 2 * momentum) / highest  # of gradient descent with Nesterov's momentum
    assert (0.5 if task == "regression" else 2) / columns > 2 * bound  # as it was, whatever the rows


@pytest.mark.parametrize(
    ("labelled", "share", "told"),
    [
        (30, 0.5, "turin has 30 labels: FedAvg trains on 15, drawn at random, and the other 15 score it"),
        slow(2, 0.5, "turin has 2 labels: FedAvg trains on 1, drawn at random, and the other 1 score it"),
        (1, None, "turin has 1 label, and FedAvg needs"),
        (0, None, "turin has no labels, and FedAvg needs"),
    ],
)
def test_which_labels_of_the_target_are_used_is_told_on_screen_and_in_the_file(labelled, share, told, capsys):
    pandas = pytest.importorskip("pandas")
    main(plants(1, "classification", labelled))
    assert told in capsys.readouterr().out
    text = Path("study/experiment.yaml").read_text()
    assert told in text
    assert pandas.read_csv("plants/turin.csv")["y"].notna().sum() == labelled
    fedavg = [entry for entry in yaml.safe_load(text)["compare"] if entry["class_path"] == "fedlit.methods.FedAvg"]
    assert [entry["data"]["target_labels"] for entry in fedavg] == ([] if share is None else [share])
    if share is not None:
        data = CSVDomains(**(configured("study") | fedavg[0]["data"]))
        split = data.split("turin")
        known = (data._domain("turin").y >= 0).nonzero()[:, 0].tolist()
        assert f"trains on {len(split.labelled)}," in told
        assert sorted(split.labelled.tolist() + [row for row in split.test.tolist() if row in known]) == known


def test_names_that_yaml_would_read_otherwise_are_quoted():
    pytest.importorskip("pandas")
    machines(Path("plants"))
    for old, new in (("essen", "no"), ("turin", "2")):
        Path(f"plants/{old}.csv").rename(f"plants/{new}.csv")
    main(["new", "csv", "plants", "--data=plants", "--label=state", "--target=no", "--id=machine"])
    data = configured("plants")
    assert data["files"] == {"2": "2.csv", "lyon": "lyon.csv", "no": "no.csv"}
    assert data["target"] == "no"


def test_own_images_and_features_are_read():
    for client in ("home", "shop"):
        for name in ("cat", "dog"):
            Path("photos", client, name).mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (40, 30), (number, 0, 0)).save(f"photos/{client}/{name}/{number}.png")
    assert "one of ['home', 'shop']" in refusal("new", "images", "photos", "--data=photos")
    assert "'photos' has data already (home, shop)" in refusal("new", "images", "photos")
    main(["new", "images", "study", "--data=photos", "--target=shop", "--image_size=24"])
    data = configured("study")
    assert {key: data[key] for key in ("root", "target", "image_size")} == {
        "root": str(Path("photos").resolve()), "target": "shop", "image_size": 24,
    }  # fmt: skip
    assert f"--data.root {Path('photos').resolve()} --extractor" in Path("study/README.md").read_text()
    for file in Path("photos/shop").rglob("*.png"):
        Image.fromarray(np.random.default_rng(0).normal(size=(30, 40)).astype(np.float32)).save(f"{file}.tif")
        file.unlink()
    assert "--window LEVEL WIDTH and --normalise are options" in refusal(
        "new", "images", "scans", "--data=photos", "--target=shop"
    )
    main(["new", "images", "scans", "--data=photos", "--target=shop", "--window", "0", "4"])
    assert configured("scans")["window"] == [0, 4]
    assert ImageDomains(**configured("scans")).load("shop").y.tolist() == [0] * 6 + [1] * 6
    arrays = {f"{name}_{part}": np.eye(8) if part == "x" else np.arange(8) % 2 for name in "abc" for part in "xy"}
    np.savez("mine.npz", **(arrays | {"c_y": np.full(8, -1)}))
    main(["new", "features", "made", "--data=mine.npz", "--target=c"])
    found = configured("made")
    assert FeatureDomains(found["path"], target=found["target"]).domain_names() == ["a", "b", "c"]
    (only,) = yaml.safe_load(Path("made/experiment.yaml").read_text())["compare"]
    assert only["name"] == "recommended"


def test_own_recordings_are_read():
    pytest.importorskip("pandas")
    main(["new", "signals", "made"])
    words = ["new", "signals", "study", "--data=made/data"]
    assert "one of ['ann', 'ben', 'eva', 'tom']" in refusal(*words, "--time=time")
    assert re.search(r"time .* is an option of fedlit new signals", refusal(*words, "--target=tom", "--time=clock"))
    main([*words, "--target=ben", "--time=time", "--rate=20", "--window=2", "--channels", "x", "z"])
    assert "tom has 70 labels" in Path("made/experiment.yaml").read_text()
    data = SignalDomains(**(configured("made") | {"path": "made/data", "target_labels": 0.5}))
    assert len(data.labels("tom")) == 70
    assert len(data.split("tom").labelled) == len(data.split("tom").test) == 35  # as the file says
    data = configured("study")
    assert {key: data[key] for key in ("target", "time", "rate", "window", "channels")} == {
        "target": "ben", "time": "time", "rate": 20.0, "window": 2.0, "channels": ["x", "z"],
    }  # fmt: skip
    assert SignalDomains(**data).input_shape == (2 * 13,)
    np.savez("all.npz", x=np.random.default_rng(0).normal(size=(400, 2)), label=np.arange(400) // 50 % 2,
             person=np.repeat(["a", "b"], 200))  # fmt: skip
    assert "--domain must name the array" in refusal("new", "signals", "two", "--data=all.npz", "--target=b")
    main(
        ["new", "signals", "two", "--data=all.npz", "--target=b", "--domain=person", "--recorded_rate=25", "--window=1"]
    )
    assert configured("two")["domain"] == "person"
