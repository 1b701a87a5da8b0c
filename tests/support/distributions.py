"""Sdist and wheel of this checkout, as they would be released, and commands that nothing of it lends a package."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")

FOLDERS = ("fedlit", "benchmarks", "callbacks", "privacy", "configs")
"""Those that the package is made of."""

LEFT_BEHIND = (
    *("fedlit/data/patients.csv", "fedlit/data/notes.txt", "configs/.DS_Store", "callbacks/old.py.orig"),
    *("fedlit/last.ckpt", "tests/test_mine.py", "examples/hospitals/sites/here/here.csv", "runs/version_0/metrics.csv"),
)
"""What lies in a working tree and is nobody else's business; the first one most of all."""


def call(command: Sequence[str | Path], folder: Path, **environment: str) -> str:
    """What a command prints; nothing of this checkout lends it a package."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PL_", "PYTEST"))}
    kept |= environment
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def no_isolation() -> list[str]:
    """The option to build with the setuptools that is here; where it is too old, pip fetches a newer one."""
    recent = int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    return ["--no-build-isolation"] if recent else []


def build(folder: Path) -> Path:
    """Build both from a copy of this checkout in which something was left behind; the folder that they are in."""
    sources = folder / "fedlit"
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, sources / name, ignore=unwanted)
    for path in ROOT.glob("*"):
        if path.is_file():
            shutil.copy(path, sources)
    for name in LEFT_BEHIND:
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text("mine\n")
    isolation = [option.replace("build-", "") for option in no_isolation()]
    call([sys.executable, "-m", "build", *isolation, "--outdir", folder / "dist", sources], folder)
    return folder / "dist"
