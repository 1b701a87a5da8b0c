"""The papers' tables and figures: none is left out, all can be run, and what is run comes to the right cells."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from commands import refusal
from fedlit.checks import ArgumentError
from fedlit.cli import benchmark, main
from fedlit.papers import entries, running
from fedlit.papers.entries import Entry, Fit, names, read
from fedlit.papers.page import averages, page, state
from fedlit.papers.running import compared, ours, run, shrunk

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = ROOT / "fedlit" / "papers" / "results"

COUNTS = {"fed_dadil": (5, 5), "fed_mmd": (6, 6), "fedgp": (20, 11), "fedrf_tca_v1": (15, 6), "fedrf_tca_v2": (18, 7)}
"""Tables and figures by paper, counted in the papers."""

MINE = """
paper: Somebody, Somewhere
tables:
  table-1:
    title: Accuracy
    runs:
      - {config: experiments/digits, column: A, set: {data.init_args.target: written}}
      - {config: [settings/fedrf_tca_i, experiments/digits], targets: {left: L, right: R}}
    rows: {Theirs: Mine}
    paper: {Theirs: {A: 70.0, L: 60.5 ± 1.0}, Another: {A: lost}}
    departs: Fewer rounds.
  figure-1: {title: A sketch, shows: nothing is measured}
"""


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "mine.yaml").write_text(MINE)
    monkeypatch.setattr(entries, "FOLDER", tmp_path / "papers")
    read.cache_clear()
    yield tmp_path / "out"
    read.cache_clear()


def summary(method: str, target: str, seed: int, accuracy: float) -> dict[str, Any]:
    sent = {"weights": 3_000_000, "keys": 500_000}
    times = {"seconds_total": 6.0, "rounds": 3, "bytes_by_channel": sent}
    return {"method": method, "target": target, "seed": seed, "oracle_accuracy": accuracy, **times}


# ---------------------------------------------------------------- the files


def test_no_table_or_figure_is_left_out():
    assert names() == sorted(COUNTS)
    for name, (tables, figures) in COUNTS.items():
        there = {re.match(r"(table|figure)-\d+", key)[0] for key in read(name).tables}
        expected = {f"table-{n}" for n in range(1, tables + 1)} | {f"figure-{n}" for n in range(1, figures + 1)}
        assert there == expected, name


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_every_configuration_is_installed_and_every_benchmark_has_its_figures(name):
    for table, asked in read(name).tables.items():
        for fit in asked.runs:
            for config in fit.configs:
                assert files("fedlit.configs").joinpath(f"{config}.yaml").is_file(), (table, config)
        if asked.source:
            assert ours(name, table, RESULTS, BENCHMARKS), (table, asked.source)
            script = asked.script.split()[0]
            assert (BENCHMARKS / f"{script}.py").is_file(), (table, script)
        columns = [fit.column for fit in asked.runs if fit.column and not fit.row]
        assert len(columns) == len(set(columns)), f"{table}: two runs of one column"


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_figures_are_of_rows_and_columns_that_the_paper_has(name):
    """A row or column with another name than the paper's would stand beside it, and never be compared."""
    for table, asked in read(name).tables.items():
        found = ours(name, table, RESULTS, BENCHMARKS)
        if found and asked.paper:
            assert asked.departs or set(found) & set(asked.paper), (table, list(found), list(asked.paper))
            columns, printed = ({c for cells in each.values() for c in cells} for each in (found, asked.paper))
            assert columns & printed, (table, columns, printed)


def test_the_page_is_made_of_the_files():
    assert (ROOT / "docs" / "papers.md").read_text() == page(RESULTS, BENCHMARKS)


# ---------------------------------------------------------------- running


