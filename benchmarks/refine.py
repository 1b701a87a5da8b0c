"""What refinement at the target is worth, by method and by how features are scaled: target accuracy.

Run from the repository root: python benchmarks/refine.py [--parts styles office_caltech digits] [--seeds 0 1 2]

Every part is an experiment ``configs/experiments/*_baselines.yaml`` over its targets with other methods, once with and
once without ``refine``. Methods are those of the experiment with their shipped configurations, and on features a linear
classifier of them as they are ("linear"). Accuracies are those of the last round, on the target's hidden labels, which
nothing was chosen by. Targets are trained and scored on all their samples.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from experiments import Results, by_method, fit, show

EXPERIMENTS = {
    "styles": "office_caltech_styles_baselines",
    "office_caltech": "office_caltech_baselines",
    "digits": "digits_baselines",
}
NORMALISE = {"styles": ("unit", "zscore_unit", "ranks"), "office_caltech": ("unit", "zscore_unit", "ranks")}
LINEAR = (
    "{class_path: fedlit.methods.SourceOnly, name: linear, init_args: {"
    "extractor: {class_path: fedlit.models.Features, init_args: {in_features: 1280}}, "
    "optimizer: {class_path: torch.optim.Adam, init_args: {lr: 0.02}}}}"
)
ADAPTING = "methods/fedrf_tca, methods/fed_mmd"


def experiment(name: str, scale: str | None, refine: bool, seeds: list[int], adapting: bool) -> dict[str, Any]:
    """A row for each method."""
    methods = [*([LINEAR] if scale else []), *([ADAPTING] if adapting else [])]
    words = [
        f"--config=configs/experiments/{EXPERIMENTS[name]}.yaml",
        f"--compare=[{', '.join(methods)}]",
        f"--seeds={seeds}",
        "--trainer.check_val_every_n_epoch=30",
        *([f"--data.normalise={scale}"] if scale else []),
        *(["--model.refine=true"] if refine else []),
    ]
    with tempfile.TemporaryDirectory() as folder:
        return by_method(list(fit(folder, *words).values()))


def main() -> None:
    """Run the parts, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=[*EXPERIMENTS], default=[*EXPERIMENTS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--plain", action="store_true", help="no method that aligns domains, which take longer")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = Results(options.out, "torch", "lightning", "scipy")
    for part in options.parts:
        for scale in NORMALISE.get(part, (None,)):
            for refine in (False, True):
                found = experiment(part, scale, refine, options.seeds, not options.plain)
                label = f"{scale or 'as they are'}{', refined' if refine else ''}"
                for method, row in found.items():
                    show(f"{part}, {label}: {method}", row)
                results.keep(found, part, label)


if __name__ == "__main__":
    main()
