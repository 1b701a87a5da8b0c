"""Tables of the pages in docs/ and of RESULTS.md, made from the benchmarks' JSON files.

Run from the repository root: python benchmarks/tables.py [NAME ...] [--results FILE] [--write]

Prints the tables of the benchmarks NAME (all of them if none is given). ``--results`` has newer figures of one
benchmark, which take the place of the repository's, figure by figure. ``--write`` puts every table into its page,
below the comment ``<!-- table: NAME/TABLE -->`` that belongs to it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import fedgp
import leaderboard
from fedlit.papers.entries import entry
from fedlit.tables import COLLAPSED, Table
from refine import FORMS, OTHERS, SIZES, SPREADS

HERE = Path(__file__).parent
PAGES = (HERE.parent / "README.md", HERE / "RESULTS.md", *sorted((HERE.parent / "docs").rglob("*.md")))
OFFICE = ("amazon", "caltech10", "dslr", "webcam")
SELECTION = {"round_by_score": "round by score", "round_by_oracle": "round by oracle"}
DADIL = ("FedAvg", "FedProx", "FedRFTCA", "FedDaDiL, E", "FedDaDiL, R")
PRINTED = {
    # tables of averages over Office-Caltech-10 in fedlit/papers, and their names of methods: Montesuma et al. 2024,
    # Table 2a, and Feng et al. 2023, Table IV, whose FedRF-TCA (III) has a random subset of the sources and averages
    # classifiers seldom, as is shipped
    "fed_dadil": ("table-2a", {
        "FedAvg": "FedAVG", "FedProx": "FedProx", "FedDaDiL, E": "FedDaDiL-E", "FedDaDiL, R": "FedDaDiL-R",
        "FedDaDiL": "FedDaDiL-R", "FedWDGRL": "f-WDGRL", "KD3A": "KD3A", "CoMDA": "Co-MDA",
    }),
    "fedrf_tca_v1": ("table-4", {
        "SourceOnly": "ResNet101", "AdaBN": "AdaBN", "FedDAN": "f-DAN", "FedDANN": "f-DANN", "FADA": "FADA",
        "FedRFTCA": "FedRF-TCA (III)",
    }),
}  # fmt: skip
Results = dict[str, Any]

TEN = (10.0,)
"""Percent of the test samples that a class has where ten have as many."""
HEARTS = {
    "cleveland": (45.9, 54.1), "hungary": (36.1, 63.9), "switzerland": (93.5, 6.5), "va_long_beach": (74.5, 25.5),
}  # fmt: skip
"""Percent of all patients of a hospital that are ill, and that are not."""
CLASS_SHARES: dict[str, dict[str, tuple[float, ...]]] = {
    "noise": dict.fromkeys(("0.2", "0.4", "0.6", "0.8"), TEN),
    "state_kept": {"0.4": TEN},
    "label_shift": {  # of a class that the target has much of, and of one that it has little of
        "0.45": (11.46, 9.38), "0.3": (16.67, 7.14), "0.15": (23.61, 4.17), "0.1": (26.47, 2.94),
        "0.05": (29.69, 1.56), "0.0": (33.33,),
    },
    "heart": {  # of the test patients, a third
        "cleveland": (45.63, 54.37), "hungary": (36.0, 64.0), "switzerland": (92.86, 7.14),
        "va_long_beach": (75.0, 25.0),
    },
}  # fmt: skip
"""By part of fedgp.json and column: percent of the target's test samples that a class has."""


def printed(paper: str, method: str) -> float | None:
    """The average over Office-Caltech-10 that a paper printed of a method; ``None`` where it has none."""
    table, names = PRINTED[paper]
    return float(entry(paper, table).paper[names[method]]["average"]) if method in names else None


def cell(figure: Any, shares: Sequence[float] = ()) -> str:
    """A mean and its spread, to a tenth, and a mark where the model has collapsed; a dash where there is none."""
    if figure is None:
        return "-"
    return f"{figure['mean']:.1f} ± {figure['std']:.1f}{mark(figure, shares)}"


def mark(figure: dict[str, Any], shares: Sequence[float]) -> str:
    """How many seeds are exactly as accurate as naming one class, if that is no coincidence.

    It may be one where a class has most of the samples, unless all seeds are. Figures without seeds have collapsed
    where their mean is a class's share and their spread 0.

    Args:
        figure: Mean, spread, and if known accuracies by seed.
        shares: Percent of the samples that each class has, to as many digits as the figures.
    """
    seeds = [*figure.get("by_seed", {}).values()]
    hits = [share for value in seeds for share in shares if abs(value - share) < 0.006]
    if not seeds:
        hits = [share for share in shares if figure["std"] == 0 and abs(figure["mean"] - share) < 0.06]
        return f" {COLLAPSED}" if hits else ""
    if not hits or (len(hits) < len(seeds) and max(hits) > 50):
        return ""
    return f" {COLLAPSED} {len(hits)}/{len(seeds)}"


def grid(corner: str, columns: Iterable[str], rows: Iterable[tuple[str, Iterable[str]]]) -> str:
    """A table in Markdown."""
    headings = [corner, *columns]
    lines = [[name, *cells] for name, cells in rows]
    table = Table.of(headings, lines, words=len(headings)).markdown(escaped=False)
    if COLLAPSED in table:
        table += f"\n| {COLLAPSED} as accurate as naming one class, in so many seeds |{' |' * (len(headings) - 1)}"
    return table


def fedgp_part(part: str) -> Callable[[Results], str]:
    """Ours, and in brackets the paper's."""

    def make(results: Results) -> str:
        columns = {name: results[part][name] for name in fedgp.COLUMNS[part] if name in results[part]}
        rows = [
            (
                title,
                [
                    fedgp.written(column.get(method))
                    + (mark(column[method], CLASS_SHARES[part].get(name, ())) if method in column else "")
                    for name, column in columns.items()
                ],
            )
            for method, title in fedgp.METHODS.items()
            if any(method in column for column in columns.values())
        ]
        return grid(part, columns, rows)

    return make


def fedgp_state(results: Results) -> str:
    """Optimisers that start anew in each round next to those that keep their state."""
    kept = results["state_kept"]["0.4"]
    rows = {"Adam anew in each round": results["noise"]["0.4"], "Adam keeps its state": kept}
    return grid(
        "noise 0.4",
        [title for method, title in fedgp.METHODS.items() if method in kept],
        [(name, [cell(row[method], TEN) for method in fedgp.METHODS if method in kept]) for name, row in rows.items()],
    )


def dadil_methods(experiment: str, corner: str, targets: tuple[str, ...], paper: bool = False) -> Callable[..., str]:
    """Methods by target, and what choosing a round comes to."""

    def make(results: Results) -> str:
        found = results["methods"][experiment]
        keys = [*targets, "average", *SELECTION]
        rows = []
        for method in DADIL:
            cells = [cell(found[method].get(key)) for key in keys]
            rows.append((method, cells + ([str(printed("fed_dadil", method) or "-")] if paper else [])))
        headings = [*targets, "average", *SELECTION.values()]
        return grid(corner, headings + (["the paper's average"] if paper else []), rows)

    return make


