"""Tables and figures of FedRF-TCA's papers that are no runs of `fedlit fit`: for ``fedlit/papers/fedrf_tca_v*.yaml``.

Run from the repository root: python benchmarks/fedrf_tca_papers.py [--parts sizes gamma]

message  Numbers that a client sends in a round (second version, table II), from bytes in the ledger.
office_caltech_pairs, office_caltech_seconds, office_caltech_kernels  The 12 pairs of Office-Caltech-10 (tables VII,
    VIII and XI of the first version): accuracies of a nearest neighbour on shallow methods' components, CPU seconds,
    and kernels. DaNN is FedDAN with one kernel on a hidden layer; as in the shipped configuration of FedDAN, features
    are aligned in the second half of the rounds, and seconds are wall seconds of training.
sizes    RF-TCA over N (figure 3): averages over the 12 pairs, next to the other methods'.
gamma    TCA and R-TCA from amazon to webcam over gamma (first version, figure 5), classified by an SVM.
bytes    Accuracy on the target when a run has sent so many megabytes: FedRF-TCA with N random features next to FedAvg;
    drawn in fedrf_tca_bytes.png.

Random features, networks and curves are of seeds 0 to 2; other shallow methods draw nothing. All but "message" read
features of Office-Caltech-10.
"""

from __future__ import annotations

import csv
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.svm import SVC

from fedlit.papers.experiments import fit, run_parts, spread
from fedlit.shallow import CORAL, GFK, JDA, RFTCA, RTCA, TCA
from office_caltech_shallow import TASKS, features_file, load, nearest, unit

SEEDS = (0, 1, 2)
UNIT: dict[str, Any] = {"n_components": 100, "scaling": "unit"}
ROWS: dict[str, Any] = {
    "Vanilla TCA": TCA(**UNIT),
    "TCA": RTCA(**UNIT),
    "RF-TCA (N = 1000)": RFTCA(n_frequencies=1000, **UNIT),
    "RF-TCA (N = 500)": RFTCA(n_frequencies=500, **UNIT),
    "JDA": JDA(),
    "CORAL": CORAL(reg=1.0, center=True),
    "GFK": GFK(20),
    "without adaptation": None,
}
"""Of which "Vanilla TCA" is TCA, and "TCA" R-TCA, as the papers call them."""
KERNELS = {"Gauss": ROWS["RF-TCA (N = 500)"], "Laplace": RFTCA(n_frequencies=500, kernel="laplace", **UNIT)}
SIZES = (100, 500, 1000, 2000, 5000)
GAMMAS = tuple(10.0**exponent for exponent in range(-8, 4))
OPTION = "--model.init_args."
CURVES = {
    "FedAvg": ["--compare=null", "--model=fedlit.methods.FedAvg"],
    **{
        f"FedRF-TCA, N = {size}, m = {width}": [
            "--compare=null", f"{OPTION}num_frequencies={size}", f"{OPTION}num_components={width}",
            f"{OPTION}classifier_period=10",
        ]
        for size, width in ((50, 16), (100, 32), (500, 32))
    },
}  # fmt: skip
MEGABYTES = (1, 3, 10, 30, 100)


def initials(source: str, target: str) -> str:
    """A pair of domains, as the papers' columns name it."""
    return f"{source[0].upper()}→{target[0].upper()}"


