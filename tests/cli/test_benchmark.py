"""``fedlit benchmark``: what it lists, runs and compares, on a small repository made for the test."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest

from commands import refusal
from fedlit.cli import main
from fedlit.cli.benchmark import Figure, comparison, figures

ROOT = Path(__file__).parents[2]

SCRIPT = '''"""Throws dice.

More of it.
"""
import argparse, json
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--shift", type=float, default=0.0)
parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
options = parser.parse_args()
assert options.shift >= 0, "no negative shift"
sure = {"mean": 50.0 + options.shift, "std": 1.0}
results = {"dice": {"six": sure, "seconds": 3.0}, "new": {"mean": 1.0, "std": 0.0}}
options.out.write_text(json.dumps({"results": results}))
print("thrown")
'''


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "clone" / "benchmarks"
    folder.mkdir(parents=True)
    (tmp_path / "clone" / "fedlit").mkdir()
    (folder / "tables.py").write_text('"""Shared."""')
    (folder / "dice.py").write_text(SCRIPT)
    (folder / "dice.json").write_text(json.dumps({"results": {"dice": {"six": {"mean": 49.0, "std": 0.5}}}}))
    monkeypatch.chdir(folder)
    return folder


def test_the_repository_lists_every_benchmark_with_results(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    main(["benchmark"])
    listed = {line.split()[0] for line in capsys.readouterr().out.partition("\n\n")[0].splitlines()}
    assert listed == {path.stem for path in (ROOT / "benchmarks").glob("*.json")}


@pytest.mark.parametrize(("shift", "verdicts"), [("0.5", ["yes", "1 of 1"]), ("0.6", ["no", "0 of 1"])])
def test_compares_with_what_the_repository_has_and_leaves_it(clone, capfd, shift, verdicts):
    kept = (clone / "dice.json").read_text()
    main(["benchmark", "dice", "--shift", shift])
    printed = capfd.readouterr().out
    assert "thrown" in printed
    row = next(line for line in printed.splitlines() if "dice, six" in line)
    assert "49.0 ± 0.5" in row
    assert f"{50 + float(shift):.1f} ± 1.0" in row
    assert verdicts[0] in row
    assert f"{verdicts[1]} within the spread" in printed
    assert "new" in next(line for line in printed.splitlines() if "1.0 ± 0.0" in line)
    assert (clone / "dice.json").read_text() == kept


def test_a_benchmark_that_fails_ends_the_command(clone):
    with pytest.raises(SystemExit) as caught:
        main(["benchmark", "dice", "--shift", "-1"])
    assert caught.value.code == 1


def test_mistakes_are_told_by_name(clone, monkeypatch, tmp_path):
    assert "name must be one of dice, or a paper with one of its tables, got 'cards'" in refusal("benchmark", "cards")
    assert "--out is not for fedlit benchmark" in refusal("benchmark", "dice", "--out=x.json")


def test_figures_are_those_with_a_spread():
    results = {
        "a": {"b": {"mean": 1, "std": 0.5, "paper": 2}, "seconds": 4},
        "c": [1, 2],
        "d": {"mean": None, "std": 0},
    }
    assert list(figures(results)) == [Figure(("a", "b"), 1.0, 0.5)]
    assert "no figures with a spread" in str(comparison([], []))


SCRIPTS = {path.stem: path for path in sorted((ROOT / "benchmarks").glob("*.py"))}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_benchmark_imports_is_there(name):
    """Also when it is run by itself, without the folders of other code that pytest finds."""
    text = SCRIPTS[name].read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        wanted = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        for module in [node.module] if isinstance(node, ast.ImportFrom) else wanted:
            root = str(module).partition(".")[0]
            if root in SCRIPTS:
                there = ast.parse(SCRIPTS[root].read_text(encoding="utf-8")).body
                named = {each.name for each in there if hasattr(each, "name")}
                named |= {each.id for line in there for each in ast.walk(line) if isinstance(each, ast.Name)}
                assert isinstance(node, ast.Import) or set(wanted) <= named, (module, wanted)
            elif (ROOT / "tests" / "support" / f"{root}.py").is_file():
                assert '"tests"' in text, root
            else:
                assert root in {"tenseal", "phe", "nvflare", "flwr", "pfl", "ray"} or importlib.util.find_spec(root), (
                    root
                )
