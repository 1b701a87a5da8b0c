"""Which method to take without labels of the target: by trust, or a reason why none is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedlit.callbacks.report.federations import is_regression
from fedlit.callbacks.report.pages import Block, Bullets, Table, Text
from fedlit.callbacks.report.run_folder import RunFolder
from fedlit.callbacks.selection import TRUST, Selection, select

_HOW = (
    "fedlit fit --compare ... --select best logs it and selects; for single runs add "
    "--trainer.callbacks+=fedlit.callbacks.Validators"
)


def ranking(runs: Sequence[RunFolder], names: Mapping[str, str]) -> list[Block]:
    """Sentences on the method to take, and a table of all selections, for finished runs of one federation.

    Methods are compared by ``validator/trust`` alone, see docs/labels.md, within each target and seed. Nothing is
    reported on a single method.

    Args:
        runs: Finished ones.
        names: Of methods, by the names of their runs.
    """
    if len({names[run.name] for run in runs}) < 2:
        return []
    selections = [_renamed(each, names) for each in select({run.name: run for run in runs})]
    if not selections:
        if any(map(is_regression, runs)):
            return [Text("Methods are not ranked: no score compares them in regression without labels of the target.")]
        return [
            Text(
                f"Methods are not ranked: only {TRUST} compares methods without labels of the target, and no run has "
                f"logged it. {_HOW}."
            )
        ]
    lines = [_line(target, [each for each in selections if each.target == target]) for target in _targets(selections)]
    lines += _unscored(runs, selections, names)
    header = ["target", "seed", "taken", "after round", "trust", "next", "its trust"]
    table = Table(header, [_row(each) for each in selections], words=3)
    return [Bullets(lines), table]


def _renamed(selection: Selection, names: Mapping[str, str]) -> Selection:
    candidates = [replace(each, method=names[each.run]) for each in selection.candidates]
    chosen = selection.chosen
    return replace(
        selection,
        candidates=candidates,
        chosen=None if chosen is None else next(each for each in candidates if each.run == chosen.run),
    )


def _targets(selections: Sequence[Selection]) -> list[str]:
    return list(dict.fromkeys(each.target for each in selections))


def _line(target: str, selections: Sequence[Selection]) -> str:
    """What the seeds of a target come to."""
    seeds: dict[str | None, list[str]] = {}
    for each in selections:
        seeds.setdefault(None if each.chosen is None else each.chosen.method, []).append(each.seed)
    if [*seeds] == [None]:
        highest = max(selections, key=lambda each: each.candidates[0].trust)
        return f"No model can be trusted on {target}, and none is named: {highest.refusal}."
    taken = [
        f"{'no model' if method is None else method}" + ("" if len(selections) == 1 else f" with {_seeds(found)}")
        for method, found in seeds.items()
    ]
    text = f"By {TRUST}, without labels of the target: on {target} take {'; '.join(taken)}."
    if any(each.in_doubt for each in selections):
        text += " SourceOnly is taken where no other is trusted by 5% more."
    return text if len(seeds) == 1 else f"{text} Seeds do not agree."


def _seeds(seeds: Sequence[str]) -> str:
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(seeds)}"


def _unscored(runs: Sequence[RunFolder], selections: Sequence[Selection], names: Mapping[str, str]) -> list[str]:
    """Methods that are in no selection, or not in all."""
    compared = {each.run for selection in selections for each in selection.candidates}
    lacking = list(dict.fromkeys(names[run.name] for run in runs if run.name not in compared))
    return [f"Not compared, as runs of them have not logged {TRUST}: {', '.join(lacking)}."] if lacking else []


def _row(selection: Selection) -> list[str]:
    chosen = selection.chosen
    if chosen is None:
        highest = f"{selection.candidates[0].trust:.4f}"
        return [selection.target, selection.seed, "none: too little trust", "-", f"at most {highest}", "-", "-"]
    others = [each for each in selection.candidates if each is not chosen]
    following = [others[0].method, f"{others[0].trust:.3f}"] if others else ["-", "-"]
    return [
        *(selection.target, selection.seed, chosen.method, str(chosen.round_idx), f"{chosen.trust:.3f}"),
        *following,
    ]
