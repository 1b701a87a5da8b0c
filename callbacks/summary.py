"""Tables of the results of one or several runs: the closing table of a command, and methods by targets in files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from fedlit.callbacks.run_summary import (
    FLOOR,
    RunSummary,
    accuracies,
    averages,
    errors,
    gains,
    mean_gains,
    methods_of,
    split_by_task,
    targets_of,
)
from fedlit.callbacks.shared import LOGGING_CHANNELS, grouped, megabytes, watched
from fedlit.checks import check
from fedlit.federation import KEYS
from fedlit.privacy import Description
from fedlit.tables import COLLAPSED, Column, Figure, Row, Table

CHANNELS = "MB by\nchannel"
"""Column of the closing table with long texts."""

_CLEAR = " (clear)"
"""After a channel without a hiding backend in a run that hides messages of another channel."""


def closing_table(summaries: Sequence[RunSummary], one_method: bool = False) -> Table:
    """One row per method and target, an average over several targets, and footnotes on differences and privacy.

    Repetitions with several seeds are shown as mean ± sample standard deviation of the accuracy (in regression, of R2),
    and the mean of the other columns. An average over targets is within each seed first, of seeds that have them all;
    a method that lacks a target has none.
    Accuracies and R2 have separate rows. In regression there are RMSE and MAE too, in the labels' unit, an average of
    which is the mean over targets. No column ranks methods. Models that predict a single class are marked.

    Args:
        summaries: Of all runs, in the order of the rows.
        one_method: Whether all are of one method and named by its settings, which the target score does compare.

    Raises:
        ValueError: If there is no run.
    """
    check(len(summaries) > 0, "summaries", "of at least one run", summaries)
    tasks, rows = split_by_task(summaries), list[Row]()
    shown = [name for name in _ERRORS if errors(summaries, name)]
    for method in methods_of(summaries):
        for task, part in tasks.items():
            runs = [run for run in part if run.method == method]
            unit = " (R2)" if len(tasks) > 1 and task == "R2" else ""
            by_target = grouped(runs, lambda run: run.target)
            for target, here in by_target.items():
                wrong = [errors(here, name) for name in shown]
                rows.append(Row([method, f"{target}{unit}", *_cells(here, accuracies(here), wrong)]))
            if len(by_target) > 1 and _has_all_targets(runs, part):
                wrong = [averages(runs, partial(errors, name=name)) for name in shown]
                rows.append(Row([method, f"average{unit}", *_cells(runs, averages(runs), wrong)], total=True))
        rows[-1].last = True
    notes = [*marks(summaries), *_missing_runs(summaries), *_scored_apart(summaries)]
    notes += [line for part in tasks.values() for line in _differences(part)]
    notes += [
        *_alternatives(summaries),
        *_outputs(summaries),
        *_intervals(summaries),
        *_clinic(summaries),
        *_selections(summaries),
    ]
    notes += [*([] if one_method else _not_ranked(summaries)), *_privacy(summaries)]
    repeated = len({run.seed for run in summaries}) > 1
    caption = "mean ± standard deviation over seeds" if repeated else None
    return Table(_columns([*tasks], shown), rows, caption, notes, split=(5 + len(shown), 2))


_ERRORS = {"oracle_rmse": "RMSE", "oracle_mae": "MAE"}
"""Fields of `RunSummary` that are columns in regression."""


def _columns(tasks: Sequence[str], errors: Sequence[str]) -> list[Column]:
    score = "target accuracy (oracle)"
    if "R2" in tasks:
        score = "target accuracy, or R2 in % (oracle)" if len(tasks) > 1 else "target R2 in % (oracle)"
    seconds = "{:.1f}".format
    return [
        *(Column("method"), Column("target"), Column(score, numeric=True)),
        *(Column(f"{_ERRORS[name]}\n(oracle)", numeric=True) for name in errors),
        Column("target\nscore", numeric=True, form="{:.3f}".format),
        Column("rounds", numeric=True, form=lambda rounds: f"{rounds:.1f}".removesuffix(".0")),
        Column(CHANNELS, folds=True),
        Column("logging\nMB", numeric=True, form=megabytes),
        *(Column(f"{phase}\ns", numeric=True, form=seconds) for phase in ("local", "exchange", "protection", "total")),
    ]


def _cells(runs: Sequence[RunSummary], accuracies: Sequence[float], errors: Sequence[Sequence[float]]) -> list[object]:
    scores = [run.target_score for run in runs if run.target_score is not None]
    channels = dict.fromkeys(channel for run in runs for channel in run.bytes_by_channel)
    sent = {channel: fmean(run.bytes_by_channel.get(channel, 0) for run in runs) for channel in channels}
    of_method = [
        f"{channel} {megabytes(sent[channel])}{_CLEAR if _in_the_clear(channel, runs) else ''}"
        for channel in sent
        if not watched(channel)
    ]
    return [
        Figure(accuracies, 100, collapsed=sum(run.only_class is not None for run in runs)),
        *(Figure(each, form="{:.4g}") for each in errors),
        fmean(scores) if scores else None,
        fmean(run.rounds for run in runs),
        "\n".join(of_method) or "-",
        sum(sent[channel] for channel in sent if watched(channel)),
        *(fmean(run.seconds.get(phase, 0.0) for run in runs) for phase in ("local", "exchange", "protection")),
        fmean(run.seconds_total for run in runs),
    ]


def _in_the_clear(channel: str, runs: Iterable[RunSummary]) -> bool:
    """Whether receivers read single messages of a channel in runs that hide those of another channel."""
    return any(
        channel in run.channels
        and any(_hides(about) for about in run.backends.values())
        and not _hides(run.backends.get(channel))
        for run in runs
    )


def _hides(about: Description | None) -> bool:
    return about is not None and not about.backend.startswith("Plain")


# ---------------------------------------------------------------- footnotes


def marks(summaries: Sequence[RunSummary]) -> list[str]:
    """Notes on scores that are not what the column's title says: of models that predict one class, or with noise."""
    collapsed = (run for run in summaries if run.only_class is not None)
    lines = [
        f"{COLLAPSED} {method} on {target}, {named_seeds([run.seed for run in runs])}, predicts nothing but {name!r}"
        for (method, target, name), runs in grouped(
            collapsed, lambda run: (run.method, run.target, run.only_class)
        ).items()
    ]
    if any(run.noised for run in summaries):
        lines.append(
            "Numbers of clients, the oracle's as well, carry the noise of differential privacy (reports of the "
            "strategy), and may lie outside 0 to 100%"
        )
    return lines


