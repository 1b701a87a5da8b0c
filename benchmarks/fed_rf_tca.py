"""FedRF-TCA: accuracy next to SourceOnly and FedAvg, lost messages, remedies of its loss, closed form, and bytes.

Run from the repository root: python benchmarks/fed_rf_tca.py [--parts robustness] [--cases sketches] [--jobs 2]

Every cell is one ``fedlit fit`` over targets and seeds; accuracies are those of the last round, on the target's hidden
labels, which nothing was chosen by. Results go into benchmarks/fed_rf_tca.json as they come; parts that are not run
keep their figures. The papers' tables are those of "Robust and Communication-Efficient Federated Domain Adaptation via
Random Features", first and second version.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning
import torch

from fedlit.papers.experiments import Results, by_method, fit, show

ACCURACY = ["office_caltech_fedrftca", "office_caltech_images_fedrftca", "digit_five_fedrftca"]
OPTION = "--model.init_args."
ALONE = ["--compare=null"]
CASES = {
    "office": ["office_caltech_fedrftca", f"{OPTION}num_frequencies=500"],
    "sketches": ["office_caltech_styles_fedrftca"],
}
"""Experiments of the robustness tables: smaller than those of the accuracy table, as there are many."""

SETTINGS = {
    "no features": ["fedrf_tca_no_features"],
    "A / A / A": ["fedrf_tca_a_a_a"],
    "A / A / B": ["fedrf_tca_a_a_b"],
    "A / B / C": ["fedrf_tca_a_b_c"],
    "(I)": ["fedrf_tca_i"],
    "(II)": ["fedrf_tca_ii"],
    "(III)": ["fedrf_tca_iii"],
    "(II), T_C = 10": ["fedrf_tca_ii", f"{OPTION}classifier_period=10"],
    "(II), T_C = 200": ["fedrf_tca_ii", f"{OPTION}classifier_period=200"],
    "(A) all / all, vote": ["fedrf_tca_iv"],
    "(B) ordered, vote": ["fedrf_tca_b"],
    "(C) ordered / random, vote": ["fedrf_tca_c"],
    "(D) random, vote": ["fedrf_tca_d"],
    "(E) random / random, vote": ["fedrf_tca_v"],
}
"""Settings of Tables II, IV/V (T_C is 1 in (I) and (II), 50 in (III)) and XIII to XV; the first lacks all messages."""

REMEDIES = {
    f"{constraint}, {'unbiased' if unbiased else 'biased'}": [
        f"{OPTION}constraint={constraint}",
        f"{OPTION}unbiased={str(unbiased).lower()}",
    ]
    for constraint in ("none", "relative", "orthogonal")
    for unbiased in (False, True)
}

CLOSED_FORM = {f"N = {frequencies}": f"{OPTION}num_frequencies={frequencies}" for frequencies in (500, 1000)}


def run(experiment: str, *extra: str, config: str | None = None) -> list[dict[str, Any]]:
    """Summaries of all runs of one experiment."""
    configs = [f"--config=experiments/{experiment}"]
    configs += [] if config is None else [f"--config=settings/{config}"]
    with tempfile.TemporaryDirectory() as folder:
        return list(fit(folder, *configs, *extra).values())


def ledger() -> dict[str, Any]:
    """One round of FedAvg of a ResNet-50 and one of FedRF-TCA on it, in bytes and numbers, as the ledger books them.

    The paper's sizes: N = 1000, m = 800, a classifier 800-100-100-10.
    """
    from torch import nn
    from torch.utils.data import TensorDataset

    from fedlit import FederatedStrategy
    from fedlit.data import FederatedLoader
    from fedlit.federation import Everyone
    from fedlit.methods import FedAvg, FedRFTCA
    from fedlit.models import ResNet

    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    result: dict[str, Any] = {"paper_million_numbers": {"FedAvg": 25.637, "FedRF-TCA": 1.692}}
    for method in (FedAvg, FedRFTCA):
        given: dict[str, Any] = {}
        if method is FedRFTCA:
            given = {"num_frequencies": 1000, "num_components": 800, "classifier_period": 1}
            head = [nn.Linear(800, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)]
            given["classifier"] = nn.Sequential(*head)
        images = {name: TensorDataset(torch.randn(2, 3, 32, 32), torch.tensor([0, 1])) for name in ("source", "target")}
        module = method(["source", "target"], "target", 10, ResNet(50), **given)
        strategy = FederatedStrategy(participation=Everyone())
        trainer = lightning.Trainer(max_epochs=1, strategy=strategy, **quiet)
        trainer.fit(module, FederatedLoader(images, 2))
        book = module.federation.ledger
        sent = {c: size for c, size in book.bytes_by_channel().items() if c not in ("metrics", "oracle")}
        up = {c: sum(e.num_bytes for e in book if e.channel == c and e.sender == "source") for c in sent}
        result[method.__name__] = {
            "bytes_of_one_round": sent,
            "source_sends_bytes": up,
            "source_sends_million_numbers": round(sum(up.values()) / 4e6, 3),
        }
        print(method.__name__, result[method.__name__], flush=True)
    return result


def main() -> None:
    """Run the chosen parts, and write the JSON after each cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["accuracy", "robustness", "remedies", "closed_form", "ledger"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="Data of the robustness.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Runs side by side, one thread each.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    results = Results(options.out, "torch", "lightning")

    def cell(part: str, name: str, run: Callable[[], list[dict[str, Any]]]) -> None:
        rows = by_method(run())
        results.keep(rows, part, name)
        for method, row in rows.items():
            show(f"{name}: {method}", row)

    jobs: list[tuple[str, str, Callable[[], list[dict[str, Any]]]]] = []
    if "accuracy" in options.parts:
        jobs += [("accuracy", name, lambda name=name: run(name)) for name in ACCURACY]  # type: ignore[misc]
    if "robustness" in options.parts:
        for case in options.cases:
            experiment, *extra = CASES[case]
            for setting, (config, *more) in SETTINGS.items():
                arguments = [*extra, *more, *ALONE]
                jobs.append((
                    "robustness",
                    f"{case}, {setting}",
                    lambda e=experiment, a=tuple(arguments), c=config: run(e, *a, config=c),  # type: ignore[misc]
                ))  # fmt: skip
    if "remedies" in options.parts:
        experiment, *extra = CASES["office"]
        for remedy, more in REMEDIES.items():
            arguments = [*extra, *more, *ALONE]
            jobs.append(("remedies", remedy, lambda a=tuple(arguments): run(experiment, *a)))  # type: ignore[misc]
    if "closed_form" in options.parts:
        for size, argument in CLOSED_FORM.items():
            experiment = "office_caltech_fedrftca_closed_form"
            jobs.append(("closed_form", size, lambda e=experiment, a=argument: run(e, a)))  # type: ignore[misc]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda job: cell(*job), jobs))
    if "ledger" in options.parts:
        results.keep(ledger(), "ledger", "ResNet-50")


if __name__ == "__main__":
    main()
