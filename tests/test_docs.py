"""The docstring is the manual: jsonargparse prints the class docstring's Args as ``--help``, so it must be complete."""

from __future__ import annotations

import dataclasses
import doctest
import enum
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlit.methods

ROOT = Path(__file__).resolve().parents[1]

MODULES = [
    "fedlit",
    "fedlit.callbacks",
    "fedlit.data",
    "fedlit.export",
    "fedlit.federation",
    "fedlit.functional",
    "fedlit.methods",
    "fedlit.models",
    "fedlit.privacy",
    "fedlit.shallow",
]


def documented(doc: str | None, *sections: str) -> set[str]:
    """Names described under ``sections`` of a Google docstring."""
    names: set[str] = set()
    inside, indent = False, 0
    for line in inspect.cleandoc(doc or "").splitlines():
        depth = len(line) - len(line.lstrip())
        if line and depth == 0:
            inside, indent = line.rstrip(":") in sections and line.endswith(":"), 0
        elif inside and line.strip():
            indent = indent or depth
            entry = re.match(r"\*{0,2}(\w+)( \(.*?\))?:", line.strip())
            if depth == indent and entry:
                names.add(entry.group(1))
    return names


def parameters(thing: Any, variadic: bool = False) -> set[str]:
    """Names of parameters; those of ``*args`` and ``**kwargs`` may be described but need not be."""
    try:
        signature = inspect.signature(thing)
    except ValueError:  # some built-in bases have none
        return set()
    stars = () if variadic else (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name for name, parameter in signature.parameters.items() if parameter.kind not in stars}


def problems(name: str, thing: Any) -> list[str]:
    """Errors in the docstring of a public class or function."""
    doc = thing.__doc__
    # dataclasses and named tuples without a docstring get their signature as one
    if not doc or doc.startswith(f"{name}("):
        return [f"{name} has no docstring"]
    if not isinstance(thing, type):
        described = documented(doc, "Args")
        missing, invented = parameters(thing) - described, described - parameters(thing, variadic=True)
    elif issubclass(thing, enum.Enum):
        return []
    else:
        family = [cls for cls in thing.__mro__ if cls.__module__.split(".")[0] == thing.__module__.split(".")[0]]
        record = dataclasses.is_dataclass(thing) or issubclass(thing, tuple)
        sections = ("Args", "Attributes") if record else ("Args",)
        described = set().union(*(documented(cls.__doc__, *sections) for cls in family))
        accepted = set().union(*(parameters(cls, variadic=True) for cls in family))
        missing, invented = parameters(thing) - described, documented(doc, "Args") - accepted
    found = [f"{name} does not describe {parameter!r} in its Args" for parameter in sorted(missing)]
    return found + [f"{name} describes {parameter!r}, which it does not take" for parameter in sorted(invented)]


def public(module: str) -> dict[str, Any]:
    """Classes and functions in the module's ``__all__``; constants and type aliases have no docstring."""
    package = importlib.import_module(module)
    things = {name: getattr(package, name) for name in package.__all__}
    return {name: thing for name, thing in things.items() if isinstance(thing, type) or inspect.isroutine(thing)}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_parameter_is_described(module: str) -> None:
    found = [problem for name, thing in public(module).items() for problem in problems(name, thing)]
    assert not found, "\n".join(found)


class Base:
    """A base.

    Args:
        shared: Described here,
            over two lines: with a colon.
    """

    def __init__(self, shared: int) -> None:
        self.shared = shared


def test_the_checker_finds_missing_and_invented_parameters() -> None:
    class Child(Base):
        """A child.

        Args:
            own: Described.
            gone: Renamed long ago.
            **kwargs: May be described, need not be.
        """

        def __init__(self, shared: int, own: int, forgotten: int, **kwargs: int) -> None:
            super().__init__(shared)

    @dataclasses.dataclass
    class Record:
        x: int

    assert problems("Base", Base) == []
    missing, invented = problems("Child", Child)
    assert missing == "Child does not describe 'forgotten' in its Args"
    assert invented == "Child describes 'gone', which it does not take"
    assert problems("Record", Record) == ["Record has no docstring"]
    assert problems("X", Record) == ["X does not describe 'x' in its Args"]