def named_seeds(seeds: Sequence[object]) -> str:
    """``"seed 0"`` or ``"seeds 0, 1"``."""
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"


def _has_all_targets(runs: Sequence[RunSummary], of: Sequence[RunSummary]) -> bool:
    """Whether a method's runs have the targets of all; an average over fewer would be of something else."""
    return set(targets_of(runs)) == set(targets_of(of))


def _missing_runs(summaries: Sequence[RunSummary]) -> list[str]:
    every = sorted({run.seed for run in summaries})
    lines = []
    for method, runs in grouped(summaries, lambda run: run.method).items():
        missing = [target for target in targets_of(summaries) if target not in targets_of(runs)]
        if missing:
            lines.append(f"{method} has no run on {', '.join(missing)}, and no average over targets")
    for (method, target), runs in grouped(summaries, lambda run: (run.method, run.target)).items():
        seeds = sorted({run.seed for run in runs})
        if len(seeds) < len(every):
            lines.append(f"{method} on {target} has {named_seeds(seeds)} alone, of {named_seeds(every)}")
    return lines


def _scored_apart(summaries: Sequence[RunSummary]) -> list[str]:
    """Methods whose scores are of other samples of the target than others', so that they are no comparison."""
    sizes: dict[tuple[str, str], set[int]] = {}
    for run in summaries:
        if run.num_scored:
            sizes.setdefault((run.method, run.target), set()).add(sum(run.num_scored))
    lines = []
    for target in targets_of(summaries):
        here = {method: max(sizes[method, target]) for method in methods_of(summaries) if (method, target) in sizes}
        most = max(here.values(), default=0)
        fewer = [f"{method} {number}" for method, number in here.items() if number < most]
        if fewer:
            lines.append(
                f"on {target} these are scored on fewer samples than the {most} of others, without those whose labels "
                f"they train on, so that differences may be of the samples: {', '.join(fewer)}"
            )
    return lines


def _not_ranked(summaries: Sequence[RunSummary]) -> list[str]:
    if len(methods_of(run for run in summaries if run.target_score is not None)) < 2:
        return []
    return [
        "the target score compares rounds of one method, not methods: fedlit fit --select best compares these, by "
        "validator/trust"
    ]


