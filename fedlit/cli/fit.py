"""``fedlit {fit,validate,test,predict}``: what is run by a Trainer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import yaml

from fedlit.cli.experiment import Experiment
from fedlit.cli.lightning_cli import FedlitCLI, in_sweep
from fedlit.cli.memory import is_question
from fedlit.cli.plan import print_table

_OF_TWO_TYPES = ("target_labels", "overfit_batches", "val_check_interval", "limit_{}_batches")
"""Ends of parameters that take a number if whole, and a share if not: 1 and 1.0 are one and all."""


def run_trainer(args: list[str]) -> None:
    """Run one subcommand of Lightning's CLI, of fit all runs that it stands for.

    Args:
        args: Normalised, and without what is refused before they are parsed.
    """
    if "fit" not in args[:1] or is_question(args):
        FedlitCLI(args)
        return
    _refuse_lost_types()
    experiment = Experiment(args)
    if experiment.parsed.arguments.get("seat") is not None:
        sys.exit("fedlit: fit has no seat: take it with fedlit serve (the server's) or fedlit join (a site's)")
    runs = experiment.runs
    if len(runs) > 1 and any(each.arguments.get("ckpt_path") for each in experiment.by_method.values()):
        sys.exit(
            f"fedlit: ckpt_path resumes one run, but this is {len(runs)} runs (seeds, targets, compare): resume "
            "each by itself, with --seeds null --targets null --compare null"
        )
    if len(runs) > 1 and in_sweep():
        sys.exit(
            f"fedlit: a trial of a W&B sweep is one run, but this is {len(runs)} (seeds, targets, compare): sweep over "
            "data.target, seed_everything and config, and give --seeds=null --targets=null --compare=null"
        )
    if len(runs) == 1:
        print_table([experiment.start(0)])
        return
    experiment.run(args)


def _refuse_lost_types() -> None:
    """End a trial of W&B's service that may have been sent 1 for 1.0."""
    path = os.environ.get("WANDB_SWEEP_PARAM_PATH", "")
    if not in_sweep() or not os.path.isfile(path):
        return
    parameters = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    ends = [end.format(part) for end in _OF_TWO_TYPES for part in ("train", "val", "test", "predict")]
    for name, about in (parameters if isinstance(parameters, dict) else {}).items():
        value = about.get("value") if isinstance(about, dict) else None
        if type(value) is int and value == 1 and str(name).rpartition(".")[2] in ends:
            sys.exit(
                f"fedlit: the sweep gives {name}=1, and W&B's service sends 1.0 as 1, so that it may mean one or all: "
                "for all write '1.0' in quotes in the sweep file, for one put the option into its command"
            )
