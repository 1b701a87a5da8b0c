"""``fedlit report`` on real runs: its numbers next to those of the files, read by other means."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path

import pytest

from commands import refusal, rows
from fedlit.cli import main
from fedlit.privacy import PairwiseMasking
from read_page import Page, markdown_tables

SMALL = ["--model.extractor.init_args.hidden=[8]", "--trainer.enable_checkpointing=false"]
RUNS = ("digits/FedAvg", "digits/SourceOnly", "hearts/FedGP", "rates/FedMMD")
ACCURACY = "accuracy on validation samples, in %"


@pytest.fixture
def runs(reported: Path) -> Path:
    return reported / "runs"


@pytest.fixture(scope="module")
def page(reported: Path) -> Page:
    return Page((reported / "page.html").read_text(encoding="utf-8"))


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of which a test reads no more than a table have no curves, which take half a second a run."""
    monkeypatch.setattr("fedlit.callbacks.report.charts.Panel.draw", lambda panel: "<svg></svg>")


def page_of(*places: Path) -> Page:
    main(["report", *map(str, places), "--output=page.html"])
    return Page(Path("page.html").read_text(encoding="utf-8"))


def validations(folder: Path) -> list[dict[str, str]]:
    found = {int(row["epoch"]): row for row in rows(folder / "metrics.csv") if row["epoch"]}
    return [found[epoch] for epoch in sorted(found)[:-1]]  # the last one is the test


def test_accuracies_are_those_of_the_rounds_and_the_test_is_in_no_curve(runs, page):
    for place, method in enumerate(("FedAvg", "SourceOnly")):
        folder = runs / "digits" / method / "version_0"
        expected = validations(folder)
        assert len(expected) == 2
        shown = page.numbers(ACCURACY, place)
        names = {"fonts (target, ORACLE)": "oracle/target/acc", "mean of sources": "source/acc"}
        names |= {source: f"source/{source}/acc" for source in ("blended", "clean", "noisy")}
        assert shown.keys() == names.keys()
        for label, name in names.items():
            assert {at: float(cell) for at, cell in shown[label].items()} == pytest.approx(
                {at: 100 * float(row[name]) for at, row in enumerate(expected)}, rel=1e-3
            )
        test = rows(folder / "metrics.csv")[-1]
        table = {row[0]: row for row in page.table("client", place)}
        assert table["fonts"][1] == "target (its accuracy: ORACLE)"
        for label, name in (("fonts", "oracle/target/acc"), ("clean", "source/clean/acc"), ("mean", "source/acc")):
            assert table[label][2] == f"{100 * float(expected[-1][name]):.1f}"
            assert table[label][3:5] == ["1", f"{100 * float(test[name]):.1f}"]


@pytest.mark.parametrize(("place", "name"), list(enumerate(RUNS)))
def test_bytes_are_those_of_the_ledger(runs, page, place, name):
    ledger = rows(runs / name / "version_0" / "ledger.csv")
    table = {row[0]: row[1:] for row in page.table("channel", place)}
    curves = page.numbers("bytes sent in a round, by channel", place)
    channels = {row["channel"] for row in ledger}
    assert table.keys() == channels | {"method", "all"}
    method = channels - {"metrics", "oracle"}
    for row, among in [*((channel, {channel}) for channel in channels), ("method", method), ("all", channels)]:
        entries = [entry for entry in ledger if entry["channel"] in among]
        up = sum(int(entry["bytes"]) for entry in entries if entry["receiver"] == "server")
        down = sum(int(entry["bytes"]) for entry in entries if entry["sender"] == "server")
        total = sum(int(entry["bytes"]) for entry in entries)
        used = len({entry["round"] for entry in entries})
        messages = sum(int(entry["messages"]) for entry in entries)
        expected = [used, messages, up, down, total - up - down, total, round(total / used)]
        assert [int(cell.replace(",", "")) for cell in table[row]] == expected
    for channel in channels:
        sent: dict[int, int] = {}
        for entry in ledger:
            if entry["channel"] == channel:
                sent[int(entry["round"])] = sent.get(int(entry["round"]), 0) + int(entry["bytes"])
        assert {at: int(cell.replace(",", "")) for at, cell in curves[channel].items()} == sent