def dadil_parallelism(results: Results) -> str:
    """By E; in brackets the paper's, on another data set."""
    found = {name.removeprefix("E = "): row for name, row in results["parallelism"].items()}
    numbers = sorted(found, key=int)
    paper = entry("fed_dadil", "table-3").paper
    rows = []
    for method, theirs in (("FedDaDiL, E", "DaDiL-E"), ("FedDaDiL, R", "DaDiL-R")):
        ours = (cell(found[number][method]["average"]) for number in numbers)
        in_paper = (paper[theirs][f"E = {number}"] for number in numbers)
        rows.append((method, [f"{mine} ({other})" for mine, other in zip(ours, in_paper, strict=True)]))
    return grid("local epochs in a round", numbers, rows)


def dadil_sensitivity(results: Results) -> str:
    """What differs from K = 3, n = n_b = 200; no spread where there is one seed."""
    methods = ("FedDaDiL, R", "FedDaDiL, E")
    rows = []
    for name, row in {"K = 3, n = n_b = 200": results["parallelism"]["E = 4"], **results["sensitivity"]}.items():
        averages = [(row[method]["average"], len(row[method]["seeds"])) for method in methods]
        rows.append((name, [cell(each) if seeds > 1 else f"{each['mean']:.1f}" for each, seeds in averages]))
    return grid("dictionary", methods, rows)


def dadil_distillation(results: Results) -> str:
    """By samples per class."""
    rows = results["distillation"]
    numbers = list(next(iter(rows.values())))
    return grid("samples per class", numbers, [(name, [cell(row[n]) for n in numbers]) for name, row in rows.items()])


def fed_mmd_office(results: Results) -> str:
    """Both lengths of the features."""
    keys = ("oracle_balanced_accuracy", "oracle_f1")
    parts = [results["office_L4"], results["office_L64"]]
    names = dict.fromkeys(name for part in parts for name in part)
    return grid(
        "Office-Caltech features",
        ["L = 4: balanced accuracy", "weighted F1", "L = 64: balanced accuracy", "weighted F1"],
        [(name, [cell(part.get(name, {}).get(key)) for part in parts for key in keys]) for name in names],
    )


def moments_accuracy(results: Results) -> str:
    """What few samples of gradients cost."""
    keys = ("oracle_balanced_accuracy", "oracle_f1")
    rows = [
        (name, [cell(row[key]) for key in keys]) for name, row in results["accuracy"].items() if name != "same_bits"
    ]
    return grid("pairwise, 8 features, degree 3", ["balanced accuracy", "weighted F1"], rows)


def moments_solved(results: Results) -> str:
    """What receivers learn about the moments of one batch, and for how many of them these are solved."""
    columns = {"moments": "moments", "numbers": "most_outputs", "rank": "most_rank"}
    columns |= {"bits of the numbers": "most_bits_of_outputs", "bits of the moments": "least_bits_of_moments"}
    rows = [
        (title, [*(str(case[key]) for key in columns.values()), f"{case['solved']} of {case['sets_of_moments']}"])
        for title, case in (
            ("as shipped: 8 features, degree 3", results["shipped"]),
            ("`reveal_moments`: 4 features, degree 2", results["paper"]),
        )
    ]
    return grid("about one batch", [*columns, "solved"], rows)


def fed_mmd_hearts(results: Results) -> str:
    """The disease, and the heart rate."""
    disease, rate = results["heart"], results["heart_rate"]
    rows = []
    for name, row in disease.items():
        figures = [row["oracle_balanced_accuracy"], row["oracle_f1"], rate[name]["oracle_r2"]]
        rows.append((name, [cell(figure) for figure in figures]))
    return grid("hearts", ["disease: balanced accuracy", "weighted F1", "heart rate: R2 in %"], rows)


def fed_rf_tca_accuracy(results: Results) -> str:
    """Experiments with all their methods."""
    rows = []
    for experiment, methods in results["accuracy"].items():
        for method, row in methods.items():
            cells = [method, f"**{cell(row['average'])}**", by_target(row), *(cell(row[k]) for k in SELECTION)]
            rows.append((f"`{experiment}`", cells))
    return grid("`configs/experiments/`", ["method", "average", "by target", *SELECTION.values()], rows)


def fed_rf_tca_closed_form(results: Results) -> str:
    """By number of frequencies."""
    rows = [
        (size, [f"`{method}`", f"**{cell(row['average'])}**", by_target(row)])
        for size, methods in results["closed_form"].items()
        for method, row in methods.items()
    ]
    return grid("frequencies", ["method", "average", "by target"], rows)


def by_target(row: dict[str, Any]) -> str:
    """Each target's figure, in one cell."""
    targets = [key for key, figure in row.items() if isinstance(figure, dict) and "mean" in figure]
    return ", ".join(f"{t} {cell(row[t])}" for t in targets if t not in ("average", "target_score", *SELECTION))


def fed_rf_tca_robustness(results: Results) -> str:
    """Settings, on features of photographs, and with sketches as the target of other styles."""
    found = results["robustness"]
    columns = {"office": "Office-Caltech features, N=500", "sketches": "styles, target sketch"}
    settings = dict.fromkeys(name.split(", ", 1)[1] for name in found)
    rows = []
    for setting in settings:
        each = [found.get(f"{data}, {setting}") for data in columns]
        rows.append((setting, [cell(row["FedRFTCA"]["average"]) if row else "-" for row in each]))
    return grid("setting", [*columns.values()], rows)


def fedrf_tca_bytes(results: Results) -> str:
    """Accuracies when so many megabytes were sent."""
    columns = [*(f"{megabytes} MB" for megabytes in (1, 3, 10, 30, 100)), "at the end", "MB in all"]
    rows = [
        (name, [cell(row.get(each)) if each != "MB in all" else str(row[each]) for each in columns])
        for name, row in results["bytes"].items()
    ]
    return grid("method", columns, rows)


def fed_rf_tca_remedies(results: Results) -> str:
    """Constraints on W, by estimator of the means."""
    found = results["remedies"]
    names = dict.fromkeys(name.split(", ")[0] for name in found)
    kinds = ("biased", "unbiased")
    rows = [(name, [cell(found[f"{name}, {kind}"]["FedRFTCA"]["average"]) for kind in kinds]) for name in names]
    return grid("`constraint`", kinds, rows)


def accuracy(results: Results) -> str:
    """By experiment and method."""
    rows = []
    for experiment, found in results.items():
        for method, row in found["target_accuracy_percent"].items():
            each = [f"**{key}** {cell(row[key])}" if key == "average" else f"{key} {cell(row[key])}" for key in row]
            rows.append((f"`{experiment}`, {len(found['seeds'])} seeds", [method, ", ".join(each)]))
    return grid("experiment", ["method", "accuracy by target"], rows)


VALIDATORS_DATA = {"digits": "digits", "office_caltech": "Office-Caltech", "surf": "SURF", "styles": "styles"}


def validators_lost(results: Results) -> str:
    """By score and data set: points lost by choosing method and round, on average over targets and at worst."""
    pool = "no label at the target"
    rows = []
    for name in results["digits"][pool]:
        found = [results[each][pool][name] for each in VALIDATORS_DATA]
        rank = sum(row["correlation"]["mean"] for row in found) / len(found)
        cells = [f"{cell(row['lost'])} ({row['worst']:.1f}), {cell(row['lost, of 8'])}" for row in found]
        rounds = sum(row["lost, rounds"]["mean"] for row in found) / len(found)
        rows.append((name, [*cells, f"{rank:.2f}", f"{rounds:.1f}"]))
    return grid("lost (worst), of 8", [*VALIDATORS_DATA.values(), "correlation", "lost, rounds"], rows)


