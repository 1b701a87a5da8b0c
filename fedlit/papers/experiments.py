"""Experiments as subprocesses, and what their runs come to, for the benchmarks of accuracies."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from threading import RLock
from typing import Any

CONFIGS = Path(str(files("fedlit.configs")))
"""Folder of the installed configurations."""


def fit(folder: str, *arguments: str) -> dict[Path, dict[str, Any]]:
    """Summaries of all runs of one ``fedlit fit``, by the folder that a run left its files in.

    Args:
        folder: Where they are written.
        arguments: Of the command.

    Raises:
        RuntimeError: If it fails; with the end of what it printed.
    """
    command = [sys.executable, "-m", "fedlit.cli", "fit", *arguments]
    command.append(f"--trainer.default_root_dir={folder}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return {path.parent: json.loads(path.read_text()) for path in sorted(Path(folder).rglob("summary.json"))}


class Results:
    """What a benchmark has found, in a JSON file that is written after each piece; what is not run again stays.

    "made" tells of each piece by which command and with which versions.

    Args:
        out: The file.
        libraries: Whose versions are told.
        more: Other facts to tell.
    """

    def __init__(self, out: Path, *libraries: str, **more: object) -> None:
        self.out = out
        there = json.loads(out.read_text()) if out.exists() else {}
        self.found: dict[str, Any] = there.get("results", {})
        self.made: dict[str, Any] = there.get("made", {})
        self.lock = RLock()
        program = Path(sys.argv[0]).name
        is_script = program.endswith(".py") and program != "__main__.py"
        command = f"python benchmarks/{program}" if is_script else "fedlit"
        self.facts = {"command": command, "cores": os.cpu_count(), **more}
        if "versions" in there:
            self.facts["versions"] = there["versions"]  # of pieces from before each told its own
        given = sys.argv[1:]
        for option in ("--out", "--folder", "--jobs", "--columns"):  # pieces have the columns' names
            if option in given:
                first = given.index(option)
                following = (place for place in range(first + 1, len(given)) if given[place].startswith("--"))
                del given[first : next(following, len(given))]
        given = [_without_folders(each) for each in given]
        self.now = {
            "command": f"{self.facts['command']} {shlex.join(given)}".strip(),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in libraries}},
        }

    def keep(self, value: object, part: str, name: str | None = None) -> None:
        """Put a part, or one piece of it, in place of what was there, and write the file."""
        with self.lock:
            if name is None:
                self.found[part] = value
            else:
                self.found.setdefault(part, {})[name] = value
            self.made[part if name is None else f"{part}, {name}"] = self.now
            whole = {"results": self.found, **self.facts, "made": self.made}
            writing = self.out.with_name(f"{self.out.name}.writing")  # so that an end in between leaves the file whole
            writing.write_text(json.dumps(whole, indent=2) + "\n")
            os.replace(writing, self.out)


def _without_folders(argument: str) -> str:
    """An argument, or what follows its equals sign, with the last name alone of a machine's path."""
    key, equals, value = argument.partition("=")
    if equals and os.path.isabs(value):
        return f"{key}={Path(value).name}"
    return Path(argument).name if os.path.isabs(argument) else argument


def options_of(description: str | None, script: str, jobs: int = 1) -> argparse.ArgumentParser:
    """What benchmarks of experiments have in common: where runs stay, how many go side by side, and the JSON file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--jobs", type=int, default=jobs)
    parser.add_argument("--out", type=Path, default=Path(script).with_suffix(".json"))
    return parser


def run_parts(
    description: str | None, script: str, parts: Mapping[str, Callable[[], dict[str, Any]]], *libraries: str
) -> Results:
    """Run the parts of a benchmark that its command line chooses, on one thread, and write the JSON after each.

    Returns what the JSON has then.

    Args:
        description: What the benchmark is about.
        script: Its file.
        parts: What makes the results of each, by its name.
        libraries: Whose versions are told.
    """
    import torch  # which `fedlit benchmark --list` does without

    parser = options_of(description, script)
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    options = parser.parse_args()
    results = Results(options.out, *libraries)
    torch.set_num_threads(1)
    for part in options.parts:
        results.keep(parts[part](), part)
        print(part, results.found[part], flush=True)
    return results


def show(label: str, row: dict[str, Any]) -> None:
    """Print the means of one row."""
    cells = {name: cell for name, cell in row.items() if isinstance(cell, dict) and "mean" in cell}
    means = (f"{name} {cell['mean']:.1f} ± {cell['std']:.1f}" for name, cell in cells.items())
    print(f"{label:58s}", "  ".join(means), flush=True)


def spread(values: list[float], factor: float = 100.0, places: int = 1) -> dict[str, float]:
    """Mean and sample standard deviation; in per cent, of shares."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": round(factor * statistics.fmean(values), places), "std": round(factor * deviation, places)}


def by_target(
    runs: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float], factor: float = 100.0
) -> dict[str, dict[str, float]]:
    """Spread over seeds of a value of a method's runs, by target, and of its "average" over targets in each seed."""
    targets, seeds = (sorted({run[key] for run in runs}) for key in ("target", "seed"))
    found = {(run["target"], run["seed"]): value(run) for run in runs}
    of_target = {target: spread([found[target, seed] for seed in seeds], factor) for target in targets}
    means = [statistics.fmean(found[target, seed] for target in targets) for seed in seeds]
    return of_target | {"average": spread(means, factor)}


def by_method(runs: list[dict[str, Any]], measure: str = "oracle_accuracy") -> dict[str, dict[str, Any]]:
    """Per method: accuracy by target, their average within each seed, what label-free selection comes to, the score.

    ``measure`` is the figure of a summary that takes the accuracy's place; what selection comes to is accuracy.
    """
    result: dict[str, dict[str, Any]] = {}
    for method in sorted({run["method"] for run in runs}):
        own = [run for run in runs if run["method"] == method]
        seeds = sorted({run["seed"] for run in own})
        row: dict[str, Any] = {**by_target(own, itemgetter(measure))}
        for name, key in (
            ("round_by_score", "selected_accuracy"),
            ("round_by_oracle", "best_accuracy"),
            ("target_score", "target_score"),
        ):
            if any(run[key] is None for run in own):
                continue
            row[name] = spread([statistics.fmean(run[key] for run in own if run["seed"] == seed) for seed in seeds])
        row["seeds"] = seeds
        row["seconds"] = round(sum(run["seconds_total"] for run in own), 1)
        row["megabytes"] = {
            channel: round(statistics.fmean(run["bytes_by_channel"].get(channel, 0) for run in own) / 1e6, 3)
            for channel in own[0]["bytes_by_channel"]
        }
        result[method] = row
    return result