def test_tests_that_pages_name_are_there() -> None:
    pages = (ROOT / "README.md", ROOT / ".github" / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    named = [
        (page, path, name)
        for page in pages
        for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8"))
    ]
    assert len(named) > 80
    every = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    known = {*re.findall(r"^def (test_\w+)\(", every, re.MULTILINE)}
    alone = [
        (page.name, name)
        for page in pages
        for name in re.findall(r"`(test_\w+_\w+_\w+)`", page.read_text(encoding="utf-8"))
    ]
    assert len(alone) > 50
    assert not [(page, name) for page, name in alone if name not in known]
    for page, path, name in named:
        assert (ROOT / path).is_file(), f"{page.name} names {path}"
        code = (ROOT / path).read_text(encoding="utf-8")
        assert not name or re.search(rf"^def {name}\(", code, re.MULTILINE), f"{page.name} names {path}::{name}"


def submodules(package: str) -> list[str]:
    """A package and all modules in it."""
    path = getattr(importlib.import_module(package), "__path__", [])
    return [package, *(module.name for module in pkgutil.iter_modules(path, f"{package}."))]


@pytest.mark.packaging
def test_examples_in_docstrings_are_right() -> None:
    attempted = 0
    for name in dict.fromkeys(module for package in MODULES for module in submodules(package)):
        found = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch}, report=True)
        assert found.failed == 0, name
        attempted += found.attempted
    assert attempted >= 15


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a link or an anchor that leads nowhere, and a page that no other leads to, are errors."""
    for library in ("sphinx", "myst_parser", "furo", "latex2mathml"):
        pytest.importorskip(library)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.packaging
def test_the_api_has_all_public_names(site: Path) -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (site / "docs" / "api").glob("*.html"))
    there = set(re.findall(r'id="([\w.]+)"', pages))
    assert {"fedlit.module.FederatedModule", "fedlit.strategy.FederatedStrategy"} <= there
    homes = [module for module in MODULES if module != "fedlit"]  # which only leads there
    things = {f"{module}.{name}": thing for module in homes for name, thing in public(module).items()}
    assert len(things) > 150
    # a function may be called like its file, which is what its name leads to then
    shown = {id(each) for name, each in things.items() if {name, f"{each.__module__}.{each.__name__}"} & there}
    assert [name for name, thing in things.items() if id(thing) not in shown] == [], "on no page"


@pytest.mark.packaging
def test_pages_need_nothing_from_elsewhere_and_have_formulas(site: Path) -> None:
    formulas = 0
    for path in site.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=[\"']?(\w+:)?//", page)
        assert not loaded, path
        assert not re.search(r":(?:math|class|func|meth|mod):`|\.\. math::|system-message", page), path
        formulas += page.count("<math")
    assert formulas > 100


@pytest.mark.packaging
def test_every_method_has_a_page_with_what_it_sends_and_where_it_departs_from_its_paper(site: Path) -> None:
    for name in fedlit.methods.__all__:
        page = (site / "docs" / "methods" / f"{name}.html").read_text(encoding="utf-8")
        for title in ("What is sent, and who learns it", "Definition and arguments", "where this departs from it"):
            assert title in page, name
    page = (site / "docs" / "methods" / "FedGP.html").read_text(encoding="utf-8")
    assert "Definition 4.3" in page
    assert "target_update" in page
    assert "def on_round_end" in re.sub(r"<[^>]+>", "", page)


@pytest.mark.packaging
def test_the_sidebar_has_every_page(site: Path) -> None:
    start = (site / "docs" / "index.html").read_text(encoding="utf-8")
    sidebar = {link.partition("#")[0] for link in re.findall(r'class="reference internal" href="([^"]+)"', start)}
    pages = {path.relative_to(site / "docs").as_posix() for path in (site / "docs").rglob("*.html")} - {"index.html"}
    assert pages <= sidebar, sorted(pages - sidebar)


def test_the_checklists_name_files_and_tables_that_are_there() -> None:
    text = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files = {name for name in re.findall(r"`([\w./]+/[\w./]+)`", text) if "NAME" not in name}
    assert len(files) > 20
    assert {name for name in files if not (ROOT / name).exists()} == set()
    tables = set(re.findall(r"`([A-Z_]{5,})`", text))
    assert {"ARGUMENTS", "BACKENDS", "PAPERS"} <= tables
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    code += (ROOT / "callbacks" / "validators.py").read_text(encoding="utf-8")
    assert {name for name in tables if not re.search(rf"^{name}\b.*=", code, re.MULTILINE)} == set()
