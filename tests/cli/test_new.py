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

from fedlit.cli import main
from fedlit.data import FeatureDomains

KINDS = ("csv", "images", "features")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


def read_me(folder: Path) -> list[list[str]]:
    """The commands of a README, in order, as words; signs of the shell for names are looked up when one is run."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    lines = "\n".join(re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)).splitlines()
    return [shlex.split(line) for line in lines if line]


def follow(folder: Path, monkeypatch: pytest.MonkeyPatch, *short: str) -> None:
    """Give the commands of a README, the first with words that make it shorter."""
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
    """In the folder where it was: methods in the table, predictions that score as the run did, and a model."""
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


TRUTH: dict[str, Callable[[dict[str, Any]], dict[str, str]]] = {
    "csv": truth_of_tables,
    "images": truth_of_images,
    "features": truth_of_features,
}


@pytest.mark.parametrize(
    "kind", ["features", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("csv", "images"))]
)
def test_the_commands_of_the_readme_run_as_they_are_written(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "csv":
        pytest.importorskip("pandas")
    main(["new", kind, "study"])
    assert "next: cd study && fedlit fit --config experiment.yaml" in capsys.readouterr().out
    follow(Path("study"), monkeypatch, "--trainer.max_epochs=3")
    check_followed(kind)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "least"), [("csv", 0.65), ("images", 0.9), ("features", 0.8)])
def test_the_example_is_learnt(kind: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["new", kind, "study"])
    follow(Path("study"), monkeypatch)
    (summary,) = Path("runs/recommended").glob("*/version_0/summary.json")
    assert json.loads(summary.read_text())["oracle_accuracy"] > least


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_is_the_same_each_time(kind: str) -> None:
    for folder in ("one", "two"):
        main(["new", kind, folder])
    first = {path.relative_to("one"): path.read_bytes() for path in Path("one").rglob("*") if path.is_file()}
    second = {path.relative_to("two"): path.read_bytes() for path in Path("two").rglob("*") if path.is_file()}
    assert len(first) >= 3
    del first[Path("README.md")], second[Path("README.md")]  # which has the folder's name
    assert first == second


@pytest.mark.parametrize("kind", KINDS)
def test_the_commented_masking_is_a_configuration(kind: str) -> None:
    main(["new", kind, "study"])
    text = Path("study/experiment.yaml").read_text(encoding="utf-8")
    whole = re.sub(r"# (privacy:|  class_path: fedlit.privacy)", r"\1", text)
    privacy = yaml.safe_load(whole)["trainer"]["strategy"]["init_args"]["privacy"]
    assert privacy == {"class_path": "fedlit.privacy.PairwiseMasking"}
    assert "privacy" not in yaml.safe_load(text)["trainer"]["strategy"]["init_args"]


def test_nothing_is_written_over() -> None:
    main(["new", "features", "study"])
    before = {path: path.read_bytes() for path in Path("study").iterdir()}
    with pytest.raises(SystemExit, match=r"'study' has experiment.yaml and README.md already, and nothing is written"):
        main(["new", "features", "study"])
    Path("study/experiment.yaml").unlink()
    with pytest.raises(SystemExit, match=r"'study' has README.md already"):
        main(["new", "csv", "study"])
    assert {path: path.read_bytes() for path in Path("study").iterdir()}.items() <= before.items()
    Path("other/data").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"'other/data' is there, where the example would be"):
        main(["new", "csv", "other"])
    assert [*Path("other").iterdir()] == [Path("other/data")]
    Path("file").write_text("")
    with pytest.raises(SystemExit, match="DIR must be a folder, or a new name, and 'file' is a file"):
        main(["new", "csv", "file"])


def test_data_that_are_there_are_not_taken_for_an_example() -> None:
    Path("mine").mkdir()
    Path("mine/north.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match=r"'mine' has data already \(north.csv\): give --data mine to use them"):
        main(["new", "csv", "mine"])
    with pytest.raises(SystemExit, match="--target is of your own data: give --data PATH, too"):
        main(["new", "images", "study", "--target=x"])
    with pytest.raises(SystemExit, match="--data 'nowhere' is not there"):
        main(["new", "csv", "study", "--data=nowhere"])
    assert not Path("study").exists()


# ---------------------------------------------------------------- one's own


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


def test_own_tables_run_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pandas")
    machines(Path("plants"))
    words = ["new", "csv", "plants", "--data=plants"]
    columns = r"\['machine', 'heat', 'noise', 'maker', 'state'\]"
    with pytest.raises(SystemExit, match=f"--label must name the column to predict, and the tables have {columns}"):
        main(words)
    with pytest.raises(SystemExit, match=r"--target must name the client that is .*\['essen', 'lyon', 'turin'\]$"):
        main([*words, "--label=state"])
    with pytest.raises(SystemExit, match=r"one of \['essen', 'lyon', 'turin'\], got 'rome'"):
        main([*words, "--label=state", "--target=rome"])
    with pytest.raises(SystemExit, match=r"label='stat' is no column .* did you mean 'state'\?"):
        main([*words, "--label=stat", "--target=turin"])
    with pytest.raises(SystemExit, match="looks continuous"):
        main([*words, "--label=heat", "--target=turin"])
    assert sorted(path.name for path in Path("plants").iterdir()) == ["essen.csv", "lyon.csv", "turin.csv"]
    capsys.readouterr()
    main(["new", "csv", "noted", "--data=plants", "--label=state", "--target=turin"])
    assert (
        "column 'machine' has another whole number in each row: if it names them, give --id" in capsys.readouterr().out
    )
    main([*words, "--label=state", "--target=turin", "--id=machine"])
    data = configured("plants")
    assert data["files"] == {"essen": "essen.csv", "lyon": "lyon.csv", "turin": "turin.csv"}
    assert configured("noted")["files"]["lyon"] == str(Path("plants/lyon.csv").resolve())
    assert {key: data[key] for key in ("label", "target", "id")} == {
        "label": "state",
        "target": "turin",
        "id": "machine",
    }
    follow(Path("plants"), monkeypatch, "--trainer.max_epochs=3")
    check_followed("csv")


@pytest.mark.slow
def test_a_target_without_labels_has_no_method_that_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    machines(Path("plants"), labelled=False)
    main(["new", "csv", "study", "--data=plants", "--label=state", "--target=turin", "--id=machine"])
    follow(Path("study"), monkeypatch, "--trainer.max_epochs=2")
    check_followed("csv", labelled=False)


@pytest.mark.slow
def test_numbers_are_predicted_as_by_linear_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the pooled tables of the sources, on which scikit-learn fits the same; the target's labels are hidden."""
    pytest.importorskip("pandas")
    Path("plants").mkdir()
    random, tables = np.random.default_rng(0), {}
    for place, plant in enumerate(("essen", "lyon", "turin")):
        heat, noise = random.normal(size=(2, 60))
        wear = 40 + 3 * heat - 2 * noise + place + random.normal(size=60)
        tables[plant] = np.stack([heat, noise, wear], axis=1)
        np.savetxt(f"plants/{plant}.csv", tables[plant], delimiter=",", header="heat,noise,wear", comments="")
    words = ["new", "csv", "study", "--data=plants", "--label=wear", "--target=turin"]
    with pytest.raises(SystemExit, match=r"give task: regression.* is an option of fedlit new csv"):
        main(words)
    main([*words, "--task=regression"])
    follow(Path("study"), monkeypatch)
    pooled, target = np.concatenate([tables["essen"], tables["lyon"]]), tables["turin"]
    expected = LinearRegression().fit(pooled[:, :2], pooled[:, 2])
    with Path("predictions.csv").open(newline="") as file:
        predicted = [float(row["wear"]) for row in csv.DictReader(file)]
    assert predicted == pytest.approx(expected.predict(target[:, :2]), abs=0.2)
    (summary,) = Path("runs/SourceOnly").glob("version_0/summary.json")
    assert json.loads(summary.read_text())["oracle_r2"] == pytest.approx(r2_score(target[:, 2], predicted), abs=1e-4)