def test_runs_become_cells_by_column_and_by_target(paper, monkeypatch):
    given = []

    def fit(folder: str, *arguments: str) -> dict[Path, dict[str, Any]]:
        given.append(arguments)
        if "--config=settings/fedrf_tca_i" in arguments:
            runs = [summary("Mine", target, seed, 0.5 + 0.1 * (target == "left")) for target in ("left", "right")
                    for seed in (0, 1)]  # fmt: skip
        else:
            runs = [
                summary(method, "written", seed, 0.6 + 0.2 * seed) for method in ("Mine", "Other") for seed in (0, 1)
            ]
        return {Path(str(n)): each for n, each in enumerate(runs)}

    monkeypatch.setattr(running, "fit", fit)
    run("mine", "table-1", paper, seeds=[0, 1], arguments=["--trainer.max_epochs=1"])
    assert given == [
        (
            "--config=experiments/digits",
            "--data.init_args.target=written",
            "--trainer.max_epochs=1",
            "--seeds=[0, 1]",
            "--jobs=1",
        ),
        (
            "--config=settings/fedrf_tca_i",
            "--config=experiments/digits",
            "--trainer.max_epochs=1",
            "--seeds=[0, 1]",
            "--jobs=1",
        ),
    ]
    found = ours("mine", "table-1", paper, None)
    apart = {"mean": 70.0, "std": 14.1}  # |80 - 60| / sqrt(2)
    assert found == {
        "Theirs": {"A": apart, "L": {"mean": 60.0, "std": 0.0}, "R": {"mean": 50.0, "std": 0.0},
                   "average": {"mean": 55.0, "std": 0.0}},
        "Other": {"A": apart},
    }  # fmt: skip
    whole = json.loads((paper / "mine.json").read_text())
    assert whole["results"]["table-1"]["A"]["run"]["Mine"] == {"seeds": [0, 1], "seconds": 12.0}
    assert whole["results"]["table-1"]["L"]["run"] == {"Mine": {"seeds": [0, 1], "seconds": 12.0}}
    assert {"cores", "made"} <= whole.keys()
    asked = read("mine").tables["table-1"]
    assert averages(asked, found) == ("Theirs: 65.0", "65.2")  # of the columns that both have, A and L
    assert state(asked, found, None) == "2 of 3 cells, in another setting"
    assert "70.0 ± 14.1 (70.0)" in compared(asked, found).markdown()
    assert "- (lost)" in compared(asked, found).markdown()


def test_runs_with_other_settings_or_seeds_that_are_kept_are_no_part_of_a_cell(paper, tmp_path, monkeypatch):
    places = []

    def fit(folder: str, *_: str) -> dict[Path, dict[str, Any]]:
        places.append(folder)
        return {Path(str(seed)): summary("Mine", "written", seed, 0.5 + seed / 10) for seed in (0, 1)}

    monkeypatch.setattr(running, "fit", fit)
    for arguments in ([], [], ["--trainer.max_epochs=1"]):
        run("mine", "table-1", paper, columns=["A"], seeds=[1], kept=tmp_path / "kept", arguments=arguments)
    assert places[0] == places[1] != places[2]
    assert ours("mine", "table-1", paper, None) == {"Theirs": {"A": {"mean": 60.0}}}  # one seed has no spread


def test_averages_are_the_printed_ones_of_the_papers_own_method():
    printed = {"Ours": {"A": 80.0, "B": "0.9 (as printed)", "Avg": 85.0}, "Theirs": {"A": 50.0, "Avg": 60.0}}
    asked = Entry("A table", paper=printed)
    assert averages(asked, {}, ["Our"]) == ("-", "Ours: 85.0")
    mine = {row: {"A": 70.0, "B": 80.0, "Avg": 75.0} for row in printed}
    assert averages(asked, mine, ["Our"]) == ("Ours: 75.0", "85.0")
    assert averages(asked, {"Theirs": mine["Theirs"]}, ["Our"]) == ("Theirs: 75.0", "60.0")