def of_pairs(rows: Mapping[str, Any]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Accuracies of a nearest neighbour and CPU seconds, by row, by pair of domains and seed."""
    domains = load("efficientnet_lite0")
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, estimator in rows.items():
        cells = found.setdefault(name, {"accuracy": {}, "seconds": {}})
        seeds = SEEDS if isinstance(estimator, RFTCA) else SEEDS[:1]
        for (source, target), seed in itertools.product(TASKS, seeds):
            (xs, ys), (xt, yt) = domains[source], domains[target]
            components, which = np.vstack([unit(xs), unit(xt)]), np.repeat([1, -1], [len(xs), len(xt)])
            if estimator is not None:
                drawn = {"random_state": seed} if isinstance(estimator, RFTCA) else {}
                labels = np.concatenate([ys, np.full(len(yt), -1)])
                start = time.process_time()
                components = estimator.set_params(**drawn).fit_transform(components, labels, sample_domain=which)
                cells["seconds"].setdefault(initials(source, target), []).append(time.process_time() - start)
            score = nearest(components[: len(xs)], ys, components[len(xs) :], yt)
            cells["accuracy"].setdefault(initials(source, target), []).append(score)
        print(name, {pair: round(statistics.fmean(each), 1) for pair, each in cells["accuracy"].items()}, flush=True)
    return found


@cache
def dann() -> dict[str, dict[str, list[float]]]:
    """Accuracy on all samples of the target, and wall seconds of training, by pair and seed."""
    found: dict[str, dict[str, list[float]]] = {"accuracy": {}, "seconds": {}}
    for source, target in TASKS:
        with tempfile.TemporaryDirectory() as folder:
            runs = fit(
                folder,
                "--config=experiments/office_caltech_baselines",
                "--config=methods/fed_dan_one_kernel",
                "--compare=null",
                "--targets=null",
                f"--seeds={list(SEEDS)}",
                f"{OPTION}warmup_rounds=0.5",
                f"--data.init_args.path={features_file('efficientnet_lite0')}",
                f"--data.init_args.clients=[{source},{target}]",
                f"--data.init_args.target={target}",
            ).values()
        pair = initials(source, target)
        found["accuracy"][pair] = [100 * run["oracle_accuracy"] for run in runs]
        found["seconds"][pair] = [run["seconds_total"] for run in runs]
        print(pair, found["accuracy"][pair], found["seconds"][pair], flush=True)
    return found


@cache
def compared() -> dict[str, dict[str, dict[str, list[float]]]]:
    """All rows of tables VII and VIII."""
    return {**of_pairs(ROWS), "DaNN": dann()}


def shown(rows: Mapping[str, Mapping[str, Mapping[str, list[float]]]], measure: str) -> dict[str, dict[str, Any]]:
    """Means and spreads over seeds by pair, and of their average over pairs; of what draws nothing, the figures."""
    found: dict[str, dict[str, Any]] = {}
    for name, measures in rows.items():
        cells = measures[measure]
        if cells:
            averages = [statistics.fmean(each) for each in zip(*cells.values(), strict=True)]
            found[name] = {pair: _figure(values) for pair, values in {**cells, "Avg": averages}.items()}
            if len(averages) > 1:
                found[name]["seeds"] = list(SEEDS)
    return found


def _figure(values: list[float]) -> Any:
    return spread(values, 1.0, 2) if len(values) > 1 else round(values[0], 2)


def sizes() -> dict[str, dict[str, Any]]:
    """Average accuracies of a nearest neighbour, and CPU seconds of a pair."""
    others = {name: row for name, row in ROWS.items() if row is not None and not isinstance(row, RFTCA)}
    rows = of_pairs(others | {f"RF-TCA, N = {size}": RFTCA(n_frequencies=size, **UNIT) for size in SIZES})
    accuracies, seconds = shown(rows, "accuracy"), shown(rows, "seconds")
    return {
        name: {
            "accuracy": row["Avg"],
            "seconds": seconds[name]["Avg"],
            **({"seeds": list(SEEDS)} if "seeds" in row else {}),
        }
        for name, row in accuracies.items()
    }


def gamma() -> dict[str, dict[str, float]]:
    """Accuracies by gamma, and the two numbers around which it begins to matter (remark 3)."""
    domains = load("efficientnet_lite0")
    (xs, ys), (xt, yt) = domains["amazon"], domains["webcam"]
    pooled, which = np.vstack([unit(xs), unit(xt)]), np.repeat([1, -1], [len(xs), len(xt)])
    rows: dict[str, dict[str, float]] = {}
    for name, kind in (("TCA", TCA), ("R-TCA", RTCA)):
        rows[name] = {}
        for value in GAMMAS:
            components = kind(gamma=value, **UNIT).fit_transform(pooled, sample_domain=which)
            scaled = components / np.sqrt(np.mean((components[: len(xs)] - components[: len(xs)].mean(axis=0)) ** 2))
            score = SVC().fit(scaled[: len(xs)], ys).score(scaled[len(xs) :], yt)
            rows[name][f"{value:.0e}"] = round(100 * score, 1)
        print(name, rows[name], flush=True)
    distances = ((pooled[:, None] - pooled[None]) ** 2).sum(axis=2) if len(pooled) < 500 else _distances(pooled)
    width = np.median(np.sqrt(distances[np.triu_indices(len(pooled), 1)]))
    kernel = np.exp(-distances / (2 * width**2))
    contrast = np.repeat([1 / len(xs), -1 / len(xt)], [len(xs), len(xt)])
    rows["l'K²l"] = {"value": round(float(contrast @ kernel @ kernel @ contrast), 4)}
    rows["l'Kl"] = {"value": round(float(contrast @ kernel @ contrast), 5)}
    print(rows["l'K²l"], rows["l'Kl"], flush=True)
    return rows


def _distances(x: Any) -> Any:
    squares = (x**2).sum(axis=1)
    return np.maximum(squares[:, None] + squares[None] - 2 * x @ x.T, 0)


def message() -> dict[str, dict[str, float]]:
    """Millions of numbers that the source sends in one round of the paper's networks."""
    import lightning
    from torch.utils.data import TensorDataset

    from fedlit import FederatedStrategy
    from fedlit.data import FederatedLoader
    from fedlit.federation import Everyone
    from fedlit.methods import FedAvg, FedRFTCA
    from fedlit.models import Head, ResNet

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    sizes: dict[str, Any] = {"num_frequencies": 1000, "num_components": 800, "classifier_period": 1}
    cases: dict[str, Callable[[list[str]], Any]] = {
        "FedAvg": lambda clients: FedAvg(clients, "target", 10, ResNet(50)),
        "FedAvg, frozen up to layer3": lambda clients: FedAvg(clients, "target", 10, ResNet(50, freeze="layer3")),
        "FedRF-TCA": lambda clients: FedRFTCA(
            clients, "target", 10, ResNet(50, freeze="layer3"), Head(800, 10), **sizes
        ),
    }
    rows = {}
    for name, make in cases.items():
        images = {
            client: TensorDataset(torch.randn(2, 3, 32, 32), torch.tensor([0, 1])) for client in ("source", "target")
        }
        module = make([*images])
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", strategy=FederatedStrategy(participation=Everyone()),
            enable_model_summary=False, **quiet,
        )  # fmt: skip
        trainer.fit(module, FederatedLoader(images, 2))
        sent = dict.fromkeys(module.federation.channels, 0.0)
        for entry in module.federation.ledger:
            if entry.sender == "source" and entry.channel in sent:
                sent[entry.channel] += entry.num_bytes / 4e6
        features = sent.pop("features", 0.0)
        weights = sum(sent.values())
        rows[name] = {
            "Data-dependent features": round(features, 4), "Model parameters": round(weights, 3),
            "Sum": round(features + weights, 3),
        }  # fmt: skip
        print(name, rows[name], flush=True)
    return rows


