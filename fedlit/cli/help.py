"""What ``--help`` of the commands with a Trainer shows first, without torch; ``--help=all`` is of jsonargparse."""

from __future__ import annotations

import textwrap

from fedlit.cli.mistakes import installed

ALL = "--help=all"

_WIDTH = 100

_USAGE = {
    "fit": "fedlit fit --config CONFIG [--config CONFIG ...] [--KEY VALUE ...]",
    "validate": "fedlit validate --config CONFIG --ckpt_path CHECKPOINT [--KEY VALUE ...]",
    "test": "fedlit test --config CONFIG --ckpt_path CHECKPOINT [--KEY VALUE ...]",
    "predict": "fedlit predict --config CONFIG --ckpt_path CHECKPOINT [--KEY VALUE ...]",
    "serve": "fedlit serve --config EXPERIMENT --config SERVER [--KEY VALUE ...]",
    "join": "fedlit join --config EXPERIMENT --config SITE [--KEY VALUE ...]",
}

SCREENS = tuple(_USAGE)
"""Commands whose help has a first screen."""

_ABOUT = {
    "fit": "Train and evaluate: one run, or with several seeds, targets or methods an experiment with a closing table.",
    "validate": "Evaluate a checkpoint on validation samples. RUN_DIR/config.yaml is the configuration of a run.",
    "test": "Evaluate a checkpoint on test samples. RUN_DIR/config.yaml is the configuration of a run.",
    "predict": "Predict the target's samples with a checkpoint. RUN_DIR/config.yaml is the configuration of a run.",
    "serve": "Take the server's seat in a federation across organisations, which has no data: all give the same "
    "experiment, and each a file of its own, with its data and seat.",
    "join": "Take a site's seat in a federation across organisations: all give the same experiment, and each a file of "
    "its own, with its data and seat.",
}

_EXAMPLES = {
    "fit": (
        "fedlit fit --config experiments/first",
        "fedlit fit --config data/digits --config methods/fed_mmd --config privacy/masking \\",
        "    --trainer.max_epochs 20 --targets '[all]' --seeds '[0,1,2]'",
    ),
    "serve": ("fedlit serve --config experiment.yaml --config server.yaml",),
    "join": ("fedlit join --config experiment.yaml --config north.yaml",),
}
_WITH_CHECKPOINT = (
    "fedlit {} --config runs/FedAvg/version_0/config.yaml \\",
    "    --ckpt_path runs/FedAvg/version_0/checkpoints/NAME.ckpt",
)

_KINDS = ("experiments", "data", "methods", "privacy", "recipes", "loggers")

_SEATS = {
    "serve": {
        "seat.address": "where it listens: 0.0.0.0:8443",
        "seat.sites": "names of the sites, or the clients of each",
        "--page, --page=PORT": "a page for this machine alone: sites that take part, rounds, bytes, curves",
    },
    "join": {
        "seat.server": "whom to call: fed.example.org:8443",
        "seat.clients": "clients that this site has, if not one that is called like it",
        "seat.policy": "a file that says which runs this site takes part in",
    },
}
_OF_BOTH_SEATS = {
    "seat.certificate, seat.key, seat.ca": "files for encryption; for a trial fedlit certificates makes them",
    "seat.wait_for, seat.patience": "seconds to wait for others, and for one that does not answer",
}

_KEYS = {
    "data": "data (fedlit list data), and their arguments as data.KEY",
    "data.target": "client that is adapted to",
    "model": "method (fedlit list methods), and its arguments as model.KEY",
}
_OF_FIT = {
    "model.optimizer": "optimiser, such as Adam, whose arguments are model.optimizer.lr and so on",
    "trainer.max_epochs": "rounds (unless trainer.strategy.rounds_per_epoch is set)",
    "trainer.strategy.local_steps": "local steps in a round, in place of a pass over the data",
    "trainer.strategy.privacy": "what hides each client's messages (fedlit list privacy)",
    "trainer.accelerator": "cpu or gpu",
    "seeds, targets, compare": "a run for each in a list, and one table; --targets '[all]' is all clients",
    "select": "best or combine: choose among the methods compared without labels of the target",
    "jobs": "runs side by side",
    "ckpt_path": "checkpoint to go on from",
}


def first_screen(command: str) -> str:
    """The help of a command with a Trainer: an example, names of configurations, and the keys that most runs set."""
    checkpoint = tuple(line.format(command) for line in _WITH_CHECKPOINT)
    lines = [f"usage: {_USAGE[command]}", "", *textwrap.wrap(_ABOUT[command], _WIDTH), ""]
    lines += [f"  {line}" for line in _EXAMPLES.get(command, checkpoint)]
    if command == "fit":
        lines += ["", "--config takes files of yours, and these, which are installed; what comes later wins:", ""]
        lines += [line for kind in _KINDS for line in _entry(f"{kind}/", ", ".join(installed(kind)), 16)]
    if command in _SEATS:
        lines += ["", "Keys of that file, beside those of fedlit fit:", ""]
        lines += _keys(_SEATS[command] | _OF_BOTH_SEATS)
    else:
        lines += ["", "Keys that most runs set, as --KEY VALUE or in a configuration:", ""]
        lines += _keys(_KEYS | (_OF_FIT if command == "fit" else {}))
    last = (
        f"fedlit {command} {ALL} has all keys, fedlit fit --model.help FedAvg those of a method, and --print_config "
        "prints the configuration that a command would run."
    )
    lines += ["", *textwrap.wrap(last, _WIDTH)]
    return "\n".join(lines)


def _keys(keys: dict[str, str]) -> list[str]:
    return [line for key, what in keys.items() for line in _entry(key, what, 40)]


def _entry(name: str, what: str, width: int) -> list[str]:
    return textwrap.wrap(what, _WIDTH, initial_indent=f"  {name}".ljust(width), subsequent_indent=" " * width)
