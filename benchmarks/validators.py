"""Label-free validators: which of them finds a good model, when methods and rounds are to be chosen without labels.

Run from the repository root: python benchmarks/validators.py [--data digits office_caltech surf styles] [--jobs 2]

All methods of configs/methods that need no label at the target are trained on each target, with their default settings
and 30% of the samples for validation. Every few rounds the callback `fedlit.callbacks.Validators` scores the model;
the accuracy on the target's hidden validation labels is an oracle, by which nothing is chosen. For each target and seed
one pool holds the models of all methods and rounds. Printed, mean ± sample standard deviation over seeds of the average
over targets:

correlation  Spearman's rank correlation of a score with the oracle accuracy, over the pool.
lost         Accuracy in points that is lost by taking the pool's model with the highest score, next to the best one.
lost, of 8   The same where 8 methods are compared, on average over 200 draws of 8; it varies less.
lost, rounds  The same where the method is given and the score chooses the round; averaged over methods.
worst  The most that is lost on a target and seed by choosing in the pool: what a collapsed model would show in.

"chance" takes any model of the pool, and "last" the last round of any method. As in ``fit --select best``, methods that
train predictions to be certain (`trains_on_information`) are not ranked, so that no score takes them, though the best
model may be theirs, but for "trust, all ranked"; and of methods whose model changes at the end the last round alone is
in the pool. Choose between scores on DEVELOPMENT; that ``trust`` has the sources' accuracy in it was chosen with all
four in view.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from pydoc import locate
from typing import Any

import yaml
from scipy.stats import spearmanr

from fedlit.callbacks.report import RunFolder, read_runs
from fedlit.callbacks.selection import trains_on_information
from fedlit.papers.experiments import CONFIGS, Results, fit, show, spread

OFFICE = ("amazon", "caltech10", "dslr", "webcam")
DATA: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "digits": ("data/digits", (), ("clean", "blended", "fonts", "noisy")),
    "office_caltech": ("data/office_caltech_features", (), OFFICE),
    "surf": ("data/office_caltech_surf", (), OFFICE),
    "styles": (
        "data/office_caltech_features",
        ("--data.path=../shared/data/office_caltech10_styles_efficientnet_lite0.npz",),
        ("photo", "painting", "sketch", "night"),
    ),
}
"""Configuration, what is different from it, and targets."""
DEVELOPMENT = ("digits", "office_caltech")
"""Data sets that the default score is chosen on; the others are looked at afterwards."""
MLP = {"class_path": "fedlit.models.MLP", "init_args": {"in_features": 1280, "hidden": [64]}}
EXTRACTORS: dict[str, dict[str, Any]] = {"office_caltech": MLP, "styles": MLP}
"""In place of the data's own, which has no weights."""
POOL = "no label at the target"
ORACLE = "oracle/target/acc"
SCORES = {
    "information": "validator/information",
    "certainty": "validator/certainty",
    "diversity": "validator/diversity",
    "density": "validator/density",
    "iwv": "validator/iwv",
    "dev": "validator/dev",
    "source accuracy": "source/acc",
    "calibrated": "validator/calibrated",
    "neighbourhood": "validator/neighbourhood",
    "class means": "validator/class_means",
    "trust": "validator/trust",
}
ALL_RANKED = "trust, all ranked"
DRAWN, DRAWS = 8, 200
"""Methods in a smaller comparison, and how many of those."""
GUARD = 0.7
"""Of the best match of class means in a pool: models below are out, in scores that say guarded."""
Point = dict[str, float]
"""What was logged after one validation, by metric."""


def scores_of(points: list[Point]) -> dict[str, list[float]]:
    """By score, that of each model of a pool."""
    there = {name: metric for name, metric in SCORES.items() if all(metric in point for point in points)}
    found = {name: [point[metric] for point in points] for name, metric in there.items()}
    calibrated, neighbourhood, match = (found[name] for name in ("calibrated", "neighbourhood", "class means"))
    product = [one * other for one, other in zip(calibrated, neighbourhood, strict=True)]
    found["calibrated x neighbourhood"] = product
    kept = [max(match) * GUARD <= each for each in match]
    found["calibrated x neighbourhood, guarded"] = [a * b for a, b in zip(product, kept, strict=True)]
    found["neighbourhood x class means"] = [a * max(b, 0.0) for a, b in zip(neighbourhood, match, strict=True)]
    found["calibrated x neighbourhood x class means"] = [a * max(b, 0.0) for a, b in zip(product, match, strict=True)]
    return found


