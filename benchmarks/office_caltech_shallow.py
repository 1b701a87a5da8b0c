"""Office-Caltech-10 with shallow adaptation: TCA, R-TCA, RF-TCA, CORAL, JDA and GFK, on 12 pairs of domains.

Run from the repository root: python benchmarks/office_caltech_shallow.py [--families none tca others]

With ``--families`` the other rows of the JSON stay as they are.

The setting of FedRF-TCA (arXiv 2311.04686), tables VII, VIII and XI, but no hyper-parameter is chosen by target labels:
the estimators of fedlit.shallow keep their defaults (median bandwidth, gamma that of a chance assignment), except for
the number of components m, which is 100 as in the paper and 30 as in another public TCA. The row named "oracle"
takes the best target accuracy over a part of the paper's grid, as the paper does; nobody without target labels can.

SURF: counts divided by their sum, z-scored in each domain, and unit norm. Z-scores in each domain adapt by themselves,
and "none" has them. EfficientNet-Lite0: unit norm. "PCA 30": the pooled samples on their 30 principal axes beforehand,
because N random features cannot tell apart samples in hundreds of noisy dimensions.

1-NN, and an MLP of 2 x 100 hidden units after 30 epochs of Adam: mean and standard deviation over 3 seeds of the
average over tasks. The MLP's inputs are centred and divided by one number, both from source samples.
Seconds are CPU time of one thread for fit_transform, summed over the 12 tasks.

CORAL with r = "auto" of fedlit.shallow, centred or not, and with the paper's r = 1, which presumes z-scores and does
next to nothing to rows of length 1. JDA with the paper's lambda = 1 and m = 30 (there are 30 axes after PCA 30), its
classes guessed by nearest neighbours as published, or by class means; "pseudo-labels" is the accuracy of its last
guesses. GFK with d of 10 and 20 (at most half the dimensions), and by subspace disagreement.

"no alignment" is RF-TCA with gamma = 1e6, at which the distance between domains counts for nothing: what it gains over
"none" is the kernel's doing, not that of adaptation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

# before numpy and scipy are imported: CPU time sums over threads
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import numpy as np
import scipy
import sklearn
import torch
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier

from fedlit.shallow import CORAL, GFK, JDA, RFTCA, RTCA, TCA

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
DOMAINS = ("amazon", "caltech10", "dslr", "webcam")
TASKS = list(itertools.permutations(DOMAINS, 2))
SETS = ("surf", "efficientnet_lite0")
METHODS = {
    "TCA": TCA(),
    "R-TCA": RTCA(),
    "RF-TCA N=500": RFTCA(),
    "RF-TCA N=1000": RFTCA(n_frequencies=1000),
    "no alignment N=500": RFTCA(gamma=1e6),
    "RF-TCA N=500 Laplace": RFTCA(kernel="laplace"),
}
OTHERS = {
    "CORAL": CORAL(),
    "CORAL centred": CORAL(center=True),
    "CORAL r=1 centred": CORAL(reg=1.0, center=True),
    "JDA m=30": JDA(),
    "JDA m=30, class means": JDA(labelling="class_mean"),
    "GFK d=10": GFK(10),
    "GFK d=20": GFK(20),
    "GFK d=auto": GFK("auto"),
}
FAMILIES = ("none", "tca", "others")
INPUTS = {"all dimensions": None, "PCA 30": 30}
COMPONENTS = (30, 100)
SEEDS = (0, 1, 2)
ORACLE_GRID = {"gamma": (1e-3, 1.0, 1e3), "bandwidth": (5.0, 15.0)}

Array = NDArray[np.float64]


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def z_scores(counts: Array) -> Array:
    shares = counts / counts.sum(axis=1, keepdims=True)
    deviation = shares.std(axis=0)
    return (shares - shares.mean(axis=0)) / np.where(deviation > 0, deviation, 1)


def features_file(features: str) -> Path:
    """A file of features of Office-Caltech-10 beside the repository, or where configurations have it."""
    name = f"office_caltech10_{features}.npz"
    for folder in (DATA, Path("../shared/data")):
        if (folder / name).is_file():
            return (folder / name).resolve()
    sys.exit(
        f"no features ../shared/data/{name} here ({Path.cwd()}): this benchmark reads features of the photographs of "
        "Office-Caltech-10; `fedlit features` makes such a file of photographs, or of other ones with the same domains"
    )


def load(features: str) -> dict[str, tuple[Array, Array]]:
    """Samples (before unit norm) and labels of every domain."""
    with np.load(features_file(features)) as arrays:
        domains = {name: (arrays[f"{name}_x"].astype(np.float64), arrays[f"{name}_y"]) for name in DOMAINS}
    return {name: (z_scores(x) if features == "surf" else x, y) for name, (x, y) in domains.items()}


def nearest(xs: Array, ys: Array, xt: Array, yt: Array) -> float:
    return 100 * KNeighborsClassifier(1).fit(xs, ys).score(xt, yt)


def mlp(xs: Array, ys: Array, xt: Array, yt: Array, seed: int) -> float:
    centre = xs.mean(axis=0)
    scale = np.sqrt(np.mean((xs - centre) ** 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the number of epochs is fixed beforehand
        classifier = MLPClassifier((100, 100), max_iter=30, random_state=seed).fit((xs - centre) / scale, ys)
    return 100 * classifier.score((xt - centre) / scale, yt)


def accuracies(components: Array, size: int, ys: Array, yt: Array, with_mlp: bool) -> dict[str, float]:
    """1-NN and, with each seed, the MLP, on components whose first ``size`` rows are source samples."""
    parts = components[:size], ys, components[size:], yt
    found = {"1-NN": nearest(*parts)}
    return found | ({f"MLP {seed}": mlp(*parts, seed) for seed in SEEDS} if with_mlp else {})


def task_rows(
    source: str, target: str, domains: dict[str, tuple[Array, Array]], families: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Rows of the table, for one pair of domains."""
    (xs, ys), (xt, yt) = domains[source], domains[target]
    size, sample_domain = len(xs), np.repeat([1, -1], [len(xs), len(xt)])
    pooled = np.vstack([unit(xs), unit(xt)])
    rows: dict[str, dict[str, float]] = {}
    if "none" in families:
        rows["none, without unit norm"] = {"1-NN": nearest(xs, ys, xt, yt)}
    for kind, dimensions in INPUTS.items():
        inputs = pooled if dimensions is None else PCA(dimensions, svd_solver="covariance_eigh").fit_transform(pooled)
        if "none" in families:
            rows[f"none, {kind}"] = accuracies(inputs, size, ys, yt, with_mlp=True)
        if "others" in families:
            rows |= other_rows(inputs, kind, sample_domain, ys, yt)
        for name, estimator in METHODS.items() if "tca" in families else ():
            start = time.process_time()
            fitted = estimator.set_params(n_components=max(COMPONENTS), scaling="unit")
            components = fitted.fit_transform(inputs, sample_domain=sample_domain)
            seconds = time.process_time() - start
            # both scalings have the same components but for their lengths, and fewer components are the first ones
            lengths = np.linalg.norm(components - components.mean(axis=0), axis=0)
            for m, scaling in itertools.product(COMPONENTS, ("unit", "constraint")):
                part = (components if scaling == "unit" else components / lengths)[:, :m]
                with_mlp = scaling == "unit" and m == (100 if dimensions is None else 30)
                row = accuracies(part, size, ys, yt, with_mlp)
                rows[f"{name}, {kind}, m={m}, {scaling}"] = {**row, "seconds": seconds}
    if "tca" in families:
        scores = [
            nearest(part[:size], ys, part[size:], yt)
            for gamma, bandwidth in itertools.product(*ORACLE_GRID.values())
            for part in [RFTCA(gamma=gamma, bandwidth=bandwidth).fit_transform(pooled, sample_domain=sample_domain)]
        ]
        rows["oracle: RF-TCA N=500, all dimensions, m=100, unit"] = {"1-NN": max(scores)}
    return rows