def _differences(summaries: Sequence[RunSummary]) -> list[str]:
    """Points of each method above or below the floor, on the targets and seeds that both have."""
    lines = []
    for method in methods_of(summaries):
        by_target = {} if method == FLOOR else gains(summaries, method)
        if not by_target:
            continue
        each = ", ".join(f"{target} {fmean(by_seed.values()):+.1f}" for target, by_seed in by_target.items())
        means = mean_gains(by_target) if len(by_target) > 1 else []
        lines.append(
            f"{method} - {FLOOR}: " + (f"{fmean(means):+.1f} points on average ({each})" if means else f"{each} points")
        )
    return lines


def _selections(summaries: Sequence[RunSummary]) -> list[str]:
    """Accuracy after choosing a round by the label-free score, next to the best round's."""
    lines = []
    for method, runs in grouped(summaries, lambda run: run.method).items():
        if not _has_all_targets(runs, summaries):
            continue
        selected = [run.selected_accuracy for run in runs if run.selected_accuracy is not None]
        best = [run.best_accuracy for run in runs if run.best_accuracy is not None]
        if selected and best:
            lines.append(
                f"{method}, on validation samples (oracle): {100 * fmean(selected):.1f} in the round of the highest "
                f"target score, {100 * fmean(best):.1f} in the best round"
            )
    return lines


def _alternatives(summaries: Sequence[RunSummary]) -> list[str]:
    lines = []
    for method, runs in grouped(summaries, lambda run: run.method).items():
        pairs = (pair for run in runs for pair in run.oracle_alternatives.items())
        scores = grouped(pairs, lambda pair: pair[0])
        if scores:
            each = ", ".join(f"{name} {100 * fmean(value for _, value in some):.1f}" for name, some in scores.items())
            lines.append(f"{method}, by prediction (oracle): {each}")
    return lines


def _outputs(summaries: Sequence[RunSummary]) -> list[str]:
    """R2 and errors of each of several numbers to predict."""
    lines = []
    for (method, target), runs in grouped(summaries, lambda run: (run.method, run.target)).items():
        for output in dict.fromkeys(output for run in runs for output in run.oracle_outputs):
            rows = [run.oracle_outputs[output] for run in runs if output in run.oracle_outputs]
            r2, *wrong = ([row[name] for row in rows if name in row] for name in ("r2", "rmse", "mae"))
            texts = [f"R2 {100 * fmean(r2):.1f}%"] if r2 else []
            texts += [f"{name} {fmean(each):.4g}" for name, each in zip(_ERRORS.values(), wrong, strict=True) if each]
            lines.append(f"{method} on {target}, {output} (oracle): {', '.join(texts)}")
    return lines


def _intervals(summaries: Sequence[RunSummary]) -> list[str]:
    """Coverage of intervals at the target, for which it is not promised."""
    lines = []
    covered = [run for run in summaries if run.oracle_coverage is not None and run.alpha is not None]
    for (method, target, alpha), runs in grouped(covered, lambda run: (run.method, run.target, run.alpha)).items():
        share = fmean(errors(runs, "oracle_coverage"))
        lines.append(
            f"{method} on {target}: intervals that are to hold {100 * (1 - (alpha or 0)):.4g}% of samples like the "
            f"sources' hold {100 * share:.1f}% of the target's (oracle), for which nothing is promised"
        )
    return lines


def _clinic(summaries: Sequence[RunSummary]) -> list[str]:
    """Metrics of a clinic at the target; intervals of one run alone, as they have no mean."""
    lines = []
    for (method, target), runs in grouped(summaries, lambda run: (run.method, run.target)).items():
        pairs = [pair for run in runs for pair in run.oracle_clinic.items()]
        scores = {name: [value for _, value in some] for name, some in grouped(pairs, lambda pair: pair[0]).items()}
        single = len(runs) == 1
        texts = [f"{name} {fmean(each):.3f}" for name, each in scores.items() if single or not name.endswith(_ENDS)]
        if texts:
            lines.append(f"{method} on {target} (oracle): {', '.join(texts)}")
    return lines


_ENDS = ("_low", "_high")
"""Endings of the names of an interval's ends."""


def _privacy(summaries: Sequence[RunSummary]) -> list[str]:
    """What each channel's backend hides and reveals; methods are named where they differ."""
    by_text: dict[str, list[str]] = {}
    for run in summaries:
        for channel in run.bytes_by_channel:
            if channel in LOGGING_CHANNELS or channel.endswith(KEYS):
                continue
            about = run.backends.get(channel)
            if about is None:
                text = f"{channel} -> {run.channels.get(channel, 'from client to client, in the clear')}"
            else:
                text = f"{channel} -> {about.backend}, hides {about.hidden}, reveals {about.revealed}"
            methods = by_text.setdefault(text, [])
            if run.method not in methods:
                methods.append(run.method)
    everyone = methods_of(summaries)
    return [
        f"privacy: {text}" if methods == everyone else f"privacy ({', '.join(methods)}): {text}"
        for text, methods in by_text.items()
    ] or ["privacy: nothing is sent"]