def model_of(name: str) -> dict[str, Any]:
    """Class and arguments of an entry of configs/methods, or of SourceOnly."""
    path = CONFIGS / f"methods/{name}.yaml"
    model: dict[str, Any] = yaml.safe_load(path.read_text())["model"] if path.exists() else {}
    return model or {"class_path": f"fedlit.methods.{name}"}


@cache
def is_ranked(name: str) -> bool:
    """Whether scores rank a method."""
    model = model_of(name)
    return trains_on_information(model["class_path"], model.get("init_args", {})) is None


@cache
def changes_at_end(name: str) -> bool:
    """Whether a method's model is another one when the run ends."""
    method: Any = locate(model_of(name)["class_path"])
    return bool(method.requires.changes_at_end)


def methods() -> list[str]:
    """Entries of configs/methods that give the target no labels."""
    found = []
    for path in sorted((CONFIGS / "methods").glob("*.yaml")):
        data = yaml.safe_load(path.read_text()).get("data", {})
        if path.stem not in ("oracle", "source_only") and "target_labels" not in data.get("init_args", {}):
            found.append(path.stem)
    return found


def experiment(data: str, names: list[str], most: int, every: int) -> dict[str, Any]:
    """Methods as one configuration, compared with that of the data, which is SourceOnly."""
    compare = []
    for name in names:
        config = yaml.safe_load((CONFIGS / f"methods/{name}.yaml").read_text())
        trainer = rounds(config.get("trainer", {}), most, every)
        of_data = config.get("data", {}).get("init_args", {})
        compare.append({"name": name, "data": of_data, "trainer": trainer, **config["model"]})
    extractor = {"model": {"init_args": {"extractor": EXTRACTORS[data]}}} if data in EXTRACTORS else {}
    return {
        "trainer": {"callbacks": ["fedlit.callbacks.Validators"], **rounds({}, most, every)},
        "compare": compare,
        **extractor,
    }


def rounds(own: dict[str, Any], most: int, every: int) -> dict[str, int]:
    """Arguments of the Trainer; some methods have a single round."""
    number = own.get("max_epochs", most)
    return {"max_epochs": number, "check_val_every_n_epoch": min(every, number)}


