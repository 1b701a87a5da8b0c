"""``fedlit sweep FILE``: a sweep file of W&B on this machine, without W&B."""

from __future__ import annotations

import argparse
import shlex
import sys

from fedlit.cli.arguments import find_config
from fedlit.cli.sweep_file import SweepFile

_DESCRIPTION = """
Run the trials of a W&B sweep file here, without W&B and its service: the same parameters, combinations, distributions
and command, which must be fedlit fit. A table ranks settings by the metric of the file, which must need no label of the
target; methods are ranked by validator/trust alone. Trials that the same command, or the file with other values, has
finished are taken as they are, interrupted ones go on, and one that fails does not end the others.
"""


def sweep(args: list[str]) -> None:
    """Run the trials of a sweep file, and print what they came to."""
    parser = argparse.ArgumentParser(
        "fedlit sweep",
        description=_DESCRIPTION,
        epilog="Words after a lone -- are added to each trial: fedlit sweep FILE -- --trainer.max_epochs=2",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="sweep file, or an installed one: sweeps/fedprox_digits")
    parser.add_argument(
        "--method", choices=("grid", "random"), help="all combinations, or random ones, whatever the file sets"
    )
    parser.add_argument("--trials", type=_count, metavar="N", help="most trials; random ones need it, or run_cap there")
    parser.add_argument(
        "--seed", type=int, default=0, help="of random trials (default: 0); more trials of a seed begin with the same"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trials that are trained side by side")
    parser.add_argument(
        "--fresh", nargs="?", const="true", default="false", choices=("true", "false"), help="train all trials again"
    )
    parser.add_argument(
        "--wandb", action="store_true", help="keep W&B's logger, which is left out otherwise; see docs/sweeps.md"
    )
    parser.add_argument("--list", action="store_true", dest="only_list", help="print the trials, and train none")
    own, more = _split(args)
    options = parser.parse_args(own)
    path = find_config(options.file)
    try:
        file = SweepFile.read(path)
        method = _method(file, options)
        trials = file.trials(method, options.trials or file.run_cap, options.seed)
        file.words(trials[0])
    except FileNotFoundError as error:
        sys.exit(f"fedlit: {error}")
    except ValueError as error:
        sys.exit(f"fedlit: {path}: {error}")
    if options.only_list:
        for number, values in enumerate(trials):
            print(f"{number + 1}: {shlex.join(['fedlit', 'fit', *file.words(values), *more])}")
        return
    from fedlit.cli.trials import Sweep  # which takes torch, and seconds

    asked = options.trials or file.run_cap
    if method == "random" and asked is not None and len(trials) < asked:
        print(f"{asked - len(trials)} of {asked} random trials equal others, and are left out", flush=True)
    for line in file.merged:
        print(line, flush=True)
    if file.stops_early:
        print("early_terminate is for W&B's service: every trial is trained to its end", flush=True)
    Sweep(file, trials, more, options.jobs, options.fresh == "true", options.wandb).run(["sweep", *args])


def _method(file: SweepFile, options: argparse.Namespace) -> str:
    """How trials are chosen; raises a `ValueError` where it takes more to know that."""
    if file.method == "bayes" and options.method is None:
        raise ValueError(
            "method bayes chooses each trial by what others came to, which W&B's service does (wandb sweep): give "
            "--method random --trials N, which draws from the same parameters, or --method grid if all have values"
        )
    method = str(options.method or file.method)
    if method == "random" and options.trials is None and file.run_cap is None:
        raise ValueError("random trials have no end: give --trials N, or run_cap in the file")
    return method


def _split(args: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in args:
        return args, []
    place = args.index("--")
    return args[:place], args[place + 1 :]


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 trial, got {text!r}")
    return int(text)