def test_columns_that_are_unlike_have_no_average():
    printed = {"Ours": {"seconds, small": 1.0, "seconds, large": 99.0}}
    asked = Entry("A table", paper=printed, average=False)
    assert averages(asked, {}) == ("-", "Ours, seconds, small: 1.0")
    found = {"Ours": {"seconds, large": 50.0}}
    assert averages(asked, found) == ("Ours, seconds, large: 50.0", "99.0")


def test_the_state_tells_where_no_cell_is_the_papers_and_what_another_table_lacks():
    asked = Entry("A table", paper={"Ours": {"A": 1.0}}, departs="Fewer rounds.")
    assert state(asked, {"Ours": {"B": 2.0}}, None) == "yes, none of its cells, in another setting"
    assert state(asked, {"Ours": {"A": 2.0}}, None) == "yes, in another setting"
    same = Entry("A figure", same=["mine/table-1", "yours/table-2"], departs="Without panel b.")
    assert state(same, {}, None) == "as mine table-1 and yours table-2; Without panel b."


CURVED = """
paper: Somebody, Somewhere
tables:
  figure-1:
    title: Weights by round
    curve: beta
    rounds: [1, 2, 4]
    runs: [{config: experiments/digits, row: Mine, targets: {t: T, s: S}}]
"""


def test_a_metric_of_each_source_by_round_is_read_of_the_runs_folders(paper, tmp_path, monkeypatch):
    (tmp_path / "papers" / "mine.yaml").write_text(CURVED)

    def fit(folder: str, *_: str) -> dict[Path, dict[str, Any]]:
        found = {}
        for seed in (0, 1):
            place = Path(folder, "Mine", f"version_{seed}")
            place.mkdir(parents=True)
            rows = [f"{number},{number},{number / 10 + seed if number else ''},0.5" for number in range(4)]
            (place / "metrics.csv").write_text("\n".join(["step,round,beta/s,beta", *rows, ""]))
            found[place] = summary("Mine", "t", seed, 0.5)
        return found

    monkeypatch.setattr(running, "fit", fit)
    run("mine", "figure-1", paper)
    found = ours("mine", "figure-1", paper, None)
    assert found == {"target T: S": {"round 2": {"mean": 0.6, "std": 0.7071}, "round 4": {"mean": 0.8, "std": 0.7071}}}
    assert "Means are over 2 seeds." in page(paper, None)


def test_of_several_measures_the_first_is_averaged():
    columns = {"A, accuracy": 70.0, "A, f1": 10.0, "average, accuracy": 80.0, "average, f1": 20.0}
    asked = Entry("A table", measure=["oracle_accuracy", "oracle_f1"], paper={"Ours": columns})
    assert averages(asked, {}) == ("-", "Ours: 80.0")
    assert averages(asked, {"Ours": {**columns, "average, accuracy": 75.0}}) == ("Ours: 75.0", "80.0")


def test_the_page_tells_over_how_many_seeds_means_are(paper, monkeypatch):
    def fit(_: str, *arguments: str) -> dict[Path, dict[str, Any]]:
        seeds = (0, 1, 2) if "--config=experiments/digits" in arguments[:1] else (0,)
        found = [summary(method, "left", seed, 0.25) for seed in seeds for method in ("Mine", f"Of {len(seeds)}")]
        return {Path(str(number)): each for number, each in enumerate(found)}

    monkeypatch.setattr(running, "fit", fit)
    run("mine", "table-1", paper, columns=["A"])
    assert "Means are over 3 seeds." in page(paper, None)
    run("mine", "table-1", paper)  # of "Mine", a column is of one seed now
    assert "Figures are of one seed; of Of 3 over 3." in page(paper, None)