def test_the_closing_table_is_that_of_the_summaries(runs, page):
    tables = [each[1:] for each in page.tables if each[0][:2] == ["method", "target"] and "rounds" in each[0]]
    assert [len(table) for table in tables] == [2, 1, 1]
    for name, table in zip(RUNS, (tables[0], *tables), strict=True):
        method, key = Path(name).name, "oracle_r2" if "rates" in name else "oracle_accuracy"
        summary = json.loads((runs / name / "version_0" / "summary.json").read_text())
        row = {(row[0], row[1]): row for row in table}[method, summary["target"]]
        assert row[2] == f"{100 * summary[key]:.1f}"
        assert row[6 if "rates" in name else 4] == str(summary["rounds"])
        if "rates" in name:
            assert row[3:5] == [f"{summary['oracle_rmse']:.4g}", f"{summary['oracle_mae']:.4g}"]
    headers = [text for text in page.texts["th"] if "(oracle)" in text]
    expected = ["target accuracy (oracle)", "target accuracy (oracle)", "target R2 in % (oracle)"]
    assert headers == [*expected, "RMSE (oracle)", "MAE (oracle)"]
    assert any(text.startswith("These runs are of 3 federations") for text in page.texts["p"])


def test_weights_of_sources_are_those_that_the_callback_collected(runs, page):
    folder = runs / "hearts" / "FedGP" / "version_0"
    collected = rows(folder / "aggregation_curves.csv")
    assert len(collected) == 2
    distance = "squared distance of updates, and variance of the target's"
    for title, kind, whole in (
        ("weight of the source, beta", "beta", {"mean of sources": "beta"}),
        (distance, "distance", {"target variance": "target_variance"}),
        ("tau: distance of g_T to the directions of g_S, over d", "tau", {}),
    ):
        shown = page.numbers(title)
        names = {source: f"{kind}/{source}" for source in ("cleveland", "switzerland", "va_long_beach")} | whole
        assert shown.keys() == names.keys()
        for label, name in names.items():
            assert {at: float(cell) for at, cell in shown[label].items()} == pytest.approx(
                {int(row["round"]): float(row[name]) for row in collected}, rel=1e-3, abs=1e-9
            )


def test_privacy_says_what_the_backend_says_of_itself(runs, page):
    about = PairwiseMasking().describe()
    table = dict(page.table(""))
    assert table["backend"] == "PairwiseMasking"
    assert (table["hidden"], table["adversary"], table["revealed"]) == (about.hidden, about.adversary, about.revealed)
    assert table["differential privacy"] == "none"
    report = json.loads((runs / "digits" / "FedAvg" / "version_0" / "privacy.json").read_text())
    assert table["bytes of keys"] == f"{report['channels'][0]['bytes_keys']:,}"
    assert set(report["not_protected"]) <= set(page.texts["li"])
    # without the callback's file, what the summary tells
    backends = {row[0]: row[1:] for row in page.table("", 2)}["backend"]
    assert backends == ["none: from client to client in the clear"] * 2
    assert sum("There is no privacy.json" in text for text in page.texts["p"]) == 2


@pytest.mark.slow
def test_a_spent_epsilon_is_told(tmp_path):
    main(["fit", "--config", "experiments/digits_fedavg", "--config", "privacy/differential", *SMALL,
          "--trainer.max_epochs=2", f"--trainer.default_root_dir={tmp_path}"])  # fmt: skip
    (folder,) = (path.parent for path in tmp_path.rglob("privacy.json"))
    page = page_of(tmp_path)
    report = json.loads((folder / "privacy.json").read_text())
    told = [text for text in page.texts["p"] if "epsilon" in text]
    assert f"epsilon {report['epsilon_message']:.3g} against those who see single messages" in told[0]
    curve = page.numbers("epsilon spent by a client, at most, against those")["who sees single messages"]
    logged = [float(row["privacy/epsilon"]) for row in rows(folder / "metrics.csv") if row["privacy/epsilon"]]
    assert [float(curve[at].replace(",", "")) for at in (0, 1)] == pytest.approx(logged, rel=1e-3)
    assert dict(page.table(""))["differential privacy"] == "clip 0.5, noise 0.1"


