"""``fedlit {fit,validate,test,predict}``: what is run by a Trainer."""

from __future__ import annotations

import sys

from fedlit.cli.experiment import Experiment
from fedlit.cli.lightning_cli import FedlitCLI, in_sweep
from fedlit.cli.schedule import print_table, run_all


def run_trainer(args: list[str]) -> None:
    """Run one subcommand of Lightning's CLI, of fit all runs that it stands for.

    Args:
        args: Normalised, and without what is refused before they are parsed.
    """
    if "fit" not in args[:1] or {"-h", "--help", "--print_config"} & {arg.split("=")[0] for arg in args}:
        FedlitCLI(args)
        return
    experiment = Experiment.parse(args)
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
        print_table([experiment.start(runs[0])])
        return
    run_all(experiment, args)
