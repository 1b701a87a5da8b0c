"""Tables and figures of FedRF-TCA's papers that are no runs of `fedlit fit`: for ``fedlit/papers/fedrf_tca_v*.yaml``.

Run from the repository root: python benchmarks/fedrf_tca_papers.py [--parts sizes gamma]

message  Numbers that a client sends in a round (second version, table II), from bytes in the ledger.
dann     DaNN, FedDAN with one kernel on a hidden layer, on the 12 pairs of Office-Caltech-10, of seeds 0 to 2. As in
    the shipped configuration of FedDAN, features are aligned in the second half of the rounds.
office_caltech_pairs  Rows of benchmarks/office_caltech_shallow.json as the papers have them (tables VII, VIII and XI of
    the first version): accuracies of a nearest neighbour, CPU seconds, and kernels. With DaNN as "dann" has it.
sizes    RF-TCA over N (figure 3): averages over the 12 pairs of Office-Caltech-10, next to the other methods'.
gamma    TCA and R-TCA from amazon to webcam over gamma (first version, figure 5), classified by an SVM.
bytes    Accuracy on the target when a run has sent so many megabytes: FedRF-TCA with N random features next to FedAvg.
"""

from __future__ import annotations

import csv
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.svm import SVC

from fedlit.papers.experiments import fit, run_parts
from office_caltech_shallow import TASKS, load, nearest, unit

SHALLOW = Path(__file__).with_name("office_caltech_shallow.json")
ROWS = {
    "Vanilla TCA": "TCA, all dimensions, m=100, unit",
    "TCA": "R-TCA, all dimensions, m=100, unit",
    "RF-TCA (N = 1000)": "RF-TCA N=1000, all dimensions, m=100, unit",
    "RF-TCA (N = 500)": "RF-TCA N=500, all dimensions, m=100, unit",
    "JDA": "JDA m=30, all dimensions",
    "CORAL": "CORAL r=1 centred, all dimensions",
    "GFK": "GFK d=20, all dimensions",
    "without adaptation": "none, all dimensions",
}
KERNELS = {"Gauss": ROWS["RF-TCA (N = 500)"], "Laplace": "RF-TCA N=500 Laplace, all dimensions, m=100, unit"}
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


def pairs(rows: dict[str, str], measure: str, factor: float) -> dict[str, dict[str, float]]:
    """Figures of office_caltech_shallow.json by the paper's rows and pairs of domains."""
    tasks = json.loads(SHALLOW.read_text())["results"]["efficientnet_lite0"]["tasks"]
    found: dict[str, dict[str, float]] = {}
    for name, row in rows.items():
        cells = {}
        for pair, values in tasks.items():
            if measure in values[row]:
                cells[initials(*pair.split("->"))] = round(factor * values[row][measure], 2)
        if cells:
            found[name] = cells | {"Avg": round(statistics.fmean(cells.values()), 2)}
    return found


def dann() -> dict[str, dict[str, float]]:
    """Accuracy on all samples of the target, and wall seconds of training: means over the seeds."""
    found: dict[str, dict[str, float]] = {"accuracy": {}, "seconds": {}}
    for source, target in TASKS:
        with tempfile.TemporaryDirectory() as folder:
            runs = fit(
                folder,
                "--config=experiments/office_caltech_baselines",
                "--config=methods/fed_dan_one_kernel",
                "--compare=null",
                "--targets=null",
                f"{OPTION}warmup_rounds=0.5",
                f"--data.init_args.clients=[{source},{target}]",
                f"--data.init_args.target={target}",
            ).values()
        pair = initials(source, target)
        found["accuracy"][pair] = round(100 * statistics.fmean(run["oracle_accuracy"] for run in runs), 2)
        found["seconds"][pair] = round(statistics.fmean(run["seconds_total"] for run in runs), 2)
        print(pair, found["accuracy"][pair], found["seconds"][pair], flush=True)
    return {measure: cells | {"Avg": round(statistics.fmean(cells.values()), 2)} for measure, cells in found.items()}