@pytest.mark.usefixtures("_undrawn")
def test_configurations_differ_in_what_was_changed_and_nothing_else(runs, tmp_path):
    methods = [runs / "digits" / method for method in ("SourceOnly", "FedAvg")]
    page = page_of(*methods)
    assert page.table("key") == [["model.class_path", "fedlit.methods.SourceOnly", "fedlit.methods.FedAvg"]]
    assert page.texts["h2"][-2:] == ["2 runs", "What no backend protects"]
    assert "FedAvg on fonts, seed 0 (FedAvg/version_0)" in page.texts["summary"]
    again = tmp_path / "again" / "version_0"
    shutil.copytree(methods[1] / "version_0", again)
    config = (again / "config.yaml").read_text()
    changed = config.replace("lr: 0.1", "lr: 0.25").replace("  gradient_clip_val: null\n", "")
    (again / "config.yaml").write_text(changed + "note: {said: 'true'}\n")
    assert page_of(methods[1], again).table("key") == [
        ["model.init_args.optimizer.init_args.lr", "0.1", "0.25"],
        ["note.said", "-", "'true'"],
        ["trainer.gradient_clip_val", "null", "-"],
    ]


def test_the_page_needs_nothing_from_elsewhere(runs, page):
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "base", "form", "use"}
    pictures = []
    for tag, attributes in page.tags:
        refused = ("srcset", "style", "action", "href")
        assert not [name for name in attributes if name.startswith("on") or name in refused]
        if tag == "img":
            kind, _, data = (attributes["src"] or "").partition(";base64,")
            pictures.append((kind, base64.b64decode(data, validate=True)))
        else:
            assert "src" not in attributes
    assert len(page.texts["svg"]) > 20
    assert "@import" not in page.source
    assert "url(" not in page.source
    assert set(re.findall(r"\w+://[^\s\"<]+", page.source)) <= {"http://www.w3.org/2000/svg"}
    ((kind, png),) = pictures
    assert kind == "data:image/png"
    assert png == (runs / "hearts" / "FedGP" / "version_0" / "aggregation_curves.png").read_bytes()


def test_markdown_says_the_same(runs, page, monkeypatch):
    monkeypatch.chdir(runs.parent)
    text = Path("page.md").read_text(encoding="utf-8")
    assert markdown_tables(text) == page.tables
    assert re.findall("^## (.*)", text, flags=re.MULTILINE) == page.texts["h2"]
    named = [Path(path) for path in re.findall(r"^!\[.*\]\((.*)\)$", text, flags=re.MULTILINE)]
    drawn = [path.read_text(encoding="utf-8") for path in named if path.suffix == ".svg"]
    assert [re.sub("<style>.*?</style>", "", svg) for svg in drawn] == re.findall("<svg.*?</svg>", page.source)
    (png,) = (path for path in named if path.suffix == ".png")
    embedded = [attributes["src"] or "" for tag, attributes in page.tags if tag == "img"]
    assert [png.read_bytes()] == [base64.b64decode(src.split(",")[1]) for src in embedded]
    assert sorted(named) == sorted(Path("page_files").iterdir())


def test_regression_has_r2_and_errors_in_the_labels_unit(runs, page):
    folder = runs / "rates" / "FedMMD" / "version_0"
    assert [text for text in page.texts["h3"] if text in ("Accuracy", "R2")] == ["Accuracy"] * 3 + ["R2"]
    shown = page.numbers("R2 on validation samples, at most 1")
    expected = {at: float(row["oracle/target/r2"]) for at, row in enumerate(validations(folder))}
    assert {at: float(cell) for at, cell in shown["hungary (target, ORACLE)"].items()} == pytest.approx(
        expected, rel=1e-3
    )
    table = {row[0]: row for row in page.table("client", 3)}
    tested = rows(folder / "metrics.csv")[-1]
    assert table["hungary"][4] == f"{float(tested['oracle/target/r2']):.3f}"
    for place, name in ((7, "rmse"), (9, "mae")):
        assert float(table["hungary"][place]) == pytest.approx(float(tested[f"oracle/target/{name}"]), rel=1e-3)
        shown = page.numbers(f"{name.upper()} on validation samples, in the labels' unit")
        expected = {at: float(row[f"source/{name}"]) for at, row in enumerate(validations(folder))}
        assert {at: float(cell) for at, cell in shown["mean of sources"].items()} == pytest.approx(expected, rel=1e-3)
    assert float(tested["oracle/target/rmse"]) == pytest.approx(float(tested["oracle/target/loss"]) ** 0.5, rel=1e-5)