COMBINED_DATA = {**VALIDATORS_DATA, "hapt": "HAPT", "hearts": "hospitals", "shifted": "styles, other class shares"}


def combining_lost(results: Results) -> str:
    """By data set: accuracies, points lost next to the best in hindsight, and calibration errors."""
    rows = []
    for name, row in results["combining"].items():
        cells = [cell(row[column]) for column in ("SourceOnly", "recipe", "best", "chosen", "combined")]
        for which in ("chosen", "combined"):
            cells.append(f"{cell(row[f'{which}, lost'])} ({row[f'{which}, worst']:.1f}; {row[f'{which}, below']:.1f})")
        cells += [cell(row[f"ece, {which}"]) for which in ("recipe", "combined")]
        number = len(row["seeds"])
        rows.append((f"{COMBINED_DATA[name]}, {number} seed{'s' * (number > 1)}", cells))
    columns = ["SourceOnly", "recipe", "best", "chosen", "combined", "chosen lost", "combined lost"]
    return grid("", [*columns, "ECE, recipe", "ECE, combined"], rows)


def combining_distribution(results: Results) -> str:
    """Over all data sets, targets and seeds: points lost next to the best in hindsight, and next to SourceOnly."""
    tasks = [cells for seeds in results["by seed"].values() for targets in seeds.values() for cells in targets.values()]
    rows = []
    for way in ("SourceOnly", "recipe", "chosen", "combined"):
        lost = sorted(cells["best"] - cells[way] for cells in tasks)
        shares = [lost[round(share * (len(lost) - 1))] for share in (0.25, 0.5, 0.75, 0.9, 1)]
        below = sum(cells["SourceOnly"] - cells[way] > 5 for cells in tasks)
        rows.append((way, [*(f"{each:.1f}" for each in shares), f"{below} of {len(tasks)}"]))
    return grid(
        "lost next to the best",
        ["a quarter", "half", "three quarters", "nine tenths", "all", "5 below SourceOnly"],
        rows,
    )


def combining_tasks(results: Results) -> str:
    """By data set and target: accuracies, and which methods trust takes."""
    rows = []
    for name, targets in results["tasks"].items():
        for target, row in targets.items():
            picks = Counter(seed.get(target, "none") for seed in results["picks"][name].values())
            cells = [cell(row[column]) for column in ("SourceOnly", "recipe", "best", "chosen", "combined")]
            taken = ", ".join(
                f"{method} ({number})" if number > 1 else method for method, number in picks.most_common()
            )
            rows.append((f"{COMBINED_DATA[name]}, {target}", [*cells, taken]))
    return grid("", ["SourceOnly", "recipe", "best", "chosen", "combined", "trust takes"], rows)


def one_round(results: Results) -> str:
    """By row: accuracy and calibration error on each data set, and megabytes of the first."""
    data = [each for each in results if each in COMBINED_DATA]
    rows = []
    for name in results[data[0]]:
        found = [results[each].get(name) for each in data]
        cells = [
            "-"
            if row is None
            else f"{row['accuracy']:.1f}; {row['ece']:.3f} ({row['ece, worst']:.3f}); {row['megabytes']:.1f} MB"
            for row in found
        ]
        rows.append((name, cells))
    return grid("accuracy; ECE (worst); sent", [COMBINED_DATA[each] for each in data], rows)


def one_round_backends(results: Results) -> str:
    """Largest relative difference of a head from that of the open sum."""
    found = results["backends"]
    backends = next(iter(found.values()))
    rows = [(head, [f"{row[each]:.0e}" for each in backends]) for head, row in found.items()]
    return grid("head", [each.replace("_", " ") for each in backends], rows)


OFFICE_FEATURES = "Office-Caltech features, average accuracy"
NOISE = "Fashion-MNIST with noise 0.4, accuracy"
RULES = ("FedDA", "FedGP", "FedDA(beta=auto)", "FedGP(beta=auto)")
HOSPITALS = "four hospitals, average accuracy"
MONTESUMA = "Montesuma et al. 2024, Table 2a"
FENG = "Feng et al. 2023, Table IV"
JIANG = "Jiang et al. 2024, Table "
Headline = tuple[str, str, tuple[str, ...], str, str, float | None, str]
HEADLINES: list[Headline] = [
    # Method, benchmark, where its JSON has the figure, task, configuration, a printed figure, and who printed it. What
    # Montesuma et al. and Feng et al. print is of fine-tuned ResNets.
    *(
        (
            name, "dadil_accuracy", ("methods", "office_caltech_feddadil", name, "average"), OFFICE_FEATURES,
            "office_caltech_feddadil", printed("fed_dadil", name), MONTESUMA,
        )
        for name in ("FedAvg", "FedProx", "FedDaDiL, R", "FedDaDiL, E")
    ),
    *(
        (
            name, "fed_rf_tca", ("accuracy", "office_caltech_fedrftca", name, "average"), OFFICE_FEATURES,
            "office_caltech_fedrftca", printed("fedrf_tca_v1", name), FENG,
        )
        for name in ("SourceOnly", "FedRFTCA")
    ),
    *(
        (
            name, "fed_rf_tca", ("closed_form", "N = 500", name, "average"), OFFICE_FEATURES,
            "office_caltech_fedrftca_closed_form", None, "",
        )
        for name in ("FedRFTCAClosedForm", "FedJDA")
    ),
    (
        "FedAnalytic", "baselines_accuracy", ("office_caltech", "FedAnalytic", "average"), OFFICE_FEATURES,
        "office_caltech_baselines", None, "",
    ),
    *(
        (
            name, "baselines_accuracy", ("office_caltech", name, "average"), OFFICE_FEATURES,
            "office_caltech_baselines", printed(paper, name), where,
        )
        for paper, where, names in (
            ("fedrf_tca_v1", FENG, ("AdaBN", "FedDAN", "FedDANN", "FADA")),
            ("fed_dadil", MONTESUMA, ("KD3A", "CoMDA", "FedWDGRL")),
        )
        for name in names
    ),
    *(
        (
            name, "baselines_accuracy", ("office_caltech", name, "average"), OFFICE_FEATURES,
            "office_caltech_baselines", None, "",
        )
        for name in ("FedCORAL", "FADE", "GALA", "SHOT", "T3A")
    ),
    (
        "TargetDistillation", "combining", ("combining", "office_caltech", "combined"),
        f"{OFFICE_FEATURES}, of a combination", "office_caltech_baselines", None, "",
    ),
    (
        "FedMME", "leaderboard", ("few labels", "office_caltech", "FedMME", "average"),
        f"{OFFICE_FEATURES}, 50 target labels", "office_caltech_baselines", None, "",
    ),
    (
        "FedMMD", "fed_mmd_accuracy", ("office_L64", "federated, masked", "oracle_balanced_accuracy"),
        "Office-Caltech features, L = 64, balanced accuracy", "office_caltech_fed_mmd_masking", None, "",
    ),
    *(
        (
            name, "fedgp", ("noise", "0.4", name), NOISE, "fashion_mnist_noise_fedgp",
            fedgp.paper("noise", name, "0.4"), f"{JIANG}12",
        )
        for name in (*RULES, "FinetuneOffline", "TargetOnly", "Oracle")
    ),
    *(
        (
            name, "fedgp", ("heart", "average", name), HOSPITALS, "heart_fedgp",
            fedgp.paper("heart", name, "average"), f"{JIANG}17",
        )
        for name in ("Ditto", "FedRep", "APFL", "KNNPer")
    ),
]  # fmt: skip
"""One figure of each method; a test compares them with `fedlit.methods`."""