# ---------------------------------------------------------------- methods by targets


def write_tables(summaries: Sequence[RunSummary], folder: Path) -> list[Path]:
    """Write `results_table` to ``table.csv``, ``table.md`` and ``table.tex`` in a folder, and return their paths."""
    table = results_table(summaries)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"table.{suffix}" for suffix in ("csv", "md", "tex")]
    for path, text in zip(paths, (table.csv(), table.markdown() + "\n", table.latex() + "\n"), strict=True):
        path.write_text(text, encoding="utf-8", newline="")
    return paths


def results_table(summaries: Sequence[RunSummary]) -> Table:
    """A row per method, a column per target, and the average over targets.

    Scores are accuracies (in regression, R2) on the target's hidden labels in per cent, an oracle: mean ± sample
    standard deviation over seeds. Accuracies and R2 have separate columns, and RMSE and MAE further ones, in the
    labels' unit. A score is bold if no other interval (mean ± deviation) of its column reaches its interval; with one
    seed there are no intervals, and nothing is bold. Models that predict a single class are marked.
    """
    methods = methods_of(summaries)
    tasks = split_by_task(summaries)
    score = " or ".join(tasks)
    columns, rows = [Column("method")], [Row([method]) for method in methods]

    def add(title: str, figures: Sequence[Figure], of_errors: bool) -> None:
        first = f"oracle error in the labels' unit: {title}" if of_errors else f"oracle {score} in %: {title}"
        others = (f"{part}: {title}" for part in ("standard deviation", "seeds", "of one class alone"))
        columns.append(Column(title, numeric=True, parts=(first, *others)))
        signed = [replace(each, values=[-value for value in each.values]) if of_errors else each for each in figures]
        clear = _clearly_first(signed)
        for place, (row, figure) in enumerate(zip(rows, figures, strict=True)):
            row.cells.append(replace(figure, bold=place == clear))

    for task, part in tasks.items():
        measures: dict[str, Callable[[Iterable[RunSummary]], list[float]]] = {task: accuracies}
        measures |= {_ERRORS[name]: partial(errors, name=name) for name in _ERRORS if errors(part, name)}
        targets = targets_of(part)
        by_method = [[run for run in part if run.method == method] for method in methods]
        for measure, of in measures.items():
            of_errors = measure != task
            unit = f" ({measure})" if len(tasks) > 1 or of_errors else ""
            for target in targets:
                here = [[run for run in runs if run.target == target] for runs in by_method]
                add(f"{target}{unit}", [_figure(runs, of(runs), of_errors) for runs in here], of_errors)
            if len(targets) > 1:
                name = "average over targets" if "average" in targets else "average"
                whole = [runs if _has_all_targets(runs, part) else [] for runs in by_method]
                add(f"{name}{unit}", [_figure(runs, averages(runs, of), of_errors) for runs in whole], of_errors)
    caption = f"Target {score} in per cent on hidden labels (oracle)"
    if any(errors(summaries, name) for name in _ERRORS):
        caption += ", and errors in the labels' unit"
    if len({run.seed for run in summaries}) > 1:
        caption += ", mean ± sample standard deviation over seeds"
    if len(methods) > 1:
        caption += "; bold where no other mean ± deviation of the column reaches it, and nowhere with one seed"
    return Table(columns, rows, caption, [*marks(summaries), *_scored_apart(summaries)])


def _figure(runs: Sequence[RunSummary], scores: Sequence[float], of_errors: bool) -> Figure:
    if of_errors:
        return Figure(scores, form="{:.4g}")
    return Figure(scores, 100, collapsed=sum(run.only_class is not None for run in runs) if scores else 0)


def _clearly_first(figures: Sequence[Figure]) -> int | None:
    """Position of the figure whose mean less its deviation is above every other mean plus its deviation."""
    intervals = {}
    for place, (mean, deviation, *_) in enumerate(figure.parts for figure in figures):
        if mean is None:
            continue
        if deviation is None:  # its spread is unknown, and so is whether it overlaps
            return None
        intervals[place] = (mean - deviation, mean + deviation)
    if len(figures) < 2 or not intervals:
        return None
    first = max(intervals, key=lambda place: intervals[place][0])
    others = (high for place, (_, high) in intervals.items() if place != first)
    return first if all(intervals[first][0] > high for high in others) else None
