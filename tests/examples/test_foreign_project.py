"""The examples as somebody else has them: fedlit as a wheel, in an environment of its own, in a folder of their own."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = ["foreign_project", "extension_template"]

pytestmark = pytest.mark.packaging


def call(command: Sequence[str | Path], folder: Path) -> str:
    """What a command prints; nothing of this checkout lends it a package."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PL_", "PYTEST"))}
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with wheels of fedlit and the examples, which borrows all libraries from this one."""
    folder = tmp_path_factory.mktemp("elsewhere")
    sources = folder / "sources"
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("fedlit", "callbacks", "privacy", "configs"):
        shutil.copytree(ROOT / name, sources / "fedlit" / name, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources / "fedlit")
    for name in NAMES:
        shutil.copytree(EXAMPLES / name, sources / name, ignore=unwanted)
    # where it is too old here, pip fetches the one that pyproject.toml asks for
    recent = int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    isolation = ["--no-build-isolation"] if recent else []
    packages = [sources / name for name in ("fedlit", *NAMES)]
    call([*pip, "wheel", "-q", "--no-deps", *isolation, "-w", folder / "wheels", *packages], folder)
    place = folder / "venv"
    venv.create(place, with_pip=False)
    wheels = sorted((folder / "wheels").glob("*.whl"))
    call([*pip, "--python", place / "bin" / "python", "install", "-q", "--no-deps", "--no-index", *wheels], folder)
    (site,) = place.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed))  # comes after what is installed there itself
    return place


LIST = """
import sys
from fedlit.cli import main
import plant_monitor.federated
main(["list"])
names = [name for name in sys.modules if name.split(".")[0] in ("fedlit", "fedlit_extension", "plant_monitor")]
print(*(sys.modules[name].__file__ for name in names), sep="\\n")
"""
"""Prints what there is, and from where it was imported."""


def test_the_template_is_listed_with_its_distribution_and_all_are_the_wheels(environment: Path, tmp_path: Path) -> None:
    printed = call([environment / "bin" / "python", "-c", LIST], tmp_path).splitlines()
    for name in ("FedEntropy", "Int16", "Moons", "Confidence"):
        (line,) = [line for line in printed if f" {name} " in line]
        assert "from fedlit-extension" in line
    assert not any("left out" in line for line in printed)
    files = [line for line in printed if line.endswith(".py")]
    for module in ("fedlit/__init__", "fedlit/privacy/base", "fedlit/callbacks/shared", "plant_monitor/federated"):
        assert any(file.endswith(f"site-packages/{module}.py") for file in files), module
    assert all(Path(file).is_relative_to(environment) for file in files), files


def test_the_examples_pass_their_own_tests(environment: Path, tmp_path: Path) -> None:
    for name in NAMES:
        shutil.copytree(EXAMPLES / name, tmp_path / name)
    printed = call([environment / "bin" / "python", "-m", "pytest", "-q", *NAMES], tmp_path)
    assert int(printed.split(" passed")[0].split()[-1]) > 15
    assert "skipped" not in printed


def test_the_template_trains_by_short_names(environment: Path, tmp_path: Path) -> None:
    """Word for word what its README says, for two rounds."""
    text = (EXAMPLES / "extension_template" / "README.md").read_text(encoding="utf-8")
    command = text.split("fedlit fit ")[1].split("```")[0].replace("\\\n", " ").split()
    assert {"FedEntropy", "Moons", "Int16", "Confidence"} <= set(command)
    call([environment / "bin" / "fedlit", "fit", *command, "--trainer.max_epochs", "2"], tmp_path)
    (run,) = tmp_path.glob("runs/FedEntropy/version_0")
    assert "validator/confidence" in (run / "metrics.csv").read_text()
    assert "class_path: fedlit_extension.privacy.Int16" in (run / "config.yaml").read_text()