def headlines(results: Results) -> str:
    """A figure of each method next to a printed one; ``results`` are those of all benchmarks, by name."""
    rows = []
    for method, benchmark, path, task, config, printed, where in HEADLINES:
        figure: Any = results[benchmark]
        for key in path:
            figure = figure[key]
        shares = CLASS_SHARES.get(path[0], {}).get(path[1], ()) if benchmark == "fedgp" else ()
        paper = "-" if printed is None else f"{printed:.1f} ({where})"
        rows.append((f"`{method}`", [task, cell(figure, shares), paper, f"`experiments/{config}`"]))
    return grid("method", ["task", "ours", "printed elsewhere", "`fedlit fit --config`"], rows)


ALL = "methods"
"""Tables from several benchmarks."""


def thousandths(figure: Any) -> str:
    """As `cell`, to a thousandth."""
    return "-" if figure is None else f"{figure['mean']:.3f} ± {figure['std']:.3f}"


def small_tables_auc(results: Results) -> str:
    """Before and after, and logistic regression on the same samples."""
    columns = ("as the paper's algorithm", "as configured")
    rows = [
        (label, [thousandths(row.get(column)) for column in columns])
        for label, row in results["auc"].items()
        if columns[1] in row
    ]
    hospitals = {"VA Long Beach": results["auc"], **{name.title(): row for name, row in results["others"].items()}}
    rows += [
        (f"{hospital}: {label}", [thousandths(row.get(column)) for column in columns])
        for hospital, labels in hospitals.items()
        if hospital != "VA Long Beach"
        for label, row in labels.items()
        if columns[1] in row
    ]
    rows += [
        (f"{hospital}: logistic regression, {name}", ["-", thousandths(figure)])
        for hospital, labels in hospitals.items()
        for name, figure in labels["logistic regression"].items()
    ]
    return grid("VA Long Beach, unless another is named", columns, rows)


def small_tables_calibration(results: Results) -> str:
    """Calibration errors, by what a temperature is found with."""
    ways = {
        "none": "no temperature",
        "sources": "sources",
        "weighted": "sources, weighted",
        "target": "target's labels",
    }
    rows = [
        (f"{label}: {name}", [thousandths(row[way][key]) for way in ways])
        for label, row in results["calibration"].items()
        for key, name in (("ece", "ECE"), ("brier", "Brier score"))
    ]
    return grid("lower is better", ways.values(), rows)


def batchnorm_methods(results: Results) -> str:
    """Accuracy at the targets by what is done with BatchNorm statistics."""
    columns = {name: name for row in results.values() for name in row}
    rows = []
    for case, row in results.items():
        lost = row["mean of second moments"].get("spread of means")
        share = "-" if lost is None else f"{lost:.1f}%"
        rows.append((case, [*(cell(row.get(name, {}).get("target")) for name in columns), share]))
    return grid("accuracy at the target", [*columns, "spread of the sources' means"], rows)


def shallow(results: Results) -> str:
    """1-NN and MLP accuracies, by features and inputs; the MLP's mean has a spread over seeds."""
    columns = {
        "SURF": ("surf", "all dimensions"),
        "SURF, PCA 30": ("surf", "PCA 30"),
        "EfficientNet": ("efficientnet_lite0", "all dimensions"),
        "EfficientNet, PCA 30": ("efficientnet_lite0", "PCA 30"),
    }
    with_m = {
        name: {"all dimensions": f"{name}, all dimensions, m=100, unit", "PCA 30": f"{name}, PCA 30, m=30, unit"}
        for name in ("TCA", "R-TCA", "RF-TCA N=500", "RF-TCA N=1000", "RF-TCA N=500 Laplace", "no alignment N=500")
    }
    plain = ("none", "CORAL", "CORAL centred", "CORAL r=1 centred", "JDA m=30", "JDA m=30, class means")
    plain += ("GFK d=10", "GFK d=20", "GFK d=auto")
    keys = {name: {kind: f"{name}, {kind}" for kind in ("all dimensions", "PCA 30")} for name in plain} | with_m
    titles = {"none": "no adaptation", "no alignment N=500": "control: RF-TCA without alignment (gamma = 1e6), N=500"}
    rows = []
    for name, by_kind in keys.items():
        found = [results[features]["average"].get(by_kind[kind]) for features, kind in columns.values()]
        cells = [
            "-" if row is None else f"{row['1-NN']:.1f} / {row['MLP']:.1f} ± {row['MLP std']:.1f}" for row in found
        ]
        rows.append((titles.get(name, name), cells))
        if name.startswith("JDA"):
            guessed = ["-" if row is None else f"{row['pseudo-labels']:.1f}" for row in found]
            rows.append((f"{name}: its last guesses", guessed))
    return grid("1-NN / MLP", columns, rows)


BASELINES_SHARES: dict[str, dict[str, tuple[float, ...]]] = {"hearts": HEARTS}
"""By part and target; ten classes have about as many samples elsewhere."""


def baselines(part: str, targets: tuple[str, ...], papers: bool = False) -> Callable[[Results], str]:
    """Methods by average accuracy: by target, what choosing a round comes to, bytes and seconds."""

    def make(results: Results) -> str:
        found = results[part]
        rows = []
        for method in sorted(found, key=lambda name: -found[name]["average"]["mean"]):
            row = found[method]
            shares = BASELINES_SHARES.get(part, dict.fromkeys(targets, TEN))
            cells = [cell(row.get(key), shares.get(key, ())) for key in (*targets, "average", *SELECTION)]
            cells += [
                f"{sum(row['megabytes'].values()):.1f}",
                f"{row['seconds'] / len(row['seeds']) / len(targets):.0f}",
            ]
            starred, other = (printed(paper, method) for paper in PRINTED)
            in_papers = str(other or "-") if starred is None else f"{starred}*"
            rows.append((method, cells + ([in_papers] if papers else [])))
        columns = [*targets, "average", *SELECTION.values(), "MB", "s"]
        return grid(part.replace("_", " "), columns + (["the papers'"] if papers else []), rows)

    return make


def signals_methods(results: Results) -> str:
    """Balanced accuracy by target, of methods around a network and of the recipe; bytes, seconds, memory."""
    people = [f"person{number}" for number in range(1, 7)]
    (recipe,) = results["features"].values()
    found = {"recipe on features": recipe, **results["methods"]}
    rows = []
    for method in sorted(found, key=lambda name: -found[name]["average"]["mean"]):
        row, cost = found[method], results["cost"][method]
        cells = [cell(row[key], TEN) for key in (*people, "average")]
        spent = (f"{sum(row['megabytes'].values()):.0f}", str(cost["cpu_seconds"]), str(cost["peak_mib"]))
        rows.append((method, [*cells, *spent]))
    return grid("HAPT", [*people, "average", "MB", "CPU s", "MiB"], rows)


