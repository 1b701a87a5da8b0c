"""Pages as a reader takes them: their Python, commands and tutorials work; tables are those of the benchmarks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning import Trainer
from PIL import Image

import processes
import tables
from fedlit import methods
from fedlit.cli import main
from fedlit.cli.command import COMMANDS
from pages import PAGES, ROOT, TUTORIALS, Block, blocks, steps


def blocks_of(name: str) -> list[Block]:
    """Of a page."""
    return blocks(PAGES[name].read_text(encoding="utf-8"))


def commands(name: str) -> list[list[str]]:
    """The words of each command of fedlit in a page, without comments, variables in front and what follows."""
    found = []
    for block in blocks_of(name):
        if block.language not in ("", "bash"):
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|;|\|", re.sub(r"(?<=\s)#.*|^#.*", "", line)):
                words = shlex.split(part) if re.search(r"(^|[\s/])fedlit\s", part) else []
                places = [place for place, word in enumerate(words) if Path(word).name == "fedlit"]
                if places and "pip" not in words[: places[0]] and len(words) > places[0] + 1:
                    found.append(words[places[0] + 1 :])
    return found


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].read_text(encoding="utf-8").splitlines()) <= 160


def run_shortly(code: str, folder: Path) -> None:
    """In a process of its own: a page's Python, of whose rounds there are three at most."""
    os.chdir(folder)
    start = Trainer.__init__

    def short(self: Trainer, *, max_epochs: int, **given: Any) -> None:
        start(self, max_epochs=min(max_epochs, 3), **given)

    Trainer.__init__ = short  # type: ignore[method-assign]
    exec(compile(code, "page", "exec"), {"__name__": "__main__"})


WITH_PYTHON = (
    "README.md", "docs/concepts.md", "docs/export.md", "docs/privacy.md", "docs/starts/lightning.md",
    "docs/starts/researcher.md",
)  # fmt: skip
"""Pages whose blocks of Python run one after the other; those of tutorials may have files between."""


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [*WITH_PYTHON, "docs/tutorials/lightning.md"])
def test_python_runs(name: str, tmp_path: Path) -> None:
    """A page's blocks one after the other; those of tutorials with files between are run elsewhere."""
    code = [block.code for block in blocks_of(name) if block.language == "python"]
    assert code
    processes.results(run_shortly, "\n".join(code), tmp_path)


def test_no_other_page_has_python() -> None:
    found = {name for name in PAGES if any(block.language == "python" for block in blocks_of(name))}
    assert found - set(TUTORIALS) == set(WITH_PYTHON)


def test_yaml_of_pages_is_read() -> None:
    read = 0
    for name in PAGES:
        for block in blocks_of(name):
            if block.language == "yaml":
                one_by_one = block.code.startswith("privacy: ")  # ways to say the same, each a line
                for text in block.code.splitlines() if one_by_one else [block.code]:
                    assert isinstance(yaml.safe_load(text), dict), text
                    read += 1
    assert read >= 8


def test_commands_of_pages_are_found() -> None:
    found = [words for name in PAGES for words in commands(name)]
    assert len(found) > 40
    assert {words[0] for words in found} >= {"fit", "features", "predict", "export", "report", "list", "serve", "join"}
    assert ["fit", "--model.help", "FedProx"] in found


def test_commands_of_pages_are_fedlits() -> None:
    """Each subcommand is there, and so is each configuration that a command takes from the package."""
    for words in (words for name in PAGES for words in commands(name)):
        assert words[0] in (*COMMANDS, "fit", "validate", "test", "predict"), words
        given = [each.removeprefix("--config=") for each in words if each.startswith("--config=")]
        given += [words[place + 1] for place, word in enumerate(words) if word == "--config"]
        for config in given:
            shipped = config.removeprefix("configs/").removesuffix(".yaml")
            if "/" in shipped and "_DIR" not in shipped and not shipped.startswith(("runs/", "WORKSPACE")):
                assert (ROOT / "configs" / f"{shipped}.yaml").is_file(), config


@pytest.mark.parametrize("command", ["fit", "features", "export", "report", "certificates", "flare"])
def test_options_of_commands_in_pages_are_in_their_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Options without a point, and the Trainer's; those of data and model are of classes, and tutorials run them."""
    with pytest.raises(SystemExit):
        main([command, "--help=all"])
    shown = capsys.readouterr().out
    listed = set(re.findall(r"--[\w.]+", shown))
    used = {
        word.partition("=")[0].rstrip("+")
        for name in PAGES
        for words in commands(name)
        if words[0] == command
        for word in words[1:]
        if word.startswith("--")
    }
    plain = {word for word in used if "." not in word}
    assert plain or command == "report", "no page has it with an option"
    assert plain - listed == set()
    settings = {word for word in used if word.startswith("--trainer.")} if command == "fit" else set()
    assert {word for word in settings if not word.startswith("--trainer.strategy")} - listed == set()