def test_one_table_of_all_needs_the_column_of_whose_rows_are() -> None:
    pytest.importorskip("pandas")
    machines(Path("plants"))
    rows = [f"plant,{Path('plants/essen.csv').read_text().splitlines()[0]}"]
    for path in sorted(Path("plants").iterdir()):
        rows += [f"{path.stem},{line}" for line in path.read_text().splitlines()[1:]]
    Path("all.csv").write_text("\n".join(rows).replace(",", ";") + "\n")
    words = ["new", "csv", "study", "--data=all.csv", "--label=state", "--target=lyon"]
    with pytest.raises(SystemExit, match=r"'all.csv' is one file: give --site COLUMN"):
        main(words)
    with pytest.raises(SystemExit, match=r"give separator=';'.* is an option of fedlit new csv"):
        main([*words, "--site=plant"])
    main([*words, "--site=plant", "--separator=;", "--leave_out", "machine", "noise"])
    data = configured("study")
    assert {key: data[key] for key in ("site", "separator", "leave_out", "target")} == {
        "site": "plant", "separator": ";", "leave_out": ["machine", "noise"], "target": "lyon",
    }  # fmt: skip
    assert (
        yaml.safe_load(Path("study/experiment.yaml").read_text())["model"]["init_args"]["optimizer"]["init_args"]["lr"]
        == 0.63
    )


def test_own_images_and_features_are_read() -> None:
    for client in ("home", "shop"):
        for name in ("cat", "dog"):
            Path("photos", client, name).mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (40, 30), (number, 0, 0)).save(f"photos/{client}/{name}/{number}.png")
    with pytest.raises(
        SystemExit, match=r"--target must name the client that is adapted to, one of \['home', 'shop'\]$"
    ):
        main(["new", "images", "photos", "--data=photos"])
    with pytest.raises(SystemExit, match=r"'photos' has data already \(home, shop\)"):
        main(["new", "images", "photos"])
    main(["new", "images", "study", "--data=photos", "--target=shop", "--image_size=24"])
    data = configured("study")
    assert {key: data[key] for key in ("root", "target", "image_size")} == {
        "root": str(Path("photos").resolve()), "target": "shop", "image_size": 24,
    }  # fmt: skip
    assert f"--data.root {Path('photos').resolve()} --extractor" in Path("study/README.md").read_text()
    arrays = {f"{name}_{part}": np.eye(8) if part == "x" else np.arange(8) % 2 for name in "abc" for part in "xy"}
    np.savez("mine.npz", **(arrays | {"c_y": np.full(8, -1)}))
    main(["new", "features", "made", "--data=mine.npz", "--target=c"])
    found = configured("made")
    assert FeatureDomains(found["path"], target=found["target"]).domain_names() == ["a", "b", "c"]
    (only,) = yaml.safe_load(Path("made/experiment.yaml").read_text())["compare"]
    assert only["name"] == "recommended"


def test_help_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["csv", "--help"]):
        with pytest.raises(SystemExit) as end:
            main(["new", *words])
        assert not end.value.code
    text = " ".join(capsys.readouterr().out.split())
    assert all(word in text for word in ("csv", "images", "features", "--label", "--target", "--site", "--data"))
    with pytest.raises(SystemExit):
        main(["new", "tables", "study"])