def pool(data: str, target: str, seed: int, **of_experiment: Any) -> dict[str, list[Point]]:
    """By method, what each validation of a run logged."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "validators.yaml")
        config.write_text(yaml.safe_dump(experiment(data, **of_experiment)))
        fit(
            folder,
            f"--config={DATA[data][0]}",
            f"--config={config}",
            f"--data.target={target}",
            "--data.val_fraction=0.3",
            f"--seed_everything={seed}",
            "--trainer.strategy.num_threads=1",
            *DATA[data][1],
        )
        found = {run.method: validations(run) for run in read_runs([Path(folder)])}
    print(f"{data} {target} seed {seed}: { ({name: len(points) for name, points in found.items()}) }", flush=True)
    return found


def validations(run: RunFolder) -> list[Point]:
    """What each validation logged, where the target had a model to score."""
    metrics = (ORACLE, *SCORES.values())
    rounds = sorted(set.intersection(*(set(run.curves.get(metric, ())) for metric in metrics)))
    return [{metric: run.curves[metric][round_idx] for metric in metrics} for round_idx in rounds]


def judge(pooled: dict[str, list[Point]]) -> dict[str, Point]:
    """By score: its correlation with the oracle over a pool, and what is lost by choosing with it."""
    pooled = {name: own[-1:] if changes_at_end(name) else own for name, own in pooled.items()}
    points = [point for name, own in pooled.items() for point in own if is_ranked(name)]
    oracle = [point[ORACLE] for point in points]
    correlations = {
        name: float(spearmanr(scores, oracle).statistic) if len(set(scores)) > 1 else 0.0
        for name, scores in scores_of(points).items()
    }
    every = [(point[SCORES["trust"]], point[ORACLE]) for own in pooled.values() for point in own]
    correlations[ALL_RANKED] = float(spearmanr(every).statistic)
    generator = random.Random(0)
    draws = [generator.sample(sorted(pooled), min(DRAWN, len(pooled))) for _ in range(DRAWS)]
    of_eight = [lost({name: pooled[name] for name in names}) for names in draws]
    by_round = [lost({name: own}) for name, own in pooled.items() if is_ranked(name)]
    return {
        name: {
            "correlation": correlations.get(name, 0.0),
            "lost": value,
            "lost, of 8": statistics.fmean(each[name] for each in of_eight),
            "lost, rounds": statistics.fmean(each[name] for each in by_round),
        }
        for name, value in lost(pooled).items()
    }


def lost(pooled: dict[str, list[Point]]) -> dict[str, float]:
    """By score: accuracy below that of a pool's best model, of the one with the highest score; of equal ones the first.

    "chance" and "last" are means over all models and over the last of each method. Models that scores do not rank are
    not taken.
    """
    everything = [point for own in pooled.values() for point in own]
    best = max(point[ORACLE] for point in everything)
    pooled = {name: own for name, own in pooled.items() if is_ranked(name)}
    points = [point for own in pooled.values() for point in own]
    taken = {
        name: points[max(range(len(points)), key=scores.__getitem__)][ORACLE]
        for name, scores in scores_of(points).items()
    }
    taken[ALL_RANKED] = max(everything, key=lambda point: point[SCORES["trust"]])[ORACLE]
    taken["chance"] = statistics.fmean(point[ORACLE] for point in points)
    taken["last"] = statistics.fmean(own[-1][ORACLE] for own in pooled.values())
    return {name: best - accuracy for name, accuracy in taken.items()}


def summed_up(judged: dict[int, list[dict[str, Point]]]) -> dict[str, dict[str, Any]]:
    """By score and figure, mean and spread over seeds of the average over targets."""
    names = next(iter(judged.values()))[0]
    found: dict[str, dict[str, Any]] = {
        name: {
            figure: spread(
                [statistics.fmean(rows[name][figure] for rows in of_targets) for of_targets in judged.values()],
                factor=1.0 if figure == "correlation" else 100.0,
                places=2,
            )
            for figure in row
        }
        for name, row in names.items()
    }
    for name, row in found.items():
        row["worst"] = round(100 * max(rows[name]["lost"] for of_targets in judged.values() for rows in of_targets), 2)
    return found


def main() -> None:
    """Train, judge, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--every", type=int, default=3, help="Rounds from one validation to the next.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Runs side by side, one thread each.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--targets", nargs="+", help="Those alone, of all data sets.")
    parser.add_argument(
        "--points",
        type=Path,
        help="Keep every validation of every run in this JSON file; what it has is not run again.",
    )
    options = parser.parse_args()
    results = Results(options.out, "torch", "lightning", "scipy")
    names = methods()
    known = options.points is not None and options.points.exists()
    kept: dict[str, dict[str, dict[str, list[Point]]]] = json.loads(options.points.read_text()) if known else {}
    for data in options.data:
        targets = [target for target in DATA[data][2] if target in (options.targets or DATA[data][2])]
        cells = [(target, seed) for seed in options.seeds for target in targets]
        there = kept.setdefault(data, {})
        missing = [cell for cell in cells if f"{cell[0]}, {cell[1]}" not in there]
        train = partial(pool, data, names=names, most=options.rounds, every=options.every)
        with ThreadPoolExecutor(options.jobs) as workers:
            for (target, seed), found in zip(
                missing, workers.map(lambda cell, to=train: to(*cell), missing), strict=True
            ):
                there[f"{target}, {seed}"] = found
        pools = {(target, seed): there[f"{target}, {seed}"] for target, seed in cells}
        if options.points:
            options.points.write_text(json.dumps(kept))
        judged = {seed: [judge(pools[target, seed]) for target in targets] for seed in options.seeds}
        results.keep(summed_up(judged), data, POOL)
        for score, row in summed_up(judged).items():
            show(f"{data}: {score}", row)


if __name__ == "__main__":
    main()