def test_folders_of_a_machine_are_no_part_of_how_figures_were_made(paper, monkeypatch):
    monkeypatch.setattr(running, "fit", lambda *_: {Path("a"): summary("Mine", "written", 0, 0.25)})
    given = [
        "--out",
        "/home/me/out",
        "--columns",
        "A",
        "B",
        "--fit",
        "data.init_args.root=/home/me/mnist",
        "trainer.max_epochs=1",
    ]
    monkeypatch.setattr("sys.argv", ["fedlit", "benchmark", "mine", "table-1", *given])
    run("mine", "table-1", paper, columns=["A"])
    made = json.loads((paper / "mine.json").read_text())["made"]["table-1, A"]["command"]
    assert made == "fedlit benchmark mine table-1 --fit data.init_args.root=mnist trainer.max_epochs=1"


NEEDY = """
paper: Somebody, Somewhere
tables:
  table-1:
    title: Accuracy
    runs:
      - {config: experiments/digits, column: A}
      - {config: [data/office31, methods/fedavg], column: B, needs: Office-31}
      - {config: [data/office31, methods/fedgp], column: C, needs: Office-31}
"""


def test_stand_ins_are_for_runs_of_a_column_whose_data_are_to_be_fetched(paper, tmp_path, monkeypatch):
    (tmp_path / "papers" / "mine.yaml").write_text(NEEDY)
    given = []

    def fitted(folder: str, config: str, *arguments: str) -> dict[Path, dict[str, Any]]:
        given.append(Path(config.removeprefix("--config=")).read_text() + " ".join(arguments))
        return {Path("a"): summary("Mine", "written", 0, 0.25)}

    monkeypatch.setattr(running, "fit", fitted)
    running.run_stand_in("mine", "table-1", paper, columns=["B"])
    assert len(given) == 1
    assert not (paper / "stand_ins.json").exists()  # of one column it is not the table's
    assert "image_size: 32" in given[0]
    assert "--data.init_args.root=" in given[0]
    running.run_stand_in("mine", "table-1", paper)
    assert len(given) == 1 + 2
    with pytest.raises(ArgumentError, match="run it on its data"):
        running.run_stand_in("mine", "table-1", paper, columns=["A"])
    assert "leave --seeds out" in refusal("benchmark", "mine", "table-1", "--stand-in", "--seeds", "0")
    assert "stand_in must be" in refusal("benchmark", "mine", "table-1", "--stand-in", "--columns", "A")


def test_the_page_tells_by_which_arguments_figures_were_made(paper, monkeypatch):
    monkeypatch.setattr(running, "fit", lambda *_: {Path("a"): summary("Mine", "written", 0, 0.25)})
    monkeypatch.setattr("sys.argv", ["fedlit", "benchmark", "mine", "table-1", "--seeds", "0"])
    run("mine", "table-1", paper, columns=["A"])
    assert "These figures were made by `fedlit benchmark mine table-1 --seeds 0`." in page(paper, None)
    monkeypatch.setattr("sys.argv", ["fedlit", "benchmark", "mine", "table-1"])
    run("mine", "table-1", paper, columns=["A"])
    assert "were made by" not in page(paper, None)


def test_a_column_that_is_run_alone_leaves_the_others(paper, monkeypatch):
    monkeypatch.setattr(running, "fit", lambda *_: {Path("a"): summary("Mine", "written", 0, 0.25)})
    run("mine", "table-1", paper, columns=["A"])
    assert list(ours("mine", "table-1", paper, None)["Theirs"]) == ["A"]


def test_measures_are_read_of_a_summary():
    asked = [summary("Mine", "written", 0, 0.25)]
    cells = running._columns(asked, Fit("x", column="A"), ["oracle_accuracy", "megabytes", "seconds_per_round"])
    means = {column: of_row["Mine"]["mean"] for column, of_row in cells.items()}
    assert means == {"A, accuracy": 25.0, "A, megabytes": 3.5, "A, seconds per round": 2.0}