def signals_masked(results: Results) -> str:
    """A plain run next to a masked one."""
    rows = []
    for method, row in results["masked"].items():
        ways = (row["plain"], row["masked"])
        cells = [f"{each['balanced_accuracy']:.1f} ({each['megabytes']:.0f} MB)" for each in ways]
        rows.append((method, [*cells, f"{row['greatest_loss_difference']:.0e}"]))
    return grid("person4, seed 0", ["plain", "masked", "greatest relative difference of a loss"], rows)


def refined(results: Results) -> str:
    """Averages over targets, as they are and refined."""
    parts = [part for part in results if part not in OTHERS]
    found = dict.fromkeys(name for part in parts for name in results[part])
    plain = [name for name in found if not name.endswith(tuple(filter(None, FORMS.values())))]
    names = [name + form for name in plain for form in FORMS.values() if name + form in found]
    rows = [(name, [cell(results[part].get(name, {}).get("average")) for part in parts]) for name in names]
    return grid("average over targets", [part.replace("_", " ") for part in parts], rows)


def in_targets_place(part: str) -> Callable[[Results], str]:
    """With sources in the target's place."""

    def make(results: Results) -> str:
        found = results[part]
        labels = list(next(iter(found.values())))
        rows = [(name.replace("_", " "), [f"{row[label]:.1f}" for label in labels]) for name, row in found.items()]
        return grid("sources", labels, rows)

    return make


def by_size(results: Results) -> str:
    """Accuracy of refined predictions by the number of samples and alpha."""
    names = ("as predicted", *SPREADS)
    cells = {
        (name, number): [f"{row[f'{number}, {label}']:.1f}" for label in names]
        for name, row in results["sizes"].items()
        for number in SIZES
        if f"{number}, as predicted" in row
    }
    return grid("target, samples", names, [(f"{name}, {number:,}", each) for (name, number), each in cells.items()])


def by_class_shares(results: Results) -> str:
    """Accuracy as predicted, and refined without a model and with one, by how many times the rarest class there is."""
    first = next(iter(results["shares"].values()))
    rows = [(name, [f"{row[label]:.1f}" for label in first]) for name, row in results["shares"].items()]
    return grid("target", list(first), rows)


def few_labels_in_targets_place(results: Results) -> str:
    """Methods with a few labels, on sources in the target's place; the first column's best first."""
    first = next(iter(results.values()))
    methods = sorted(first, key=lambda method: -first[method]["mean"])
    rows = [(method, [cell(rows_of.get(method)) for rows_of in results.values()]) for method in methods]
    return grid("sources in the target's place", [part.replace("_", " ") for part in results], rows)


def leaderboard_of(name: str) -> Callable[[Results], str]:
    """Methods by mean rank: averages over targets, and means of megabytes and seconds of a run over data sets."""

    def make(results: Results) -> str:
        board = results[name]
        ranks = {method: each for method, *each in leaderboard.standings(board)}
        methods = [*ranks, *dict.fromkeys(m for rows in board.values() for m in rows if m not in ranks)]
        rows = []
        for method in methods:
            there = [rows_of[method] for rows_of in board.values() if method in rows_of]
            costs = [leaderboard.per_run(row, len(leaderboard.targets_of(row))) for row in there]
            cells = [cell(rows_of.get(method, {}).get("average")) for rows_of in board.values()]
            cells += [f"{ranks[method][place]:.1f}" if method in ranks else "-" for place in (0, 1)]
            cells += [f"{sum(cost[place] for cost in costs) / len(costs):.0f}" for place in (0, 1)]
            rows.append((f"**{method}**" if method == leaderboard.RECOMMENDED else method, cells))
        columns = [part.replace("_", " ") for part in board]
        return grid("average over targets", [*columns, "mean rank", "mean accuracy", "MB", "s"], rows)

    return make


def default_gains(results: Results) -> str:
    """Points above SourceOnly, by cell and method; the method whose worst cell is best comes first."""
    least = {method: min(row[method] for row in results.values()) for method in next(iter(results.values()))}
    methods = sorted(least, key=lambda name: -least[name])
    cells = sorted(results, key=lambda name: (name.split(", ")[:-1], int(name.split(", ")[-1].split()[0])))
    rows = [(each, [f"{results[each][method]:+.1f}" for method in methods]) for each in cells]
    return grid("points above SourceOnly", methods, [*rows, ("worst", [f"{least[name]:+.1f}" for name in methods])])


def first_hours(results: Results) -> str:
    """By journey: minutes of installing, of all other commands and of reading, CPU seconds, and the longest command."""
    rows = []
    for name, found in results.items():
        install, *others = found["steps"]
        longest = max(others, key=lambda step: step["wall_s"])
        wall, cpu = (sum(step[unit] for step in others) for unit in ("wall_s", "cpu_s"))
        minutes = (f"{install['wall_s'] / 60:.1f}", f"{wall / 60:.1f}")
        cells = [*minutes, f"{cpu:.0f}", f"{found['reading_min']:.1f}", f"{found['minutes']:.0f}"]
        rows.append((name, [*cells, f"`{shortened(longest['step'])}`, {longest['wall_s']:.0f} s"]))
    columns = ["install, min", "commands, min", "CPU s", "reading, min", "all, min", "longest command"]
    return grid("from an empty folder", columns, rows)


def shortened(command: str) -> str:
    """The first words of a command."""
    return command if len(command) <= 60 else f"{command[:57]}..."


def image_accuracy(results: Results) -> str:
    """By method and target; seconds of a round, and memory."""
    rows = []
    for part in ("fine_tuned", "features"):
        found = results[part]
        for method, row in found["rows"].items():
            name = f"fixed features, recommended: {method}" if part == "features" else f"fine-tuned: {method}"
            seconds = f"{row['seconds_a_round']} s" if "seconds_a_round" in row else "-"
            cells = [cell(row[key]) for key in ("amazon", "webcam", "average")]
            rows.append((name, [*cells, seconds, f"{found['memory_mb']} MB"]))
    return grid("96 pixels", ["amazon", "webcam", "average", "a round", "memory"], rows)


def image_adapters(results: Results) -> str:
    """By what is trained: accuracy, and what a run sends."""
    rows, every = [], results["adapters"]["rows"]
    for name, row in every.items():
        cells = [cell(row[key]) for key in ("amazon", "webcam", "average")]
        sent, whole = (each["megabytes"]["weights"] for each in (row, every["all weights"]))
        rows.append((name, [*cells, f"{sent:.1f} MB", f"{whole / sent:.1f}"]))
    return grid("trained", ["amazon", "webcam", "average", "sent", "times less"], rows)


def baselines_privacy(results: Results) -> str:
    """Accuracy at one target and megabytes, by what carries the sums."""
    found = results["privacy"]
    ways = list(next(iter(found.values())))
    rows = [
        (method, [f"{row[way]['accuracy']:.1f} ({row[way]['megabytes']:.1f} MB)" for way in ways])
        for method, row in found.items()
    ]
    return grid("webcam, seed 0", ways, rows)


