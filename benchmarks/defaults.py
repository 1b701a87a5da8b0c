"""Defaults: methods that need no target label as `--compare` gives them, on all data sets, with nothing tuned.

Run from the repository root: python benchmarks/defaults.py [--data styles digits] [--rounds 15 30] [--targets all]

Per data set, way of scaling its inputs, backbone and number of rounds there is one ``fedlit fit`` of SourceOnly with
Adam (rate 0.002) and ``compare`` with bare classes, which get their shipped configuration where that experiment says
nothing else: all get its optimiser. "FedDAN, SGD" and "FedCORAL, SGD" are the shipped configurations as files, with an
optimiser of their own; AdaBN and AutoDIAL have the backbone with BatchNorm, and SourceOnly with it is what they are
compared with. Accuracies are those of the last round on all samples of the target, an oracle that nothing was chosen
by; "less" is a method's accuracy less SourceOnly's in the same experiment, in points.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from experiments import Results, fit

FEATURES = "../shared/data/office_caltech10"
DATA: dict[str, tuple[dict[str, Any], int, tuple[str, ...], tuple[str, ...]]] = {
    "styles": (
        {"class_path": "FeatureDomains", "init_args": {"path": f"{FEATURES}_styles_efficientnet_lite0.npz"}},
        1280,
        ("sketch", "photo", "painting", "night"),
        ("zscore", "unit"),
    ),
    "office_caltech": (
        {"class_path": "FeatureDomains", "init_args": {"path": f"{FEATURES}_efficientnet_lite0.npz"}},
        1280,
        ("caltech10", "amazon", "dslr", "webcam"),
        ("zscore", "unit"),
    ),
    "surf": (
        {"class_path": "FeatureDomains", "init_args": {"path": f"{FEATURES}_surf.npz"}},
        800,
        ("webcam", "amazon", "caltech10", "dslr"),
        ("zscore", "unit"),
    ),
    "digits": (
        {"class_path": "Digits", "init_args": {"flatten": True}},
        64,
        ("fonts", "clean", "blended", "noisy"),
        ("as it is",),
    ),
    "hearts": (
        {"class_path": "HeartDisease", "init_args": {}},
        38,
        ("va_long_beach", "cleveland", "hungary", "switzerland"),
        ("as it is",),
    ),
}
"""Of each data set: its data module, numbers of an input, targets (of one, the first), and ways of scaling."""

BARE = (
    *("FedAvg", "FedProx", "FedDAN", "FedCORAL", "FedDANN", "FADE", "FedWDGRL", "FADA", "KD3A", "CoMDA"),
    *("FedRFTCA", "FedRFTCAClosedForm", "FedJDA", "FedMMD", "FedDaDiL"),
)
NORMALISED = {"AdaBN": "adabn", "AutoDIAL": "adabn_autodial"}
FLOOR, NORMALISED_FLOOR = "SourceOnly", "SourceOnly, BatchNorm"
FREE = ", without trust regions"
LESS_BY = 3.0
"""Points below the floor that a default may end at."""


def backbone(name: str, width: int, batch_norm: bool = False) -> dict[str, Any]:
    """A hidden layer of 64 with a ReLU ("mlp"), or a linear layer to 64 numbers ("linear")."""
    if name == "mlp" or batch_norm:
        arguments: dict[str, Any] = {"in_features": width, "hidden": [64], "batch_norm": batch_norm}
        return {"class_path": "fedlit.models.MLP", "init_args": arguments}
    features = {"class_path": "fedlit.models.Features", "init_args": {"in_features": width}}
    return {"class_path": "fedlit.models.Bottleneck", "init_args": {"extractor": features, "out_features": 64}}


def experiment(
    data: str, scaling: str, net: str, rounds: int, targets: list[str], methods: list[str], free: bool
) -> dict[str, Any]:
    """The configuration of one cell."""
    module, width, *_ = DATA[data]
    arguments = {
        **module["init_args"],
        **({} if scaling == "as it is" else {"normalise": scaling}),
        **{"target": targets[0], "transductive": True, "val_fraction": 0.1, "test_fraction": 0.0},
    }
    normalised = backbone(net, width, batch_norm=True)
    drop = {"drop_last": True}
    compare: list[Any] = [f"fedlit.methods.{name}" for name in BARE]
    for name in ("fed_dan", "fed_coral"):
        model = yaml.safe_load(Path(f"configs/methods/{name}.yaml").read_text())["model"]
        compare.append({**model, "name": f"{model['class_path'].split('.')[-1]}, SGD"})
    compare.append(
        {"class_path": "SourceOnly", "name": NORMALISED_FLOOR, "init_args": {"extractor": normalised}, "data": drop}
    )
    for name, file in NORMALISED.items():
        model = yaml.safe_load(Path(f"configs/methods/{file}.yaml").read_text())["model"]
        init_args = {**model["init_args"], "extractor": normalised}
        compare.append({"class_path": "AdaBN", "name": name, "init_args": init_args, "data": drop})
    if methods:
        compare = [each for each in compare if name_of(each) in methods]
    return {
        "seed_everything": 0,
        "targets": targets,
        "compare": compare,
        "data": {"class_path": f"fedlit.data.{module['class_path']}", "init_args": arguments},
        "model": {
            "class_path": "fedlit.methods.SourceOnly",
            "init_args": {
                "extractor": backbone(net, width),
                **({"trust_region": None} if free else {}),
                "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.002}},
            },
        },
        "trainer": {
            "max_epochs": rounds,
            "check_val_every_n_epoch": rounds,
            "enable_checkpointing": False,
            "strategy": {"class_path": "fedlit.FederatedStrategy", "init_args": {"num_threads": 1}},
        },
    }


def name_of(entry: Any) -> str:
    """What the closing table calls an entry of ``compare``."""
    return entry.split(".")[-1] if isinstance(entry, str) else str(entry["name"])


def accuracies(*cell: Any) -> dict[str, float]:
    """By method, the mean over targets, in per cent."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "defaults.yaml")
        config.write_text(yaml.safe_dump(experiment(*cell), sort_keys=False))
        found: dict[str, list[float]] = {}
        for run in fit(folder, f"--config={config}").values():
            found.setdefault(run["method"], []).append(100 * run["oracle_accuracy"])
    return {method: round(sum(each) / len(each), 1) for method, each in found.items()}