def with_dann(rows: dict[str, dict[str, float]], measure: str) -> dict[str, dict[str, float]]:
    """Rows of the shallow methods, and that of DaNN, which is none."""
    return rows | {"DaNN": json.loads(Path(__file__).with_suffix(".json").read_text())["results"]["dann"][measure]}


def sizes() -> dict[str, dict[str, float]]:
    """Average accuracies of a nearest neighbour, and CPU seconds of a pair."""
    from fedlit.shallow import RFTCA

    domains = load("efficientnet_lite0")
    accuracies, seconds = (pairs(ROWS, measure, 1.0) for measure in ("1-NN", "seconds"))
    rows = {
        name: {"accuracy": row["Avg"], "seconds": seconds[name]["Avg"]}
        for name, row in accuracies.items()
        if name in seconds and not name.startswith("RF-TCA")
    }
    for size in SIZES:
        scores, taken = [], []
        for source, target in TASKS:
            (xs, ys), (xt, yt) = domains[source], domains[target]
            pooled, which = np.vstack([unit(xs), unit(xt)]), np.repeat([1, -1], [len(xs), len(xt)])
            start = time.process_time()
            estimator = RFTCA(n_frequencies=size, n_components=100, scaling="unit")
            components = estimator.fit_transform(pooled, sample_domain=which)
            taken.append(time.process_time() - start)
            scores.append(nearest(components[: len(xs)], ys, components[len(xs) :], yt))
        rows[f"RF-TCA, N = {size}"] = {
            "accuracy": round(statistics.fmean(scores), 2), "seconds": round(statistics.fmean(taken), 2),
        }  # fmt: skip
        print(f"RF-TCA, N = {size}", rows[f"RF-TCA, N = {size}"], flush=True)
    return rows


def gamma() -> dict[str, dict[str, float]]:
    """Accuracies by gamma, and the two numbers around which it begins to matter (remark 3)."""
    from fedlit.shallow import RTCA, TCA

    domains = load("efficientnet_lite0")
    (xs, ys), (xt, yt) = domains["amazon"], domains["webcam"]
    pooled, which = np.vstack([unit(xs), unit(xt)]), np.repeat([1, -1], [len(xs), len(xt)])
    rows: dict[str, dict[str, float]] = {}
    for name, kind in (("TCA", TCA), ("R-TCA", RTCA)):
        rows[name] = {}
        for value in GAMMAS:
            components = kind(n_components=100, gamma=value, scaling="unit").fit_transform(pooled, sample_domain=which)
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


def curves() -> dict[str, dict[str, float]]:
    """Accuracy of the last evaluation before the run has sent so many megabytes, mean over the four targets."""
    rows: dict[str, dict[str, float]] = {}
    for name, arguments in CURVES.items():
        with tempfile.TemporaryDirectory() as folder:
            configs = [
                "--config=experiments/office_caltech_fedrftca",
                "--seeds=[0]",
                "--trainer.max_epochs=15",
            ]
            places = fit(folder, *configs, *arguments)
            runs = [_curve(place) for place in places]
        reached: dict[str, list[float]] = {}
        for limit in MEGABYTES:
            for curve in runs:
                before = [accuracy for megabytes, accuracy in curve if megabytes <= limit]
                reached.setdefault(f"{limit} MB", []).extend(before[-1:])
        rows[name] = {
            key: round(100 * statistics.fmean(each), 1) for key, each in reached.items() if len(each) == len(runs)
        }
        rows[name]["MB in all"] = round(statistics.fmean(curve[-1][0] for curve in runs), 1)
        rows[name]["at the end"] = round(100 * statistics.fmean(curve[-1][1] for curve in runs), 1)
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
    "dann": dann,
    "office_caltech_pairs": lambda: with_dann(pairs(ROWS, "1-NN", 1.0), "accuracy"),
    "office_caltech_seconds": lambda: with_dann(pairs(ROWS, "seconds", 1.0), "seconds"),
    "office_caltech_kernels": lambda: pairs(KERNELS, "1-NN", 1.0),
    "sizes": sizes,
    "gamma": gamma,
    "bytes": curves,
}


if __name__ == "__main__":
    run_parts(__doc__, __file__, PARTS, "torch", "lightning", "scikit-learn")
