"""What tests of the command share: refusals, runs that go no further than their objects, and files of those that do."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fedlit.cli import main
from fedlit.cli.arguments import normalise
from fedlit.cli.experiment import Experiment
from fedlit.cli.lightning_cli import Parsed


def refusal(*words: str) -> str:
    """What a command prints that is refused."""
    with pytest.raises(SystemExit) as ended:
        main([*words])
    return str(ended.value.code)


def parsed(*words: str) -> list[Parsed]:
    """The configuration of each method of ``fedlit fit``."""
    return [*Experiment(normalise(["fit", *words])).by_method.values()]


def instantiated(*words: str) -> list[Any]:
    """Data, method and Trainer with each method of ``fedlit fit``."""
    return [each.parser.instantiate(each.arguments) for each in parsed(*words)]


def summaries(place: str = "runs") -> list[dict[str, Any]]:
    """Of all runs in a folder."""
    return [json.loads(path.read_text()) for path in sorted(Path(place).rglob("summary.json"))]


def rows(pattern: str | Path) -> list[dict[str, str]]:
    """Rows of the one CSV file at a path or of a pattern."""
    (path,) = [pattern] if isinstance(pattern, Path) else Path().glob(pattern)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