def other_rows(inputs: Array, kind: str, sample_domain: Array, ys: Array, yt: Array) -> dict[str, dict[str, float]]:
    """Rows of CORAL, JDA and GFK; the target's labels are not told."""
    told = np.concatenate([ys, np.full(len(yt), -1)])
    rows = {}
    for name, estimator in OTHERS.items():
        if isinstance(estimator, GFK) and estimator.n_components == 20 and inputs.shape[1] < 40:
            continue
        start = time.process_time()
        components = estimator.fit_transform(inputs, told, sample_domain=sample_domain)
        seconds = time.process_time() - start
        row = {**accuracies(components, len(ys), ys, yt, with_mlp=True), "seconds": seconds}
        if isinstance(estimator, JDA):
            row["pseudo-labels"] = 100 * float(np.mean(estimator.pseudo_labels_ == yt))
            row["iterations"] = float(estimator.n_iter_)
        rows[f"{name}, {kind}"] = row
    return rows


def average(tasks: dict[str, dict[str, dict[str, float]]], row: str) -> dict[str, float]:
    """Averages over tasks; the MLP's mean and standard deviation over seeds are those of the average."""
    of_tasks = [rows[row] for rows in tasks.values()]
    means = {column: statistics.mean(task[column] for task in of_tasks) for column in of_tasks[0]}
    seeds = [means.pop(f"MLP {seed}") for seed in SEEDS if f"MLP {seed}" in means]
    if seeds:
        means |= {"MLP": statistics.mean(seeds), "MLP std": statistics.stdev(seeds)}
    if "seconds" in means:
        means["seconds"] *= len(of_tasks)
    return means


def show(name: str, row: dict[str, float]) -> None:
    network = f"{row['MLP']:6.2f} +- {row['MLP std']:4.2f}" if "MLP" in row else " " * 14
    seconds = f"{row['seconds']:8.1f}" if "seconds" in row else ""
    print(f"{name:60} {row['1-NN']:6.2f}  {network}  {seconds}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="rows to run")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    partly = len(set(options.families)) < len(FAMILIES) and options.out.is_file()
    kept = json.loads(options.out.read_text())["results"] if partly else {}
    results: dict[str, object] = {}
    for features in SETS:
        domains = load(features)
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
            work = partial(task_rows, domains=domains, families=options.families)
            found = list(pool.map(work, *zip(*TASKS, strict=True)))
        tasks = {f"{source}->{target}": rows for (source, target), rows in zip(TASKS, found, strict=True)}
        means = {row: average(tasks, row) for row in tasks["amazon->caltech10"]}
        print(f"\n{features + ', average of 12 tasks':60}   1-NN  MLP             CPU s")
        for name, row in means.items():
            show(name, row)
        old = kept.get(features, {"average": {}, "tasks": {task: {} for task in tasks}})
        results[features] = {
            "average": old["average"] | means,
            "tasks": {task: old["tasks"][task] | rows for task, rows in tasks.items()},
        }
    result = {
        "results": results,
        "oracle_grid": ORACLE_GRID, "seeds": {"mlp": SEEDS, "frequencies": 0}, "threads": 1, "cores": os.cpu_count(),
        "command": "python benchmarks/office_caltech_shallow.py", "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
            "scipy": scipy.__version__, "scikit-learn": sklearn.__version__,
        },
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
