"""A new user's first hour: what README, tutorials and ``fedlit new`` ask for, from an empty folder, with its times.

Run from the repository root: PYTHONPATH=tests/support python benchmarks/first_hour.py [--wheel FILE] [--only NAME ...]

Each journey starts in an empty folder, with a virtual environment of its own, in which the wheel is installed as the
page says; without ``--wheel`` one is built of HEAD. Then its files are saved and its commands given, in their order and
word for word; the README's names its configuration as it is installed, as there is no clone. Told are seconds of wall
clock and of CPU for each command, and how long the page's words take to read, at WORDS a minute. A command that fails
ends the benchmark.
"""

# ruff: noqa: E402  (what the tests share, which the lines below find)
from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from fedlit.papers.experiments import Results
from pages import PAGES, TUTORIALS, Block, blocks, steps

WORDS = 230
"""Read in a minute."""

KINDS = ("csv", "images", "features")
NAMES = ("README", *(Path(name).stem for name in TUTORIALS), "fedlit new")


@dataclass
class Journey:
    """What was done in a folder that was empty.

    Args:
        folder: Where commands are given.
        environment: Its virtual environment.
        taken: Of each step, what it was and its seconds.
    """

    folder: Path
    environment: Path
    taken: list[dict[str, Any]]

    def give(self, command: str, shown: str | None = None) -> None:
        """Give a shell a command, in the environment once there is one."""
        activate = self.environment / "bin" / "activate"
        inside = "set -euo pipefail\n" + (f". {activate}\n" if activate.exists() else "")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            ["bash", "-c", inside + command],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            sys.exit(f"{command}\nended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        step = {"step": shown or command, "wall_s": round(wall, 1), "cpu_s": round(cpu, 1)}
        self.taken.append(step)
        print(f"  {step['wall_s']:7.1f} s {step['cpu_s']:7.1f} CPU s  {step['step']}", flush=True)

    def install(self, wheel: Path, extras: str = "", besides: str = "") -> None:
        """Make an environment, and install the wheel in it."""
        named = f"'{wheel}{extras}'"
        command = f"python3 -m venv .venv && .venv/bin/pip install --quiet {named} {besides}".strip()
        self.give(command, f"pip install 'fedlit{extras}' {besides}".strip())

    def follow(self, found: list[Block]) -> None:
        """Save and run what a page has."""
        for block in found:
            if block.file is not None:
                (self.folder / block.file).write_text(block.code, encoding="utf-8")
            elif block.language == "python":
                (self.folder / "step.py").write_text(block.code, encoding="utf-8")
                self.give("python step.py", "Python of the page")
            else:
                for command in re.sub(r"\\\n\s*", "", block.code).strip().splitlines():
                    self.give(command)


def extras_of(text: str) -> tuple[str, str]:
    """Extras that a page's command installs, with their brackets, and what it installs besides."""
    found = [re.search(r"pip install 'fedlit(\[[\w,]+\])?'(.*)", block.code) for block in blocks(text)]
    match = next(filter(None, found), None)
    return (match[1] or "", match[2].strip()) if match else ("", "")


def travel(name: str, folder: Path, wheel: Path) -> dict[str, Any]:
    """Do what a page asks for."""
    journey = Journey(folder, folder / ".venv", [])
    if name == "README":
        text = PAGES["README.md"].read_text(encoding="utf-8")
        journey.install(wheel)
        journey.give("fedlit fit --config experiments/first")
    elif name == "fedlit new":
        text = ""
        journey.install(wheel, "[tables]")
        for kind in KINDS:
            journey.folder = folder
            journey.give(f"fedlit new {kind} {kind}")
            journey.folder = folder / kind
            found = (journey.folder / "README.md").read_text(encoding="utf-8")
            journey.follow(steps(found))
            text += found
    else:
        text = PAGES[f"docs/tutorials/{name}.md"].read_text(encoding="utf-8")
        journey.install(wheel, *extras_of(text))
        found = steps(text)
        if all(block.language == "python" for block in found):  # one after the other, in one session
            found = [Block("python", "\n".join(block.code for block in found), "")]
        journey.follow(found)
    words = len(text.split())
    read, wall = words / WORDS, sum(step["wall_s"] for step in journey.taken) / 60
    return {
        "words": words,
        "reading_min": round(read, 1),
        "commands_min": round(wall, 1),
        "minutes": round(read + wall, 1),
        "steps": journey.taken,
    }


def built(place: Path) -> Path:
    """A wheel of HEAD."""
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", str(place)], check=True, capture_output=True)
    (wheel,) = place.glob("*.whl")
    return wheel


def main() -> None:
    """Travel, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=[*NAMES])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    results = Results(options.out, "torch", "lightning", "fedlit")
    with tempfile.TemporaryDirectory() as place:
        wheel = options.wheel.resolve() if options.wheel else built(Path(place, "wheel"))
        for name in options.only:
            print(name, flush=True)
            folder = Path(place, "folder")
            folder.mkdir()
            results.keep(travel(name, folder, wheel), name)
            shutil.rmtree(folder)
    for name in options.only:
        found = results.found[name]
        print(f"{name:20s} {found['reading_min']:5.1f} min of reading, {found['commands_min']:5.1f} of commands")


if __name__ == "__main__":
    main()