def baselines_speed(results: Results) -> str:
    """CPU time of a round, as a ratio, and what a local step says."""
    first, *_ = results.values()
    rows = []
    for method in first:
        cells = [f"{row[method]['ratio']:.2f}x ({row[method]['round_ms']:.1f} ms)" for row in results.values()]
        own = first[method]
        hands = [row[method].get("by hand") for row in results.values()]
        cells += [f"{hand['ratio']:.2f}x ({hand['round_ms']:.1f} ms)" if hand else "" for hand in hands]
        talk = [f"{own['sums']} ({own['sums_once']})", f"{own['announcements']} ({own['announcements_once']})"]
        rows.append((method, [*cells, *talk]))
    loops = [f"{network}, by hand" for network in results]
    talks = ("sums a step (once a round)", "announcements a step (once a round)")
    return grid("a round", [*results, *loops, *talks], rows)


def across_rounds(results: Results) -> str:
    """Milliseconds of a round, and times those of processes over gloo."""
    found = {(row["method"], row["way"]): 1000 * row["round_s"] for row in results["rounds"]}
    gloo = next(way for _, way in found if "gloo" in way)
    methods = list(dict.fromkeys(method for method, _ in found))
    ways = dict.fromkeys(way for _, way in found)
    rows = [
        (way, [f"{found[each, way]:.0f} ms ({found[each, way] / found[each, gloo]:.2f}x)" for each in methods])
        for way in ways
    ]
    return grid("a round", methods, rows)


def flare_ways(results: Results) -> str:
    """Milliseconds a round, and seconds of a command besides, by method and way to run."""
    found = results["equal"]
    methods = list(dict.fromkeys(row["method"] for row in found))
    ways = list(dict.fromkeys(row["way"] for row in found))
    rows = []
    for way in ways:
        of = {row["method"]: row for row in found if row["way"] == way}
        cells = [f"{1000 * of[name]['round_s']:.0f}" for name in methods]
        besides = max(of[name]["other_s"] for name in methods)
        equal = "yes" if all(of[name]["equal"] for name in methods) else "no"
        rows.append((way, [*cells, f"{besides:.0f}", equal]))
    return grid("", [*(f"{name}, ms a round" for name in methods), "start and end, s", "equal"], rows)


def across_memory(results: Results) -> str:
    """Of one mean."""
    rows = [
        (
            f"{row['backend']}, {row['model_mb']} MB, {row['sites']} sites",
            [
                f"{row['server_models']:.2f}",
                f"{row['server_peak_mb']:.0f} MB",
                f"{row['site_peak_mb']:.0f} MB",
                f"{min(row['round_s']):.1f} s",
            ],
        )
        for row in results["memory"]
    ]
    columns = ("models at the server", "server in all", "site in all", "a mean takes")
    return grid("backend, model", columns, rows)


