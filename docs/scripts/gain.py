"""Draw what adaptation gains: ``docs/gain.png``, from ``benchmarks/leaderboard.json``.

Run from the repository root: python docs/scripts/gain.py

The figures that are drawn are in the picture's metadata, with which a test compares the JSON file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "gain.png"
DATA = {
    "styles": "styles\nphoto, painting,\nsketch, night",
    "digits": "digits\nof three sources",
    "surf": "Office-Caltech\nSURF words",
    "office_caltech": "Office-Caltech\npretrained features",
    "hearts": "four hospitals\nheart disease",
}
"""By what there is to gain, the most first."""
FLOOR = ("SourceOnly", "SourceOnly, BatchNorm", "FedAvg")
"""What adapts nothing; without labels at the target FedAvg is SourceOnly."""
RECOMMENDED = "recommended"
WAYS = {"floor": "#777777", "best": "#1f6fb4", RECOMMENDED: "#d95f02"}


def figures() -> dict[str, dict[str, dict[str, Any]]]:
    """By data set: accuracy in per cent, its sample deviation over seeds, and whose it is."""
    board = json.loads((ROOT / "benchmarks" / "leaderboard.json").read_text())["results"]["no labels"]
    found = {}
    for name in DATA:
        rows = {method: row["average"] for method, row in board[name].items()}
        best = max(
            (method for method in rows if method not in (*FLOOR, RECOMMENDED)), key=lambda each: rows[each]["mean"]
        )
        chosen = {"floor": "SourceOnly", "best": best, RECOMMENDED: RECOMMENDED}
        found[name] = {
            way: {"method": method, "mean": rows[method]["mean"], "std": rows[method]["std"]}
            for way, method in chosen.items()
        }
    return found


def draw(found: dict[str, dict[str, dict[str, Any]]]) -> Figure:
    """A dot for each way, the ways of a data set one below the other."""
    figure = Figure(figsize=(6.4, 6.2), layout="constrained", facecolor="white")  # a white card on a dark page
    axes = figure.subplots()
    for place, name in enumerate(DATA):
        for step, (way, color) in enumerate(WAYS.items()):
            row = found[name][way]
            y = 4 * place + step
            axes.errorbar(
                row["mean"], y, xerr=row["std"], color=color, marker="o", markersize=8, capsize=4, linewidth=2
            )
            shown = f"{row['mean']:.1f}" + (f"  {row['method']}" if way == "best" else "")
            axes.annotate(
                shown, (row["mean"] + row["std"], y), (9, 0), textcoords="offset points", va="center", color=color,
                fontsize=12, weight="bold" if way == RECOMMENDED else "normal", annotation_clip=False,
            )  # fmt: skip
    for place in range(1, len(DATA)):
        axes.axhline(4 * place - 1, color="0.88", linewidth=1)
    axes.set_yticks([4 * place + 1 for place in range(len(DATA))], DATA.values(), fontsize=12)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=12)
    axes.invert_yaxis()
    axes.set_xlim(52, 104)
    axes.set_xticks([60, 70, 80, 90, 100])
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    axes.set_xlabel("accuracy on the unlabelled target in %", fontsize=12)
    axes.spines[["top", "right", "left"]].set_visible(False)
    titles = {"floor": "trained on the others", "best": "best method", RECOMMENDED: "recommended"}
    marks = [axes.plot([], [], "o", color=color, markersize=8, label=titles[way])[0] for way, color in WAYS.items()]
    figure.legend(
        handles=marks, loc="outside upper center", ncols=3, frameon=False, fontsize=12, labelcolor="linecolor",
        handletextpad=0.2, columnspacing=1.2,
    )  # fmt: skip
    return figure


def main() -> None:
    """Draw and write."""
    found = figures()
    draw(found).savefig(PICTURE, dpi=150, metadata={"Description": json.dumps(found)})


if __name__ == "__main__":
    main()
