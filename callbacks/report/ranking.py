"""Which method to take without labels of the target: by trust, or a reason why none is named."""

from __future__ import annotations

from collections.abc import Sequence

from fedlit.callbacks.report.pages import Block, Bullets, Text
from fedlit.callbacks.report.run_folder import RunFolder
from fedlit.callbacks.selection import TRUST, Selection, select
from fedlit.tables import Table

_HOW = (
    "fedlit fit --compare ... --select best logs it and selects; for single runs add "
    "--trainer.callbacks+=fedlit.callbacks.Validators"
)


def ranking(runs: Sequence[RunFolder]) -> list[Block]:
    """Sentences on the method to take, and a table of all selections, for finished runs of one federation.

    Methods are compared by ``validator/trust`` alone, see docs/labels.md, within each target and seed. Nothing is
    reported on a single method.
    """
    if len({run.title for run in runs}) < 2:
        return []
    selections = select({run.name: run for run in runs})
    if not selections:
        if any(run.is_regression for run in runs):
            return [Text("Methods are not ranked: no score compares them in regression without labels of the target.")]
        return [
            Text(
                f"Methods are not ranked: only {TRUST} compares methods without labels of the target, and no run has "
                f"logged it. {_HOW}."
            )
        ]
    targets = dict.fromkeys(each.target for each in selections)
    lines = [_line(target, [each for each in selections if each.target == target]) for target in targets]
    compared = {each.run for selection in selections for each in selection.candidates}
    lacking = dict.fromkeys(run.title for run in runs if run.name not in compared)
    if lacking:
        lines.append(f"Not compared, as runs of them have not logged {TRUST}: {', '.join(lacking)}.")
    header = ["target", "seed", "taken", "after round", "trust", "next", "its trust"]
    return [Bullets(lines), Table.of(header, map(_row, selections), words=3)]


def _line(target: str, selections: Sequence[Selection]) -> str:
    """The method to take on a target, by seed."""
    seeds: dict[str | None, list[str]] = {}
    for each in selections:
        seeds.setdefault(None if each.chosen is None else each.chosen.method, []).append(each.seed)
    if [*seeds] == [None]:
        highest = max(selections, key=lambda each: each.candidates[0].trust)
        return f"No model can be trusted on {target}, and none is named: {highest.refusal}."
    taken = [
        ("no model" if method is None else method)
        + ("" if len(selections) == 1 else f" with seed{'' if len(some) == 1 else 's'} {', '.join(some)}")
        for method, some in seeds.items()
    ]
    text = f"By {TRUST}, without labels of the target: on {target} take {'; '.join(taken)}."
    if any(each.in_doubt for each in selections):
        text += " SourceOnly is taken where no other is trusted by 5% more."
    return text if len(seeds) == 1 else f"{text} Seeds do not agree."


def _row(selection: Selection) -> list[str]:
    chosen = selection.chosen
    if chosen is None:
        highest = f"at most {selection.candidates[0].trust:.4f}"
        return [selection.target, selection.seed, "none: too little trust", "-", highest, "-", "-"]
    row = [selection.target, selection.seed, chosen.method, str(chosen.round_idx), f"{chosen.trust:.3f}"]
    others = [each for each in selection.candidates if each is not chosen]
    return [*row, *([others[0].method, f"{others[0].trust:.3f}"] if others else ["-", "-"])]