def vanishing(results: Results) -> str:
    """Outcomes by moment and fault."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in results["faults"]:
        found.setdefault(f"{row['kind']} in {row['phase']}", []).append(row)
    names = ("finished", "stopped")
    rows = []
    for key, faults in sorted(found.items()):
        counts = [sum(each["outcome"] == name for each in faults) for name in names]
        rows.append(
            (
                key,
                [str(each) for each in (*counts, len(faults) - sum(counts))]
                + [f"{max(each['seconds'] for each in faults):.1f} s"],
            )
        )
    return grid("fault", ("finished as scheduled", "stopped, by name", "else", "noticed after, at most"), rows)


def memory_clients(results: Results) -> str:
    """MiB for each further local client, and times its weights and momenta."""
    rows = [
        (
            network,
            [
                str(case["weights_and_state_mib"]),
                *(f"{case[way]['mib']} ({case[way]['of_weights_and_state']}x)" for way in ("together", "in turns")),
            ],
        )
        for network, case in results.items()
        if "together" in case
    ]
    return grid("MiB by client", ["weights and momenta", "all at once", "in turns"], rows)


def memory_sums(results: Results) -> str:
    """Bytes by number of what each party of a sum takes."""
    steps = ["message", "client", "server adds", "server makes the total", "revealed"]
    rows = [
        (f"{name}, {row['numbers']:.0e} numbers".replace("e+0", "e"), [f"{row[step]:.1f}" for step in steps])
        for name, row in results["sums"].items()
    ]
    return grid("bytes by number", steps, rows)


def memory_state_dir(results: Results) -> str:
    """Peaks with weights and momenta in files."""
    case = results["state_dir"]
    inside, both = (
        case["in_memory"],
        zip(case["weights_and_state_mib"], case["peak_mib"], case["ms"], case["wall_ms"], strict=True),
    )
    rows = [
        (
            "10",
            [f"{case['weights_and_state_mib'][0]:,}", *(f"{inside[key]:,}" for key in ("peak_mib", "ms", "wall_ms"))],
        )
    ]
    rows += [
        (f"{number}, state_dir", [f"{each:,}" for each in row])
        for number, row in zip(case["clients"], both, strict=True)
    ]
    columns = ["weights and momenta, MiB", "peak, MiB", "a local step, CPU ms", "wall ms"]
    return grid("clients of ResNet-18, 96 pixels, batches of 8", columns, rows)


def peers_ways(results: Results) -> str:
    """One FedAvg job in fedlit and other frameworks."""
    rows = [
        (
            way,
            [
                f"{row['first_round_s']:.1f}",
                *(f"{row[key]:,.0f}" for key in ("wall_ms", "cpu_ms", "peak_mib")),
                f"{row['accuracy']:.1f}",
            ],
        )
        for way, row in results["ways"].items()
    ]
    columns = ["first round, s", "a round, wall ms", "CPU ms", "memory, MiB", "accuracy"]
    return grid("digits, 10 clients", columns, rows)


def scale_present(results: Results) -> str:
    """Cost of a federation of which 50 sources are present in a round."""
    rows = [
        (
            f"{int(number):,}",
            [
                f"{case['set_up_s']:.2f}",
                f"{case['round_ms']:.0f}",
                f"{case['peak_mib']:,}",
                f"{case['checkpoint_s']:.2f}",
                f"{case['checkpoint_kb_by_client']:.1f}",
            ],
        )
        for number, case in results["present"].items()
    ]
    return grid("clients", ["set-up, s", "a round, ms", "peak, MiB", "checkpoint, s", "kB by client"], rows)


def scale_networks(results: Results) -> str:
    """Memory and files of ResNets of which five clients are present in a round."""
    names = {"networks": "", "copies": ", each in memory of its own"}
    rows = [
        (f"{int(number):,}{name}", [f"{case['set_up_s']:.1f}", f"{case['peak_mib']:,}", f"{case['checkpoint_mib']:,}"])
        for part, name in names.items()
        for number, case in results[part].items()
    ]
    return grid("clients of ResNet-18", ["set-up, s", "peak, MiB", "checkpoint, MiB"], rows)


def scale_masked(results: Results) -> str:
    """Cost of a masked sum by client."""
    rows = [
        (
            f"{int(number):,}",
            [str(case["neighbours"]), f"{case['keys_ms_by_client']:.0f}", f"{case['ms_by_client']:.0f}"],
        )
        for number, case in results["masked"].items()
    ]
    return grid("clients", ["neighbours that each draws", "keys, once, ms by client", "a sum, ms by client"], rows)


def versions_ratios(results: Results) -> str:
    """What changed since an earlier revision, of what most users meet."""
    rows = []
    for title, script, path, unit in (
        ("FedAvg of 10 clients, a round", "rounds", "cases/10 clients, 64-64-64-10/fedlit_ms", "ms"),
        ("the same, next to a plain loop", "rounds", "cases/10 clients, 64-64-64-10/ratio", "x"),
        ("50 clients, vectorised, next to a plain loop", "rounds", "cases/50 clients, 64-16-10, vectorised/ratio", "x"),
        ("peak of a run", "rounds", "start_up/peak_mib", "MiB"),
        ("FedGP's aggregation, ResNet-18, ten sources", "aggregation", "cpu_seconds/fedgp, layer", "s"),
        ("masking 1e6 numbers, one client", "privacy", "masking/protect_ms", "ms"),
        ("the same, next to its keystreams", "privacy", "masking/protect_over_keystream", "x"),
        ("adding with the check of all tags, next to a sum", "privacy", "masking/check_and_add_over_plain_sum", "x"),
        ("a masked round of 1e6 numbers, 10 clients", "privacy", "masking/all_ms", "ms"),
        ("a masked round of 1,000 numbers, one vanished", "privacy", "thresholds/1000/default_ms", "ms"),
        ("Paillier, 2048 bits, next to naive phe", "privacy", "paillier/2048/times_faster", "x faster"),
        ("Paillier, 3072 bits, next to naive phe", "privacy", "paillier/3072/times_faster", "x faster"),
        ("BFV, one number", "privacy", "lattices/BFV/us_per_number", "µs"),
        ("CKKS, one number", "privacy", "lattices/CKKS/us_per_number", "µs"),
        (
            "a masking server beside the messages, in vectors",
            "privacy",
            "memory/server_beyond_messages_over_vector",
            "",
        ),
    ):
        row = results[script][path]
        now, then = (f"{row[side]:.3g}" if row[side] < 100 else f"{row[side]:,.0f}" for side in ("now", "before"))
        rows.append((f"{title}{', ' if unit else ''}{unit}", [then, now, f"{row['ratio']:.2f}x"]))
    return grid("one thread, CPU time", ["before", "now", "now / before"], rows)


def rounds_cost(results: Results) -> str:
    """CPU milliseconds of a round, and times those of the plain loop."""
    rows = [
        (
            name,
            [
                *(f"{case[way]:.1f}" for way in ("plain_ms", "plain_fused_ms", "fedlit_ms")),
                f"{case['ratio']:.2f} ({case['ratio_min']:.2f} to {case['ratio_max']:.2f})",
            ],
        )
        for name, case in results["cases"].items()
    ]
    return grid("case", ["plain loop", "the same, fused SGD", "fedlit", "fedlit / plain loop"], rows)


LENGTHS = {"1000": "1,000", "1000000": "1e6"}


def privacy_cost(results: Results) -> str:
    """Each backend next to what it is measured against."""
    masking, affine, rows = results["masking"], results["paillier_affine"], []
    for bits, case in results["paillier"].items():
        rows.append(
            (
                f"Paillier {bits} bit, one number of a secure mean, all parties",
                [
                    f"{case['us_per_number']:.0f} µs",
                    f"naive phe, one ciphertext per float: {case['naive_us_per_number'] / 1000:.0f} ms",
                    f"{case['times_faster']:.0f}x faster",
                    f"{case['bytes_per_number']:.2f} (naive {case['naive_bytes_per_number']:.0f})",
                ],
            )
        )
    plain = f"plain sum: {masking['plain_sum_ms']:.1f} ms"
    for name, key, beside, ratio, sent in (
        (
            "1e6 floats: protect, one client",
            "protect_ms",
            f"AES-256-CTR of the same masks: {masking['keystream_ms']:.1f} ms",
            f"{masking['protect_over_keystream']:.2f}x",
            f"{masking['bytes_per_number']:.2f}",
        ),
        (
            "the same masks added up, and nothing else",
            "keystream_added_ms",
            f"AES-256-CTR of them: {masking['keystream_ms']:.1f} ms",
            f"{masking['keystream_added_over_keystream']:.2f}x",
            "",
        ),
        (
            "closing the round with 1 of 10 vanished",
            "recover_one_dropped_ms",
            f"with nobody vanished: {masking['recover_ms']:.1f} ms",
            f"{masking['recovery_with_one_dropped_over_without']:.2f}x",
            "",
        ),
        ("the server's addition", "add_ms", plain, f"{masking['add_over_plain_sum']:.2f}x", ""),
        (
            "the same with the check of all tags",
            "check_and_add_ms",
            plain,
            f"{masking['check_and_add_over_plain_sum']:.2f}x",
            "",
        ),
    ):
        rows.append((f"masking{',' if sent else ':'} {name}", [f"{masking[key]:.1f} ms", beside, ratio, sent]))
    rows.append(
        (
            "masking: a whole round, all parties",
            [
                f"{masking['all_ms']:.0f} ms",
                f"keystreams of all: {masking['all_ms'] / masking['all_over_keystreams']:.0f} ms "
                f"(through `Plain`: {masking['plain_all_ms']:.0f} ms)",
                f"{masking['all_over_keystreams']:.2f}x",
                "",
            ],
        )
    )
    rows.append(
        (
            "masking: a whole round in which no client may drop out (`threshold: 1.0`), all parties",
            [
                f"{masking['in_pairs_all_ms']:.0f} ms",
                f"keystreams: {masking['in_pairs_all_ms'] / masking['in_pairs_over_keystreams']:.0f} ms "
                f"(with shares: {masking['all_ms']:.0f} ms)",
                f"{masking['in_pairs_over_keystreams']:.2f}x",
                "",
            ],
        )
    )
    for length, case in results["thresholds"].items():
        ours, majority = (f"(bears {case[f'colluders_borne_{way}']}" for way in ("default", "majority"))
        rows.append(
            (
                f"masking, {LENGTHS[length]} floats: a round with 1 of 10 vanished, {case['shares_default']} shares "
                f"{ours} colluders)",
                [
                    f"{case['default_ms']:.1f} ms",
                    f"a majority of {case['shares_majority']} {majority}): {case['majority_ms']:.1f} ms",
                    f"{case['default_ms'] / case['majority_ms']:.2f}x",
                    "",
                ],
            )
        )
    for length, case in results["sealing"].items():
        rows.append(
            (
                f"one client to nine, {LENGTHS[length]} floats: encrypted between them",
                [
                    f"{case['sealed_ms']:.1f} ms",
                    f"in the clear: {case['clear_ms']:.1f} ms",
                    f"{case['sealed_ms'] / case['clear_ms']:.1f}x",
                    f"{case['bytes_more']:.0f} bytes more each",
                ],
            )
        )
    for name, case in results["lattices"].items():
        exact = "; exact on the grid" if not case["error_against_grid"] else f"; error {case['error']:.1e}"
        rows.append(
            (
                f"{name}, one number, all parties{exact}",
                [
                    f"{case['us_per_number']:.1f} µs",
                    f"bare TenSEAL, public-key CKKS: {case['public_key_ckks_us_per_number']:.1f} µs",
                    f"{case['over_public_key_ckks']:.2f}x",
                    f"{case['bytes_per_number']:.2f}",
                ],
            )
        )
    cells = [f"{affine['cpu_s']:.2f} s", "", "", f"{affine['bytes'] / 1000:.1f} kB in all"]
    rows.append(("Paillier affine, 21 moments, 256 outputs, 3072 bit", cells))
    return grid("case", ["CPU", "next to", "ratio", "bytes per number, up"], rows)


def gpu_resnet(results: Results) -> str:
    """Seconds and memory of a round, by number type."""
    precisions = ("32-true", "bf16-mixed")
    methods = dict.fromkeys(name.rpartition(", ")[0] for name in results["resnet"])
    rows = []
    for method in methods:
        found = [results["resnet"][f"{method}, {precision}"] for precision in precisions]
        label = "FedAvg, a loop by hand" if method == "by hand" else method
        rows.append((label, [f"{each['seconds']:.2f} s, {each['MiB'] / 1024:.1f} GiB" for each in found]))
    return grid("ResNet-50", precisions, rows)


def gpu_methods(results: Results) -> str:
    """The greatest of the distances between GPU and CPU, over the rows of the tests' table."""
    rows = []
    for label in ("64 bits", "64 bits, masked", "32 bits"):
        found = {name: row[label] for name, row in results["methods"].items() if row[label] != "refused"}
        worst = max(found, key=lambda name: found[name])
        rows.append((label, [str(len(found)), f"{found[worst]:.0e} ({worst})"]))
    return grid("three rounds, GPU next to CPU", ["methods with their options", "greatest distance"], rows)