@pytest.mark.usefixtures("_undrawn")
def test_an_interrupted_run_is_told_as_far_as_it_came(runs, tmp_path):
    folder = tmp_path / "broken" / "version_0"
    shutil.copytree(runs / "digits" / "FedAvg" / "version_0", folder)
    for name in ("summary.json", "ledger.csv", "privacy.json"):
        (folder / name).unlink()
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    ended = [place for place, row in enumerate(rows(folder / "metrics.csv"), 1) if row["round"]]
    kept = lines[: ended[1]]  # all that came before the second round's end, which was cut in two while it was written
    (folder / "metrics.csv").write_text("".join([*kept, lines[ended[1]][:40]]))
    page = page_of(tmp_path / "broken")
    assert page.table("folder") == [["broken/version_0", "FedAvg", "fonts", "0", "unfinished: no summary.json", "1"]]
    assert any("No run has finished" in text for text in page.texts["p"])
    assert sorted(page.numbers(ACCURACY)["clean"]) == [0]
    assert {row[4] for row in page.table("client")} == {""}
    sent = {row[0]: row[2] for row in page.table("channel")}
    ledger = rows(runs / "digits" / "FedAvg" / "version_0" / "ledger.csv")
    expected = sum(int(row["bytes"]) for row in ledger if row["channel"] == "weights" and int(row["round"]) < 1)
    assert sent["weights"] == f"{expected:,}"
    assert any("privacy.class_path: fedlit.privacy.PairwiseMasking" in text for text in page.texts["li"])
    # beside one that has finished
    page = page_of(tmp_path / "broken", runs / "digits" / "SourceOnly")
    assert [row[0] for row in page.table("method")] == ["SourceOnly"]
    assert any("Of finished runs alone: 1 of 2." in text for text in page.texts["p"])


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (None, "got 'place', which does not exist"),
        ("place", "got 'place', which is a file"),
        ("place/deep/config.yaml", "got 'place', which has none at any depth"),
        ("place/summary.json", "got '{cwd}/place/summary.json', which cannot be read (JSONDecodeError: "),
    ],
)
def test_what_is_no_run_is_refused(made, problem, tmp_path):
    if made is not None:
        (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made).write_text("")
    assert problem.format(cwd=tmp_path.resolve()) in refusal("report", "place")
    assert not Path("report.html").exists()


BOMB = "".join(f"a{n}: &a{n} {{{', '.join(f'k{k}: *a{n - 1}' for k in range(9))}}}\n" for n in range(1, 10))
POINTS = "client,x,y,predicted,label\n"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("metrics.csv", f"step\n{'1' * 200_000}\n", ""),
        ("config.yaml", f"a0: &a0 {{x: 1}}\n{BOMB}", "more than 100000 entries"),
        ("ledger.csv", f"round,channel,sender,receiver,messages,bytes\n0,w,a,b,1,{10**400}\n", "num_bytes cannot be"),
        ("summary.json", "[" * 100_000, ""),
        ("embeddings.csv", "client,x\na,1\n", "its columns are"),
        ("embeddings.csv", f"{POINTS}a,1,nan,b,b\n", "a place that is not finite"),
        ("embeddings.csv", POINTS + "a,1,1,b,b\n" * 151, "more than 150 samples of a client"),
        ("settings.yaml", "a: &a {b: *a}", "more than 100000 entries"),
        ("secret.png", "-----BEGIN PRIVATE KEY-----", "it is no PNG picture"),
    ],
    ids=range(9),
)
def test_a_strangers_folder_is_refused_by_name_of_the_file(tmp_path, name, content, problem):
    (tmp_path / "metrics.csv").write_text("round,step\n0,1\n")
    (tmp_path / name).write_text(content)
    line = refusal("report", str(tmp_path))
    assert f"{name}', which cannot be read (" in line
    assert problem in line
    assert len(line) < 2000


@pytest.mark.parametrize("name", ["picture.png", "config.yaml"])
def test_a_strangers_links_are_not_followed(tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_bytes(b"\x89PNG\r\n\x1a\n secret")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.csv").write_text("round,step\n0,1\n")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    assert re.search(rf"{name}', which cannot be read \(.*it is a link to '{secret}'", refusal("report", str(folder)))
