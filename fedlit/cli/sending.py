"""``fedlit send``: runs that have ended, to a tracking server that has none of them, or was not there."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from fedlit.callbacks import MLflow, RunSummary
from fedlit.callbacks.report import RunFolder, read_runs
from fedlit.callbacks.run_record import METRICS, SUMMARY
from fedlit.callbacks.tracking import SETTINGS, log_settings, public, send_files, settings_in, tags_at_end
from fedlit.cli.arguments import find_config
from fedlit.cli.lightning_cli import quieten
from fedlit.configs import flow

_KEY = "trainer.logger"
_SENT = ".sent.json"
"""In a run's folder: where it was sent to, and when."""


def send(args: list[str]) -> None:
    """Log finished runs, from what they have left in their folders."""
    parser = argparse.ArgumentParser(
        "fedlit send",
        description="Send finished runs to W&B, MLflow or TensorBoard, from what they have left in their folders: "
        "metrics by step, settings, tags, and the files that fedlit.callbacks.Artifacts sends. Each gets a run of its "
        "own there. Other arguments are of the logger: --trainer.logger.tracking_uri=http://HOST:5000.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="folder of a run, or one above several")
    config = "where to: loggers/mlflow, loggers/wandb, or a file with trainer.logger; default is that of each run"
    parser.add_argument("--config", "-c", metavar="FILE", help=config)
    samples = "leave files with a row for each sample, predictions and embeddings, where they are"
    parser.add_argument("--no_samples", action="store_true", help=samples)
    again = "send runs that were sent there before, too"
    parser.add_argument("--again", action="store_true", help=again)
    options, words = parser.parse_known_args(args)
    if stray := [word for word in words if not word.startswith(f"--{_KEY}")]:
        parser.error(f"unknown arguments {stray}: those of the logger begin with --{_KEY}")
    quieten()
    try:
        runs = read_runs(options.runs)
    except (OSError, ValueError) as error:
        sys.exit(f"fedlit send: {error}")
    unfinished = next((run.folder for run in runs if not (run.folder / SUMMARY).is_file()), None)
    if unfinished is not None:
        sys.exit(f"fedlit send: '{unfinished}' has no {SUMMARY}, so that its run has not ended: resume it, or wait")
    for run in runs:
        there = [path for name in SETTINGS if (path := run.folder / name).is_file()]
        settings = _read(there[0]) if there else {}
        source = settings if options.config is None else _read(Path(find_config(options.config)))
        given = (source.get("trainer") or {}).get("logger")
        loggers = _loggers(given, words, run)
        where, earlier = flow({"logger": given, "words": words}), _earlier(run)
        if where in earlier and not options.again:
            print(f"'{run.folder}' was sent there at {earlier[where]}: --again sends it once more", flush=True)
            continue
        _send(run, settings, loggers, not options.no_samples)
        lost = [each.lost for each in loggers if isinstance(each, MLflow) and each.lost is not None]
        if lost:
            sys.exit(f"fedlit send: '{run.folder}' was not sent: {lost[0]}")
        now = datetime.now().isoformat(" ", "seconds")
        (run.folder / _SENT).write_text(json.dumps({**earlier, where: now}), encoding="utf-8")
        print(f"sent '{run.folder}' to {', '.join(type(each).__name__ for each in loggers)}", flush=True)


def _earlier(run: RunFolder) -> dict[str, str]:
    """When a run was sent, by where to."""
    path = run.folder / _SENT
    sent: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return sent


def _read(path: Path) -> dict[str, Any]:
    try:
        return settings_in(path)
    except (OSError, yaml.YAMLError) as error:
        sys.exit(f"fedlit send: '{path}' cannot be read: give a configuration, such as loggers/mlflow ({error})")


def _loggers(given: Any, words: list[str], run: RunFolder) -> list[Logger]:
    """Loggers of a configuration, with arguments of the command over it; those of CSV files are left out."""
    parser = ArgumentParser("fedlit send", exit_on_error=False)
    parser.add_argument(f"--{_KEY}", type=Logger | Iterable[Logger] | bool | None)
    try:
        parsed = parser.parse_args([*([] if given is None else [f"--{_KEY}={flow(given)}"]), *words])
        made = parser.instantiate(parsed).trainer.logger
    except (ArgumentError, ValueError, ImportError) as error:
        sys.exit(f"fedlit send: {error}")
    loggers = [each for each in (made if isinstance(made, list) else [made]) if isinstance(each, Logger)]
    loggers = [each for each in loggers if not isinstance(each, CSVLogger)]
    if not loggers:
        sys.exit(
            f"fedlit send: the settings of '{run.folder}' name no logger but CSV files: say where to by --config, such "
            "as loggers/mlflow or loggers/wandb"
        )
    return loggers


def _send(run: RunFolder, settings: dict[str, Any], loggers: list[Logger], per_sample: bool) -> None:
    path = run.folder / SUMMARY
    summary = RunSummary.from_json(path.read_text(encoding="utf-8"))
    hides = bool(summary.backends)  # of one process too, as each process of a federation across organisations is
    tags = {key: value for key, value in tags_at_end(summary).items() if key not in ("git", "fedlit")}  # of now
    log_settings(loggers, public(settings, hides), tags)
    metrics = run.folder / METRICS
    for row in csv.DictReader(metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []):
        step = int(row.pop("step"))
        numbers = {name: float(value) for name, value in row.items() if value}
        for logger in loggers:
            logger.log_metrics(numbers, step)
    send_files(loggers, run.folder, hides, per_sample)
    for logger in loggers:
        logger.finalize("success")
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()  # or W&B would take the next run for this one
