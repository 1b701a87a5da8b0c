"""FedDaDiL: accuracy next to other methods, client parallelism, sensitivity, communication, and distillation.

Run from the repository root: python benchmarks/dadil_accuracy.py [--parts methods parallelism] [--jobs 2]

Every cell of the first four parts is one ``fedlit fit`` over targets and seeds. Accuracies are those of the last
round, on the target's hidden labels, which nothing was chosen by; "round_by_score" is the round that the label-free
score chooses, "round_by_oracle" the best one, which no federation could choose. R predicts by the reconstruction, E by
the ensemble of the atoms, in the same run.

methods        The experiments *_feddadil: EfficientNet and SURF features of Office-Caltech-10, and digits.
parallelism    E local epochs in a round, and 240 / E rounds, so that all take 240 local epochs (Table 3 does not tell
    its number of rounds; its E are the same).
selection      Learning rates of the atoms, with the label-free score (mean over targets and seeds) and the accuracy
    beside it.
sensitivity    K, n and n_b, one at a time. Both with EfficientNet features and as many local steps as E = 4 of
    parallelism, which is the row that all others differ from.
communication  Numbers that a client sends in a round, K n (d + C), next to those of an encoder with d features.
distillation   Classifiers of barycenters with 1, 5, 10 and 20 points per class, next to those of as many samples per
    class drawn from the sources, and drawn from the target with its hidden labels, which are an oracle.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlit.papers.experiments import Results, by_method, fit, show, spread

METHODS = ("office_caltech_feddadil", "office_caltech_surf_feddadil", "digits_feddadil")
OFFICE = METHODS[0]
LOCAL_EPOCHS = 240
EPOCHS = (1, 2, 4, 5, 10)
SENSITIVITY = {
    "K = 1": ["num_atoms=1"],
    "K = 2": ["num_atoms=2"],
    "n = 100, n_b = 100": ["atom_size=100"],
    "n_b = 100": ["atom_batch_size=100"],
    "n_b = 50": ["atom_batch_size=50"],
    "K = 5": ["num_atoms=5"],
    "n = 400, n_b = 200": ["atom_size=400", "atom_batch_size=200"],
}
"""What is changed in the experiment's dictionary: K = 3, n = n_b = 200. The dearest come last."""
SELECTION = {f"atom_lr = {rate}": [f"atom_lr={rate}"] for rate in (0.001, 0.01)}
"""The experiment's is 0.003."""
NOT_OF_E = ("selected_accuracy", "best_accuracy", "target_score")
"""What a summary tells of the prediction that the method is set to, R."""
PER_CLASS = (1, 5, 10, 20)


def run(experiment: str, *arguments: str) -> list[dict[str, Any]]:
    """Summaries of all runs; FedDaDiL's once for each of its predictions."""
    with tempfile.TemporaryDirectory() as folder:
        found = list(fit(folder, f"--config=experiments/{experiment}", *arguments).values())
    rows = []
    for each in found:
        others = each["oracle_alternatives"]
        if not others:
            rows.append(each)
            continue
        rows.append({**each, "method": "FedDaDiL, R"})
        ensemble = {"method": "FedDaDiL, E", "oracle_accuracy": others["ensemble"]}
        rows.append({**each, **ensemble, **dict.fromkeys(NOT_OF_E)})
    return rows


def parallel(epochs: int) -> list[str]:
    """Arguments of E local epochs: as many local steps, as a pass over the atoms is one step."""
    rounds = LOCAL_EPOCHS // epochs
    return [
        f"--trainer.strategy.init_args.local_steps={epochs}",
        f"--trainer.max_epochs={rounds + 1}",  # in the first one sources tell their class moments
        f"--trainer.check_val_every_n_epoch={rounds // 6}",
        "--compare=null",
    ]


def communication() -> dict[str, Any]:
    """Millions of numbers that a client sends in a round of phase 2, and of its encoder."""
    import torchvision

    resnet = torchvision.models.resnet50(weights=None)
    efficient = torchvision.models.efficientnet_b0(weights=None)
    cases = {
        "EfficientNet-B0, d = 1280": (1280, numbers(efficient.features)),
        "ResNet-50, d = 2048": (2048, numbers(resnet) - numbers(resnet.fc)),
    }
    found = {}
    for name, (width, encoder) in cases.items():
        atoms = 3 * 200 * (width + 10)
        found[name] = {
            "atoms_millions": round(atoms / 1e6, 3),
            "encoder_millions": round(encoder / 1e6, 3),
            "relative_percent": round(100 * atoms / encoder, 1),
        }
    return found