def test_a_row_is_of_the_configured_method_alone():
    words = running._given(Fit("experiments/digits", row="Without", set={"model.init_args.beta": [0.5]}))
    assert words == ["--config=experiments/digits", "--model.init_args.beta=[0.5]", "--compare=null"]
    cells = running._columns([summary("Mine", "a", 0, 0.5)], Fit("x", row="Without", column="A"), ["oracle_accuracy"])
    assert cells["A"]["Without"] == {"mean": 50.0, "std": 0.0}


def test_a_shrunk_configuration_keeps_what_it_is_of():
    given = {
        "seeds": [0, 1, 2],
        "compare": [{"class_path": "A", "trainer": {"max_epochs": 100}, "init_args": {"beta": 0.5}}],
        "data": {"init_args": {"root": "data", "augment": True, "batch_size": 4, "num_workers": 2}},
        "trainer.max_epochs": 60,
    }
    assert shrunk(given) == {
        "seeds": [0],
        "compare": [{"class_path": "A", "trainer": {"max_epochs": 2}, "init_args": {"beta": 0.5}}],
        "data": {"init_args": {"root": "data", "augment": True, "batch_size": 4, "num_workers": 0}},
        "trainer.max_epochs": 2,
    }


# ---------------------------------------------------------------- mistakes


def test_mistakes_are_named(paper, tmp_path):
    with pytest.raises(ArgumentError, match="PAPER must be one of"):
        read("yours")
    assert "TABLE must be one of ['table-1', 'figure-1'], got 'table-9'" in refusal("benchmark", "mine", "table-9")
    assert "nothing to run: nothing is measured" in refusal("benchmark", "mine", "figure-1")
    assert "columns must be of A" in refusal("benchmark", "mine", "table-1", "--columns", "B")
    (tmp_path / "papers" / "wrong.yaml").write_text("paper: x\ntables: {table-1: {title: x, shows: y, colour: red}}")
    with pytest.raises(ArgumentError, match="got 'colour'"):
        read("wrong")
    (tmp_path / "papers" / "wrong.yaml").write_text("paper: x\ntables: {table-1: {title: x}}")
    with pytest.raises(ArgumentError, match="one of runs, from, same and shows"):
        read.__wrapped__("wrong")


def test_arguments_say_nothing_to_a_benchmark_behind_a_table():
    told = refusal("benchmark", "fedgp", "table-12", "--stand-in", "--seeds", "0")
    assert "--stand-in, --seeds says nothing: run fedlit benchmark fedgp --parts noise" in told


def test_a_table_that_cannot_run_keeps_no_others_from_it(paper, tmp_path, monkeypatch, capsys):
    script = "from: {file: x, part: y}, script: x --parts y"
    more = f"  table-2: {{title: Scripted, {script}}}\n  figure-2: {{title: B, same: [mine/table-2, mine/table-1]}}\n"
    (tmp_path / "papers" / "mine.yaml").write_text(MINE + more)
    monkeypatch.setattr(running, "fit", lambda *_: {Path("a"): summary("Mine", "written", 0, 0.25)})
    message = refusal("benchmark", "mine", "figure-2", f"--out={paper}", "--seeds", "0")
    assert "not run, or not whole: mine table-2" in message
    assert "--seeds says nothing: run fedlit benchmark x --parts y" in capsys.readouterr().err
    assert ours("mine", "table-1", paper, None)["Theirs"]["A"]["mean"] == 25.0


