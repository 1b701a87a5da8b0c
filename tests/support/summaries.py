"""Results and folders of runs that nobody trained, for tables and reports of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fedlit.callbacks import RunSummary

COLLAPSED = {"oracle_confusion": [[0, 2], [0, 2]], "classes": ["no", "yes"]}
HEALTHY = {"oracle_confusion": [[1, 1], [0, 2]], "classes": ["no", "yes"]}


def summary(method: str, target: str, accuracy: float | None, seed: int = 0, **fields: Any) -> RunSummary:
    """Results of a run of one round that sent nothing, but for some fields."""
    defaults = {"target_score": 0.5, "rounds": 1, "bytes_by_channel": {}, "seconds": {}, "seconds_total": 1.0}
    defaults |= {"processes": 1, "target_sha256": "", "backends": {}}
    return RunSummary(method, target, seed, accuracy, **(defaults | fields))


def write_run(folder: Path, config: dict[str, Any], metrics: str, finished: RunSummary | None = None) -> Path:
    """A run's folder; without a summary the run was interrupted."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.csv").write_text(metrics)
    if finished is not None:
        (folder / "summary.json").write_text(finished.to_json())
    return folder
