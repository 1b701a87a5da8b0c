"""Experiments as subprocesses, for the benchmarks of accuracies."""

from __future__ import annotations

import json
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