def test_links_lead_to_files_and_headings() -> None:
    """Of the README; those of docs/ are checked when the site is built."""
    text = PAGES["README.md"].read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!\w+:)([^)#\s]+)(?:#([^)\s]*))?\)", text)
    assert len(links) > 15
    for path, anchor in links:
        assert (ROOT / path).exists(), path
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(encoding="utf-8"), re.M) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_pages_start_with_what_the_reader_gets() -> None:
    for name, page in PAGES.items():
        if name.startswith("docs/") and "/api/" not in name and name not in ("docs/index.md", *OLDER):
            assert page.read_text(encoding="utf-8").split("\n\n")[1].startswith("What you get here: "), name


OLDER = ("docs/across.md", "docs/flare.md", "docs/sweeps.md")
"""Their first paragraph says what they are for in words of its own."""


def test_the_picture_is_drawn_from_the_results() -> None:
    spec = importlib.util.spec_from_file_location("gain", ROOT / "docs" / "scripts" / "gain.py")
    assert spec is not None
    assert spec.loader is not None
    gain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gain)
    with Image.open(gain.PICTURE) as picture:
        drawn = json.loads(picture.info["Description"])
    assert drawn == gain.figures(), "run `python docs/scripts/gain.py`"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TUTORIALS if name != "docs/tutorials/lightning.md"])
def test_a_tutorial_works_in_an_empty_folder(name: str, tmp_path: Path) -> None:
    for library in ("onnxruntime", "onnx", "pandas", "efficientnet_lite_pytorch"):
        pytest.importorskip(library)
    place = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": place, "OMP_NUM_THREADS": "1"}
    ran = 0
    for block in steps(PAGES[name].read_text(encoding="utf-8")):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.code, encoding="utf-8")
            continue
        command = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
        done = subprocess.run(
            [*command, block.code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, block.code + done.stdout + done.stderr
        ran += 1
    assert ran >= 6
    assert (tmp_path / "report.html").is_file()


TEXT = "\n".join(page.read_text() for page in tables.PAGES)


def test_every_table_is_there_as_the_results_have_it_and_no_other() -> None:
    marked = re.findall(r"^<!-- table: (\S+) -->$", TEXT, re.MULTILINE)
    assert sorted(marked) == sorted(f"{name}/{table}" for name, found in tables.TABLES.items() for table in found)
    for name, found in tables.TABLES.items():
        for table, make in found.items():
            assert f"<!-- table: {name}/{table} -->\n{make(tables.results_of(name))}\n" in TEXT, (name, table)
    assert tables.with_tables(TEXT) == TEXT


def test_newer_figures_take_the_place_of_the_repositorys() -> None:
    kept = {"a": {"x": {"mean": 1.0, "std": 0.1, "by_seed": {"0": 1.0}}, "y": {"mean": 2.0, "std": 0.2}}}
    newer = {"a": {"x": {"mean": 3.0, "std": 0.3}}, "b": 4}
    assert tables.merged(kept, newer) == {"a": {"x": {"mean": 3.0, "std": 0.3}, "y": kept["a"]["y"]}, "b": 4}


@pytest.mark.parametrize(
    ("figure", "shares", "mark"),
    [
        ({"mean": 10.0, "std": 0.0, "by_seed": {"0": 10.0, "1": 10.0, "2": 10.0}}, (10.0,), " † 3/3"),
        ({"mean": 18.3, "std": 14.3, "by_seed": {"0": 10.0, "1": 34.78, "2": 10.0}}, (10.0,), " † 2/3"),
        # of a class with most of the samples one seed may be as accurate by coincidence, and all of them not
        ({"mean": 93.3, "std": 0.7, "by_seed": {"0": 92.86, "1": 93.0}}, (92.86, 7.14), ""),
        ({"mean": 92.9, "std": 0.0, "by_seed": {"0": 92.86, "1": 92.86}}, (92.86, 7.14), " † 2/2"),
        ({"mean": 10.0, "std": 0.0}, (10.0,), " †"),
        ({"mean": 10.0, "std": 0.4}, (10.0,), ""),
    ],
)
def test_a_figure_of_models_that_name_one_class_is_marked(
    figure: dict[str, Any], shares: tuple[float, ...], mark: str
) -> None:
    assert tables.cell(figure, shares) == f"{figure['mean']:.1f} ± {figure['std']:.1f}{mark}"


def test_each_method_has_a_figure_and_says_whose_it_is_compared_with() -> None:
    shown = {name.split(",")[0].split("(")[0] for name, *_ in tables.HEADLINES}
    assert shown == set(methods.__all__)
    assert all(bool(where) == (printed is not None) for *_, printed, where in tables.HEADLINES)
