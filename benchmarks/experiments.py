"""Experiments as subprocesses, and what their runs come to, for the benchmarks of accuracies."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any


def fit(folder: str, *arguments: str) -> dict[Path, dict[str, Any]]:
    """Summaries of all runs of one ``fedlit fit``, by the folder that a run left its files in.

    Args:
        folder: Where they are written.
        arguments: Of the command.

    Raises:
        RuntimeError: If it fails; with the end of what it printed.
    """
    command = [str(Path(sys.executable).with_name("fedlit")), "fit", *arguments]
    command.append(f"--trainer.default_root_dir={folder}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return {path.parent: json.loads(path.read_text()) for path in sorted(Path(folder).rglob("summary.json"))}


def spread(values: list[float]) -> dict[str, float]:
    """Mean and sample standard deviation, in per cent."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": round(100 * statistics.fmean(values), 1), "std": round(100 * deviation, 1)}


def by_method(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per method: accuracy by target, their average within each seed, what label-free selection comes to, the score."""
    result: dict[str, dict[str, Any]] = {}
    for method in sorted({run["method"] for run in runs}):
        own = [run for run in runs if run["method"] == method]
        targets = sorted({run["target"] for run in own})
        seeds = sorted({run["seed"] for run in own})
        accuracy = {(run["target"], run["seed"]): run["oracle_accuracy"] for run in own}
        row: dict[str, Any] = {t: spread([accuracy[t, seed] for seed in seeds]) for t in targets}
        row["average"] = spread([statistics.fmean(accuracy[t, seed] for t in targets) for seed in seeds])
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
