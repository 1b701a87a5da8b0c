"""The examples as somebody else has them: fedlit as a wheel, in an environment of its own, in a folder of their own."""

from __future__ import annotations

import shutil
import sys
import venv
from pathlib import Path

import pytest

from distributions import PIP, call, no_isolation

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = ["foreign_project", "extension_template"]

pytestmark = pytest.mark.packaging


@pytest.fixture(scope="module")
def environment(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with wheels of fedlit and the examples, which borrows all libraries from this one."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name in NAMES:
        unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        shutil.copytree(EXAMPLES / name, folder / "sources" / name, ignore=unwanted)
    packages = [folder / "sources" / name for name in NAMES]
    call([*PIP, "wheel", "-q", "--no-deps", *no_isolation(), "-w", folder / "wheels", *packages], folder)
    place = folder / "venv"
    venv.create(place, with_pip=False)
    wheels = [*distributions.glob("*.whl"), *sorted((folder / "wheels").glob("*.whl"))]
    call([*PIP, "--python", place / "bin" / "python", "install", "-q", "--no-deps", "--no-index", *wheels], folder)
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