def curves() -> dict[str, dict[str, Any]]:
    """Accuracy of the last evaluation before the run has sent so many megabytes, mean over the four targets."""
    rows: dict[str, dict[str, Any]] = {}
    for name, arguments in CURVES.items():
        with tempfile.TemporaryDirectory() as folder:
            configs = [
                "--config=experiments/office_caltech_fedrftca",
                f"--seeds={list(SEEDS)}",
                f"--data.init_args.path={features_file('efficientnet_lite0')}",
                "--trainer.max_epochs=15",
            ]
            runs = {seed: [] for seed in SEEDS}  # type: dict[int, list[list[tuple[float, float]]]]
            for place, summary in fit(folder, *configs, *arguments).items():
                runs[summary["seed"]].append(_curve(place))
        rows[name] = {"seeds": list(SEEDS)}
        for limit in MEGABYTES:
            reached = [
                [accuracy for megabytes, accuracy in curve if megabytes <= limit][-1:]
                for curves_of_seed in runs.values()
                for curve in curves_of_seed
            ]
            if all(reached):
                size = len(reached) // len(SEEDS)
                means = [statistics.fmean(each[0] for each in reached[start : start + size])
                         for start in range(0, len(reached), size)]  # fmt: skip
                rows[name][f"{limit} MB"] = spread(means)
        rows[name]["MB in all"] = round(statistics.fmean(curve[-1][0] for each in runs.values() for curve in each), 1)
        rows[name]["at the end"] = spread([statistics.fmean(curve[-1][1] for curve in each) for each in runs.values()])
        print(name, rows[name], flush=True)
    return rows


def _curve(place: Path) -> list[tuple[float, float]]:
    """Megabytes that were sent up to an evaluation, but those of metrics, and accuracy on the target."""
    with (place / "ledger.csv").open() as file:
        book = [row for row in csv.DictReader(file) if row["channel"] not in ("metrics", "oracle")]
    with (place / "metrics.csv").open() as file:
        found = [row for row in csv.DictReader(file) if row.get("oracle/target/acc")]
    curve = []
    for row in found:  # one local step is a round
        megabytes = sum(float(each["bytes"]) for each in book if int(each["round"]) <= int(row["step"])) / 1e6
        curve.append((megabytes, float(row["oracle/target/acc"])))
    return curve


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "message": message,
    "office_caltech_pairs": lambda: shown(compared(), "accuracy"),
    "office_caltech_seconds": lambda: shown(compared(), "seconds"),
    "office_caltech_kernels": lambda: shown(of_pairs(KERNELS), "accuracy"),
    "sizes": sizes,
    "gamma": gamma,
    "bytes": curves,
}


def picture(rows: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Accuracy over megabytes, of means over seeds."""
    figure = Figure(figsize=(6.5, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for name, row in rows.items():
        points = [(limit, row[f"{limit} MB"]) for limit in MEGABYTES
                  if f"{limit} MB" in row and limit < row["MB in all"]]  # fmt: skip
        points.append((row["MB in all"], row["at the end"]))
        sizes, means = [size for size, _ in points], [point["mean"] for _, point in points]
        axes.errorbar(sizes, means, [point["std"] for _, point in points], marker="o", capsize=3, label=name)
    axes.set_xscale("log")
    axes.set_xlabel("megabytes that all clients sent and got")
    axes.set_ylabel("accuracy on the target (oracle), per cent")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


if __name__ == "__main__":
    made = run_parts(__doc__, __file__, PARTS, "torch", "lightning", "scikit-learn")
    if "bytes" in made.found:
        picture(made.found["bytes"]).savefig(made.out.with_name("fedrf_tca_bytes.png"), dpi=110)
