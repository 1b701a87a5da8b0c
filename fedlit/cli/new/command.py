"""``fedlit new csv|images|features|signals DIR``: a configuration that runs, with one's own data or an example."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from fedlit.cli.new.signals import Signals
from fedlit.cli.new.studies import Features, Images, Kind, Study
from fedlit.cli.new.tables import Tables
from fedlit.configs import flow

_DESCRIPTION = """
Write a folder with experiment.yaml, which trains and compares methods, and README.md, which has the commands from
training to an exported model. Without --data it comes with a small example, so that all of it runs as it is; with
--data it reads your files. Nothing that is there is written over.
"""

_SHARE = 0.5
"""Share of the target's labels that FedAvg trains on, beside methods that are given none; the others score it."""

_ERRORS = "R2 (share of variance explained), beside RMSE and MAE in the label's unit,"
"""What a regression is scored by."""


KINDS: dict[str, Kind] = {"csv": Tables(), "images": Images(), "features": Features(), "signals": Signals()}


def new(args: list[str]) -> None:
    """Write the folder, and print what to do with it."""
    parser = argparse.ArgumentParser("fedlit new", description=_DESCRIPTION)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="|".join(KINDS))
    for name, kind in KINDS.items():
        one = kinds.add_parser(name, help=kind.summary, description=f"A study of {kind.summary}.")
        one.add_argument("dir", type=Path, metavar="DIR", help="folder that is made, or that has your data already")
        one.add_argument("--data", type=Path, metavar="PATH", help="your data; without it an example is written")
        one.add_argument("--target", metavar="NAME", help="client without labels, which is adapted to; with --data")
        kind.options(one)
    given = parser.parse_args(args)
    _check(given)
    kind = KINDS[given.kind]
    study = kind.own(given) if given.data is not None else kind.example()
    texts = {"experiment.yaml": _configuration(given.kind, study), "README.md": _readme(given.kind, given.dir, study)}
    given.dir.mkdir(parents=True, exist_ok=True)
    study.write(given.dir)
    for name, text in texts.items():
        (given.dir / name).write_text(text, encoding="utf-8")
    print(f"wrote {given.dir / 'experiment.yaml'} and {given.dir / 'README.md'}: {study.about}")
    print(_about_labels(study))
    print(f"next: cd {given.dir} && fedlit fit --config experiment.yaml    # README.md has what follows")


def _check(given: argparse.Namespace) -> None:
    """Refuse what would write over something, and options that belong to one's own data."""
    folder: Path = given.dir
    if folder.exists() and not folder.is_dir():
        sys.exit(f"fedlit: DIR must be a folder, or a new name, and '{folder}' is a file: give another")
    there = [name for name in ("experiment.yaml", "README.md") if (folder / name).exists()]
    if there:
        sys.exit(
            f"fedlit: '{folder}' has {' and '.join(there)} already, and nothing is written over: give another DIR, or "
            "move it away"
        )
    if given.data is not None:
        if not given.data.exists():
            sys.exit(f"fedlit: --data '{given.data}' is not there (looked for '{given.data.absolute()}')")
        return
    own = [key for key in vars(given) if key not in ("kind", "dir", "data") and getattr(given, key) is not None]
    if own:
        sys.exit(f"fedlit: --{own[0]} is of your own data: give --data PATH, too, or leave it out for the example")
    kind = KINDS[given.kind]
    candidates = (file for depth in kind.depths for file in folder.glob(depth) if file.suffix.lower() in kind.suffixes)
    data = sorted({file.relative_to(folder).parts[0] for file in candidates})
    if data:
        sys.exit(
            f"fedlit: '{folder}' has data already ({', '.join(data[:3])}{', ...' if len(data) > 3 else ''}): give "
            f"--data {folder} to use them, or another DIR for an example"
        )
    for name in ("data", "features.npz"):
        if (folder / name).exists():
            sys.exit(
                f"fedlit: '{folder / name}' is there, where the example would be, and nothing is written over: give "
                f"--data {folder / name} if these are your data, or another DIR"
            )


# ---------------------------------------------------------------- what is written


def _configuration(kind: str, study: Study) -> str:
    if _trained_on(study):
        fedavg = (
            f"  # {_about_labels(study)}\n"
            f"  # target_labels: 1.0 trains on all that there are, once nothing is to be scored.\n"
            f'  - {{class_path: fedlit.methods.FedAvg, name: "FedAvg, half of the target labels", '
            f"data: {{target_labels: {_SHARE}}}}}\n"
        )
    else:
        fedavg = (
            f"  # {_about_labels(study)}\n"
            f"  # With more of them: {{class_path: fedlit.methods.FedAvg, data: {{target_labels: {_SHARE}}}}}\n"
        )
    values = {"files": flow(study.files), "target": flow(study.target), "fedavg": fedavg}
    values["compare"] = "compare:" if _trained_on(study) else "compare: []"  # where nothing follows
    return _filled("regression.yaml" if study.regression else f"{kind}.yaml", values | study.more)


def _trained_on(study: Study) -> int:
    """How many of the target's labels FedAvg trains on, as ``target_labels`` rounds; 0 if none is left to score it."""
    return round(_SHARE * study.labelled) if study.labelled > 1 else 0


def _about_labels(study: Study) -> str:
    """Which of the target's labels are used for what, and why not all are trained on."""
    known, number = study.labelled, _trained_on(study)
    if not number:
        has = "1 label" if known else "no labels"
        return f"{study.target} has {has}, and FedAvg needs one to train on and one to be scored by."
    return (
        f"{study.target} has {known} labels: FedAvg trains on {number}, drawn at random, and the other "
        f"{known - number} score it, as a label that was trained on shows nothing."
    )


def _readme(kind: str, folder: Path, study: Study) -> str:
    values = {
        "name": folder.absolute().name or "Study",
        "about": study.about,
        "listing": study.listing,
        "place": study.place,
        "root": study.files,
        "run": "runs/SourceOnly/version_0" if study.regression else f"runs/recommended/{KINDS[kind].method}/version_0",
        "score": _ERRORS if study.regression else "accuracy",
        "predicted": "what is predicted for" if study.regression else "the class and the probabilities of",
        "compares": "" if study.regression else "The target's score needs none; it compares rounds, not methods.",
        "report": "" if study.regression else ", errors by class",
    }
    return _filled(f"{kind}.md", values)


def _filled(template: str, values: dict[str, Any]) -> str:
    text = files("fedlit.cli").joinpath("templates", template).read_text(encoding="utf-8")
    return Template(text).substitute(values)
