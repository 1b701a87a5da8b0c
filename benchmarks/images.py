"""Photographs: a pretrained network fine-tuned by the whole federation, next to fixed features of the same network.

Run from the repository root: python benchmarks/images.py [--parts fine_tuned adapters features] [--folder runs]
Needs the extras "backbones" and "peft".

fine_tuned  ``configs/experiments/office_caltech_images_lite0.yaml``: EfficientNet-Lite0 at 96 pixels, last blocks
    trained, two targets; accuracy by method, seconds of a round.
adapters  The same experiment with all weights trained, and with adapters of its 1x1 convolutions alone, of rank 8.
features  `fedlit features` of the same network and images, then ``configs/recipes/features.yaml``.

Accuracies are those of the last round on the target's hidden labels, an oracle. Memory is the most that one process has
had until the end of a part: run parts one by one to tell them apart. Seconds are wall clock of one process with one
thread, with ``--jobs`` of them side by side.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from baselines_accuracy import kept_in
from fedlit.papers.experiments import Results, by_method, fit, options_of, show
from leaderboard import given

EXPERIMENT = "--config=experiments/office_caltech_images_lite0"
WIDTH = 1280
ADAPTERS = (
    "--model.extractor=fedlit.models.Adapters",
    "--model.extractor.network=fedlit.models.Backbone",
    "--model.extractor.network.name=efficientnet_lite0",
    "--model.extractor.layers=[_expand_conv, _project_conv]",
)
TRAINED: dict[str, tuple[str, ...]] = {
    "all weights": ("--model.extractor.freeze=false",),
    "LoRA": ADAPTERS,
    "DoRA": (*ADAPTERS, "--model.extractor.kind=dora"),
}


def fine_tuned(seeds: str, folder: Path | None, jobs: int) -> dict[str, dict[str, Any]]:
    """By method."""
    with kept_in(folder, "fine_tuned") as place:
        runs = fit(place, EXPERIMENT, seeds, f"--jobs={jobs}")
    rows = by_method([*runs.values()])
    for method, row in rows.items():
        own = [run for run in runs.values() if run["method"] == method]
        row["seconds_a_round"] = round(sum(run["seconds_total"] / run["rounds"] for run in own) / len(own), 1)
    return rows


def adapters(seeds: str, folder: Path | None, jobs: int) -> dict[str, dict[str, Any]]:
    """By what is trained."""
    rows = {}
    for name, words in TRAINED.items():
        with kept_in(folder, name) as place:
            runs = [*fit(place, EXPERIMENT, "--compare=null", *words, seeds, f"--jobs={jobs}").values()]
        rows[name] = by_method(runs)["SourceOnly"]
    return rows


def features(seeds: str, folder: Path | None, jobs: int) -> dict[str, dict[str, Any]]:
    """The recommended recipe."""
    with kept_in(folder, "features") as place:
        path = Path(place, "features.npz")
        command = [str(Path(sys.executable).with_name("fedlit")), "features", EXPERIMENT]
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run([*command, "--extractor=efficientnet_lite0", f"--out={path}"], check=True)
        runs = fit(
            place,
            *("--data=fedlit.data.FeatureDomains", f"--data.path={path}", "--data.target=amazon"),
            *("--model=fedlit.methods.SourceOnly", given(WIDTH), "--config=recipes/features"),
            *("--targets=[amazon, webcam]", seeds, f"--jobs={jobs}"),
        )
    return by_method([*runs.values()])


PARTS = {"fine_tuned": fine_tuned, "adapters": adapters, "features": features}


def main() -> None:
    """Run the parts, print and write them."""
    parser = options_of(__doc__, __file__)
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = Results(options.out, "torch", "torchvision", "lightning")
    for part in options.parts:
        rows = PARTS[part](f"--seeds={options.seeds}", options.folder, options.jobs)
        for method, row in rows.items():
            show(f"{part}: {method}", row)
        most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024  # of the largest process until now
        results.keep({"rows": rows, "memory_mb": round(most)}, part)
        print(f"{part}: at most {most:.0f} MB in a process", flush=True)


if __name__ == "__main__":
    main()