def test_a_benchmark_behind_a_table_is_shown_next_to_the_papers_figures(paper, tmp_path, monkeypatch, capsys):
    more = """  table-2:
    title: Scripted
    from: {file: mine_too, part: sizes/kB}
    script: mine_too --parts sizes
    paper: {Theirs: {A: 2.0}}
    rows: {Theirs: Mine}
"""
    (tmp_path / "papers" / "mine.yaml").write_text(MINE + more)
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    script = "import sys, pathlib; out = next(a for a in sys.argv if a.startswith('--out='))\n"
    script += 'pathlib.Path(out[6:]).write_text(\'{"results": {"sizes": {"kB": {"Mine": {"A": 3.5}}}}}\')'
    (folder / "mine_too.py").write_text(script)
    (folder / "mine_too.json").write_text('{"results": {}}')
    monkeypatch.setattr(benchmark, "_folder", lambda: folder)
    main(["benchmark", "mine", "table-2", f"--out={paper}"])
    assert "3.5 (2.0)" in capsys.readouterr().out
    kept = paper / "benchmarks" / "mine_too.json"
    assert json.loads(kept.read_text())["results"]["sizes"]["kB"] == {"Mine": {"A": 3.5}}
    assert "cannot be kept in --out" in refusal("benchmark", "mine", "table-2", f"--out={kept}")


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_files_that_cannot_be_read_or_written_are_told(paper, tmp_path):
    paper.mkdir()
    (paper / "mine.json").write_text('{"results": ')
    assert "cannot be read (Expecting value" in refusal("benchmark", "mine", "table-1", f"--out={paper}")
    (paper / "mine.json").write_bytes(b"\xff\xfe")
    assert "cannot be read ('utf-8' codec" in refusal("benchmark", "mine", "table-1", f"--out={paper}")
    with pytest.raises(ArgumentError, match="a file of figures by table"):
        running.read_results(_written(tmp_path / "odd.json", '{"results": []}'))
    assert "File exists" in refusal("benchmark", "mine", "table-1", f"--out={paper / 'mine.json'}")
    assert "the page cannot be written" in refusal("benchmark", "--page", str(tmp_path))


def test_an_experiment_that_fails_is_told_with_what_it_printed(paper, monkeypatch):
    def fit(*_: str) -> None:
        raise RuntimeError("fedlit fit failed:\nno data here")

    monkeypatch.setattr(running, "fit", fit)
    assert "no data here" in refusal("benchmark", "mine", "table-1", f"--out={paper}")


def test_the_others_run_if_one_fails(paper, monkeypatch):
    def fit(_: str, *arguments: str) -> dict[Path, dict[str, Any]]:
        if "--config=experiments/digits" in arguments[:1]:
            raise RuntimeError("no data here")
        return {Path("a"): summary("Mine", "left", 0, 0.25)}

    monkeypatch.setattr(running, "fit", fit)
    with pytest.raises(RuntimeError, match="1 of 2 experiments failed:\nA: no data here"):
        run("mine", "table-1", paper)
    assert ours("mine", "table-1", paper, None) == {"Theirs": {"L": {"mean": 25.0}}}


def test_the_list_has_the_papers_and_their_state(paper, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    main(["benchmark", "--list"])
    out = capsys.readouterr().out
    assert "mine table-1" in out
    assert "A sketch [nothing to run: nothing is measured]" in out


def test_nothing_is_measured_in_a_sketch():
    assert state(Entry("A sketch", shows="nothing"), {}, None) == "nothing to run: nothing"
    assert state(Entry("A table", runs=[Fit("x")]), {}, {"fits": 2}).startswith("not run on the paper's data; 2 of its")
    assert state(Entry("A table", runs=[Fit("x")]), {}, None) == "not run"
    assert averages(Entry("A table", paper={"Theirs": {"A": "70 ± 2", "B": 80}}), {}) == ("-", "Theirs: 75.0")


def test_a_table_that_is_anothers_is_run_there(paper, tmp_path, monkeypatch, capsys):
    other = "paper: x\ntables: {figure-9: {title: As curves, same: [mine/table-1]}}"
    (tmp_path / "papers" / "other.yaml").write_text(other)
    monkeypatch.setattr(running, "fit", lambda *_: {Path("a"): summary("Mine", "written", 0, 0.25)})
    main(["benchmark", "other", "figure-9", f"--out={paper}", "--columns", "A"])
    assert "25.0 (70.0)" in capsys.readouterr().out
    assert state(read("other").tables["figure-9"], {}, None) == "as mine table-1"