def less_floor(row: dict[str, float]) -> dict[str, float]:
    """Points above or below the floor, by method."""
    floors = {name: row.get(NORMALISED_FLOOR) for name in NORMALISED}
    return {
        name: round(value - (floors.get(name) or row[FLOOR]), 1)
        for name, value in row.items()
        if name not in (FLOOR, NORMALISED_FLOOR)
    }


def cells(data: list[str], nets: list[str], rounds: list[int]) -> Iterator[tuple[str, str, str, int]]:
    """Data set, scaling, backbone and rounds, cheap ones first."""
    for number in rounds:
        for name in data:
            for scaling in DATA[name][3]:
                for net in nets:
                    yield name, scaling, net, number


def main() -> None:
    """Run the cells, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA))
    parser.add_argument("--backbones", nargs="+", choices=("mlp", "linear"), default=["mlp", "linear"])
    parser.add_argument("--rounds", nargs="+", type=int, default=[15, 30])
    parser.add_argument("--targets", choices=("one", "all"), default="one")
    parser.add_argument("--methods", nargs="+", default=[], help="Those alone, beside SourceOnly.")
    parser.add_argument("--free", action="store_true", help="Without the trust regions of shipped configurations.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = Results(options.out, "torch", "lightning", floor=FLOOR)
    for name, scaling, net, rounds in cells(options.data, options.backbones, options.rounds):
        targets = list(DATA[name][2][: 1 if options.targets == "one" else None])
        found = accuracies(name, scaling, net, rounds, targets, options.methods, options.free)
        key = f"{scaling}, {net}, {rounds} rounds" + (FREE if options.free else "")
        before = results.found.get(name, {}).get(key, {}) if options.methods else {}
        results.keep({**before, **found}, name, key)
        less = less_floor(found)
        print(f"{name}, {key}: SourceOnly {found[FLOOR]}", flush=True)
        print("   ", "  ".join(f"{method} {value:+.1f}" for method, value in less.items()), flush=True)
    rows = [(value, method, f"{name}, {key}") for name, by_key in results.found.items() for key, row in by_key.items()
            if not key.endswith(FREE) for method, value in less_floor(row).items()]  # fmt: skip
    if rows:
        below = [row for row in rows if row[0] < -LESS_BY]
        print(f"{len(below)} of {len(rows)} cells are more than {LESS_BY:g} points below; the worst: {min(rows)}")


if __name__ == "__main__":
    main()