def numbers(network: torch.nn.Module) -> int:
    """Of its parameters."""
    return sum(param.numel() for param in network.parameters())


def distillation(seeds: list[int]) -> dict[str, Any]:
    """By samples per class: accuracy on the target of classifiers of a summary and of random subsets."""
    from fedlit.cli import FedlitCLI, quieten
    from fedlit.functional import softmax_regression
    from fedlit.methods import FedDaDiL

    quieten()
    accuracies: dict[str, dict[int, dict[int, list[float]]]] = {}
    targets = ("amazon", "caltech10", "dslr", "webcam")
    for target in targets:
        for seed in seeds:
            config = [f"--config=experiments/{OFFICE}", "--compare=null", "--seeds=null", "--targets=null"]
            with tempfile.TemporaryDirectory() as folder:
                where = [f"--data.target={target}", f"--seed_everything={seed}", f"--trainer.default_root_dir={folder}"]
                cli = FedlitCLI(["fit", *config, *where], one_of_many=True)
            module, data = cli.model, cli.datamodule
            assert isinstance(module, FedDaDiL)
            domains = {name: data.load(name) for name in targets}
            x, y = domains[target].x.float(), domains[target].y
            pooled = [domains[name] for name in targets if name != target]
            sources = torch.cat([each.x.float() for each in pooled]), torch.cat([each.y for each in pooled])
            generator = torch.Generator().manual_seed(seed)
            for number in PER_CLASS:
                samples = {
                    "FedDaDiL, distilled": module.distill(number),
                    "random samples of the sources": drawn(*sources, number, generator),
                    "random samples of the target (oracle)": drawn(x, y, number, generator),
                }
                for name, (points, labels) in samples.items():
                    weight, bias = softmax_regression(points, labels, module.penalty)
                    right = (x.double() @ weight.T.double() + bias.double()).argmax(dim=1) == y
                    by_seed = accuracies.setdefault(name, {}).setdefault(number, {})
                    by_seed.setdefault(seed, []).append(float(right.double().mean()))
            print(f"distilled {target}, seed {seed}", flush=True)
    return {
        name: {
            str(number): spread([sum(values) / len(values) for values in by_seed.values()])
            for number, by_seed in rows.items()
        }
        for name, rows in accuracies.items()
    }


def drawn(x: Tensor, y: Tensor, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """As many samples of each class as there are, up to ``number``, and their classes one-hot."""
    order = torch.randperm(len(y), generator=generator)
    kept = torch.cat([order[y[order] == label][:number] for label in range(int(y.max()) + 1)])
    return x[kept], torch.nn.functional.one_hot(y[kept], int(y.max()) + 1).to(x.dtype)


def main() -> None:
    """Run the chosen parts, and write the JSON after each cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["methods", "parallelism", "selection", "sensitivity", "communication", "distillation"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--experiments", nargs="+", choices=METHODS, default=METHODS, help="Of the methods' tables.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Runs side by side, one thread each.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    results = Results(options.out, "torch", "lightning", "POT")
    seeds = f"--seeds={options.seeds}"

    def cell(part: str, name: str, runs: Callable[[], list[dict[str, Any]]]) -> None:
        rows = by_method(runs())
        results.keep(rows, part, name)
        for method, row in rows.items():
            show(f"{name}: {method}", row)

    jobs: list[tuple[str, str, list[str]]] = []
    if "methods" in options.parts:
        jobs += [("methods", name, [name, seeds]) for name in options.experiments]
    if "parallelism" in options.parts:
        jobs += [("parallelism", f"E = {epochs}", [OFFICE, seeds, *parallel(epochs)]) for epochs in EPOCHS]
    for part, cases in (("selection", SELECTION), ("sensitivity", SENSITIVITY)):
        for name, changed in cases.items() if part in options.parts else ():
            arguments = [f"--model.init_args.{each}" for each in changed]
            jobs.append((part, name, [OFFICE, seeds, *parallel(4), *arguments]))
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda job: cell(job[0], job[1], lambda: run(*job[2])), jobs))
    if "communication" in options.parts:
        results.keep(communication(), "communication")
        for name, row in results.found["communication"].items():
            print(name, row)
    if "distillation" in options.parts:
        torch.set_num_threads(1)
        results.keep(distillation(options.seeds), "distillation")
        for name, row in results.found["distillation"].items():
            show(name, {f"{number} per class": each for number, each in row.items()})


if __name__ == "__main__":
    main()
