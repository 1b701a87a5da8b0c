"""What a release is made of: one version everywhere, the lowest versions of all libraries, wheel and sdist."""

from __future__ import annotations

import email
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from distributions import FOLDERS, LEFT_BEHIND, PIP, ROOT, call

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION: str = PROJECT["version"]

# ---------------------------------------------------------------- what is written down


def test_changelog_and_citation_are_of_this_version() -> None:
    titles = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    released = [title.split(" - ") for title in titles if title != "Unreleased"]
    assert titles[0] == "Unreleased"
    assert released[0][0] == VERSION
    numbers = [tuple(map(int, version.split("."))) for version, _ in released]
    assert numbers == sorted(numbers, reverse=True)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == VERSION
    assert [citation["date-released"].isoformat()] == released[0][1:]
    assert PROJECT["license"].split(" AND ")[0] == citation["license"]


def test_every_library_has_a_lowest_version() -> None:
    """Which `.ci/versions` installs; what only develops fedlit may be of any."""
    extras = PROJECT["optional-dependencies"].items()
    named = [
        *PROJECT["dependencies"],
        *(line for extra, lines in extras if extra not in ("all", "dev", "docs") for line in lines),
    ]
    assert len(named) > 25
    assert [line for line in named if not re.match(r"[\w-]+(\[\w+\])?>=\d[\d.]*\d(,<\d+)?$", line)] == []


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="clones the repository")
def test_the_default_tests_pass_with_the_lowest_versions() -> None:
    """Twenty minutes, and 6 GB that are given back; with the newest ones `.ci/run` passes them."""
    done = subprocess.run(["bash", ROOT / ".ci" / "versions", "lowest"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "all tests passed: lowest" in done.stdout


def test_old_names_go_in_a_version_to_come() -> None:
    """A release that would still have them is not one to make."""
    minor = tuple(map(int, VERSION.split(".")[:2]))
    named = {
        (path.name, int(one), int(two))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for one, two in re.findall(r"fedlit (\d+)\.(\d+) (?:takes|has) the new", path.read_text(encoding="utf-8"))
    }
    assert [(name, *version) for name, *version in named if tuple(version) <= minor] == []


# ---------------------------------------------------------------- what is built


def tracked() -> set[PurePosixPath]:
    """Files of the package in this checkout, but for those that git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", *FOLDERS]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout: what belongs to the package cannot be told from what lies in its folders")
    return {PurePosixPath(line) for line in listing.stdout.splitlines() if (ROOT / line).exists()}


def contents(distributions: Path) -> tuple[set[PurePosixPath], set[PurePosixPath]]:
    """Files in the wheel, and in the sdist from its folder on."""
    (wheel,), (sdist,) = distributions.glob("*.whl"), distributions.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        wheels = {PurePosixPath(name) for name in file.namelist()}
    with tarfile.open(sdist) as archive:
        members = [PurePosixPath(member.name) for member in archive if member.isfile()]
    assert {path.parts[0] for path in members} == {f"fedlit-{VERSION}"}
    return wheels, {path.relative_to(f"fedlit-{VERSION}") for path in members}


@pytest.mark.packaging
def test_an_index_would_take_both(distributions: Path) -> None:
    names = {path.name for path in distributions.iterdir()}
    assert names == {f"fedlit-{VERSION}-py3-none-any.whl", f"fedlit-{VERSION}.tar.gz"}
    printed = call(
        [sys.executable, "-m", "twine", "check", "--strict", *sorted(distributions.iterdir())], distributions
    )
    assert printed.count("PASSED") == 2, printed


@pytest.mark.packaging
def test_the_wheel_has_the_files_of_the_package_and_no_others(distributions: Path) -> None:
    wheel, sdist = contents(distributions)
    ours = tracked()
    record = PurePosixPath(f"fedlit-{VERSION}.dist-info")
    installed = {path if path.parts[0] == "fedlit" else "fedlit" / path for path in ours}
    assert {path for path in wheel if path.parts[0] != record.name} == installed
    licences = [PurePosixPath("LICENSE"), PurePosixPath("fedlit/data/heart_disease_uci.LICENSE.txt")]
    assert all(record / "licenses" / path in wheel for path in licences)
    beside = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "MANIFEST.in"}
    made = {"PKG-INFO", "setup.cfg"}
    assert {path for path in sdist if path.parts[0] != "fedlit.egg-info"} == ours | {*map(PurePosixPath, beside | made)}
    assert not {PurePosixPath(name) for name in LEFT_BEHIND} & (wheel | sdist)


@pytest.mark.packaging
def test_the_wheel_is_installed_where_there_is_nothing_else(distributions: Path, tmp_path: Path) -> None:
    """Without a single library: what it asks for, its version, its files, and what `import fedlit` needs."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (wheel,) = distributions.glob("*.whl")
    call([*PIP, "--python", python, "install", "-q", "--no-deps", "--no-index", wheel], tmp_path)
    code = """
import fedlit, fedlit.configs
from importlib.metadata import metadata
from importlib.resources import files
configuration = files("fedlit.configs") / "experiments" / "first.yaml"
table = files("fedlit") / "data" / "heart_disease_uci.csv"
print(fedlit.__version__, configuration.is_file(), table.is_file())
print(metadata("fedlit"))
"""
    first, told = call([python, "-c", code], tmp_path).split("\n", 1)
    assert first == f"{VERSION} True True"
    says = email.message_from_string(told)
    required = {re.sub(r"\s", "", line) for line in says.get_all("Requires-Dist", [])}
    assert {line for line in required if "extra==" not in line} == {
        re.sub(r"(>=[\d.]+),(<\d+)", r"\2,\1", line) for line in PROJECT["dependencies"]
    }
    assert set(says.get_all("Provides-Extra", [])) == {*PROJECT["optional-dependencies"]}
    assert says["License-Expression"] == PROJECT["license"]
    assert says["Requires-Python"] == PROJECT["requires-python"]
    assert (tmp_path / "venv" / "bin" / "fedlit").is_file()


@pytest.mark.packaging
def test_the_wheel_runs_a_table_of_a_paper_without_a_clone(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "installed")
    command = [sys.executable, "-m", "fedlit.cli", "benchmark"]

    def printed(*arguments: str) -> str:
        return call([*command, *arguments], tmp_path, PYTHONPATH=str(tmp_path / "installed"))

    listed = {line.partition("  ")[0] for line in printed("--list").splitlines()}
    assert {"fedgp", "rf_tca", "fedgp table-17", "fed_dadil figure-3b"} <= listed
    assert not {"across", "gpu"} & listed  # which need a clone
    assert "layout" in printed("fedgp", "table-8", "--stand-in")
    ran = json.loads((tmp_path / "papers" / "stand_ins.json").read_text())["results"]["fedgp"]
    assert ran["table-8"]["methods"] == ["FedDA", "FedGP"]
    printed("--page", "papers.md")
    assert (tmp_path / "papers.md").read_text().startswith("# The papers")