TABLES: dict[str, dict[str, Callable[[Results], str]]] = {
    ALL: {"headlines": headlines},
    "accuracy": {"experiments": accuracy},
    "fedgp": {
        **{part: fedgp_part(part) for part in ("noise", "heart", "label_shift")},
        "state_kept": fedgp_state,
    },
    "baselines": {"speed": baselines_speed},
    "baselines_accuracy": {
        "office_caltech": baselines("office_caltech", OFFICE, papers=True),
        "styles": baselines("styles", ("photo", "painting", "sketch", "night")),
        "surf": baselines("surf", OFFICE),
        "digits": baselines("digits", ("mnist", "usps", "optdigits")),
        "hearts": baselines("hearts", ("cleveland", "hungary", "switzerland", "va_long_beach")),
        "privacy": baselines_privacy,
    },
    "signals": {"methods": signals_methods, "masked": signals_masked},
    "leaderboard": {"no_labels": leaderboard_of("no labels"), "few_labels": leaderboard_of("few labels")},
    "few_labels": {"place": few_labels_in_targets_place},
    "images": {"accuracy": image_accuracy, "adapters": image_adapters},
    "defaults": {"gains": default_gains},
    "first_hour": {"journeys": first_hours},
    "refine": {
        "accuracy": refined,
        "sizes": by_size,
        "shares": by_class_shares,
        **{part: in_targets_place(part) for part in ("settings", "weights", "heads", "temperatures", "guard")},
    },
    "across": {"rounds": across_rounds, "memory": across_memory},
    "flare": {"ways": flare_ways},
    "vanishing": {"faults": vanishing},
    "memory": {"clients": memory_clients, "state_dir": memory_state_dir, "sums": memory_sums},
    "peers": {"ways": peers_ways},
    "scale": {"present": scale_present, "networks": scale_networks, "masked": scale_masked},
    "rounds": {"cost": rounds_cost},
    "versions": {"ratios": versions_ratios},
    "gpu": {"resnet": gpu_resnet, "methods": gpu_methods},
    "privacy": {"cost": privacy_cost},
    "batchnorm": {"methods": batchnorm_methods},
    "small_tables": {"auc": small_tables_auc, "calibration": small_tables_calibration},
    "moments": {"solved": moments_solved, "accuracy": moments_accuracy},
    "fed_mmd_accuracy": {"office": fed_mmd_office, "hearts": fed_mmd_hearts},
    "fed_rf_tca": {
        "accuracy": fed_rf_tca_accuracy,
        "robustness": fed_rf_tca_robustness,
        "remedies": fed_rf_tca_remedies,
        "closed_form": fed_rf_tca_closed_form,
    },
    "fedrf_tca_papers": {"bytes": fedrf_tca_bytes},
    "dadil_accuracy": {
        "office": dadil_methods("office_caltech_feddadil", "EfficientNet features", OFFICE, paper=True),
        "surf": dadil_methods("office_caltech_surf_feddadil", "SURF features", OFFICE),
        "digits": dadil_methods("digits_feddadil", "digits", ("mnist", "usps", "optdigits")),
        "parallelism": dadil_parallelism,
        "sensitivity": dadil_sensitivity,
        "distillation": dadil_distillation,
    },
    "office_caltech_shallow": {"accuracy": shallow},
    "validators": {"unlabelled": validators_lost},
    "combining": {"lost": combining_lost, "tasks": combining_tasks, "distribution": combining_distribution},
    "one_round": {"rows": one_round, "backends": one_round_backends},
}
"""By benchmark and table; each takes the benchmark's `figures_in` its JSON."""


def merged(old: Any, new: Any) -> Any:
    """``old`` with the figures of ``new`` in place of its own."""
    if not (isinstance(old, dict) and isinstance(new, dict)) or "mean" in new:
        return new
    return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}


def figures_in(path: Path) -> Results:
    """What a benchmark's file has under "results"; those of costs have nothing else around it."""
    found: Results = json.loads(path.read_text())
    return found.get("results", found)


def results_of(benchmark: str, newer: Path | None = None) -> Results:
    """A benchmark's results, with newer ones in their place."""
    if benchmark == ALL:
        return {name: results_of(name) for name in {name for _, name, *_ in HEADLINES}}
    kept = figures_in(HERE / f"{benchmark}.json")
    found = kept if newer is None else merged(kept, figures_in(newer))
    return found


def with_tables(text: str) -> str:
    """A page with each marked table made anew; a mark that has no table here is an error."""

    def put(match: re.Match[str]) -> str:
        benchmark, table = match["name"].split("/")
        return f"{match['mark']}\n{TABLES[benchmark][table](results_of(benchmark))}\n"

    return re.sub(r"(?P<mark><!-- table: (?P<name>\S+) -->)\n(?:\|.*\n)*", put, text)


def main() -> None:
    """Print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"One of {', '.join(TABLES)}.")
    parser.add_argument("--results", type=Path, help="Newer figures of the one benchmark that is named.")
    parser.add_argument("--write", action="store_true", help="Write the tables into their pages.")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(TABLES)):
        parser.error(f"NAME must be one of {', '.join(TABLES)}, got {unknown[0]!r}")
    if options.results and len(options.names) != 1:
        parser.error("--results is of one benchmark: name it")
    if options.write and (options.names or options.results):
        parser.error("--write writes all tables, from the repository's figures: leave NAME and --results out")
    if options.write:
        for page in PAGES:
            page.write_text(with_tables(page.read_text()))
        return
    for name in options.names or TABLES:
        for table, make in TABLES[name].items():
            print(f"{name}/{table}\n\n{make(results_of(name, options.results))}\n")


if __name__ == "__main__":
    main()
