"""The table that closes one or several runs, and the sentences below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fedlit.callbacks.run_summary import (
    FLOOR,
    RunSummary,
    accuracies,
    averages,
    gains,
    mean_gains,
    methods_of,
    split_by_task,
    targets_of,
)
from fedlit.callbacks.shared import LOGGING_CHANNELS, megabytes, watched
from fedlit.federation import KEYS
from fedlit.privacy import Description


def closing_table(summaries: Sequence[RunSummary], one_method: bool = False) -> ClosingTable:
    """One row per method and target, an average over several targets, and below it what is hidden from whom.

    Repetitions with several seeds are shown as mean ± sample standard deviation of the accuracy (in regression, of R2),
    and the mean of the other columns. An average over targets is within each seed first, of seeds that have them all.
    Accuracies and R2 have rows of their own, and no average has both. The order of rows is that of the runs: no column
    ranks methods. Models that predict one class alone are marked.

    Args:
        summaries: Of all runs, in the order of the rows.
        one_method: Whether all are of one method, and are called by its settings, which the target score compares.

    Returns:
        Rows and notes, which rich prints as one table, or as two where the terminal is too narrow for one.

    Raises:
        ValueError: If there is no run.
    """
    if not summaries:
        raise ValueError("summaries must hold at least one run, got none")
    by_task = [part for part in split_by_task(summaries).values() if part]
    both = len(by_task) > 1
    rows: list[ClosingRow] = []
    for method in methods_of(summaries):
        for part in by_task:
            runs = [run for run in part if run.method == method]
            targets = targets_of(runs)
            unit = " (R2)" if both and part[0].oracle_r2 is not None else ""
            for target in targets:
                here = [run for run in runs if run.target == target]
                rows.append(ClosingRow([method, f"{target}{unit}", *_cells(here, accuracies(here))]))
            if len(targets) > 1:
                rows.append(ClosingRow([method, f"average{unit}", *_cells(runs, averages(runs))], style="bold"))
        rows[-1].last = True
    repeated = len({run.seed for run in summaries}) > 1
    notes = [*marks(summaries), *_missing_seeds(summaries)]
    notes += [line for part in by_task for line in _differences(part)]
    notes += [*_alternatives(summaries), *_selections(summaries)]
    notes += [*([] if one_method else _not_ranked(summaries)), *_privacy(summaries)]
    compared = _ACCURACY
    if any(run.oracle_r2 is not None for run in summaries):
        compared = "target accuracy, or R2 in % (oracle)" if both else "target R2 in % (oracle)"
    columns = tuple(compared if name == _ACCURACY else name for name in _COLUMNS)
    return ClosingTable(rows, columns, "mean ± standard deviation over seeds" if repeated else None, notes)


_ACCURACY = "target accuracy (oracle)"
_COLUMNS = (
    *("method", "target", _ACCURACY, "target\nscore", "rounds"),
    *("MB by\nchannel", "logging\nMB", "local\ns", "exchange\ns", "protection\ns", "total\ns"),
)
COLLAPSED = "†"
"""After an accuracy of which at least one model predicts one class alone."""

_CLEAR = " (clear)"
"""After a channel that no backend hides, beside others that are hidden."""

_CHANNELS = 5
"""The column that may be folded; names and numbers are left whole."""


@dataclass
class ClosingRow:
    """Runs of one method on one target, or the average over targets; ``style`` is rich's, ``last`` ends a method."""

    cells: list[str]
    style: str | None = None
    last: bool = False


@dataclass(frozen=True)
class ClosingTable:
    """What several runs came to: methods, in each its targets, and sentences below the table.

    The title states how numbers are to be read; ``None`` if each is of one run. Titles of columns have line breaks.
    """

    rows: Sequence[ClosingRow]
    columns: Sequence[str]
    title: str | None
    notes: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = self._table(range(len(self.columns)))
        if console.measure(whole, options=options.update(width=1000)).maximum <= options.max_width:
            yield whole
        else:
            yield self._table(range(5))
            yield self._table([0, 1, *range(5, len(self.columns))])
        yield Text("\n".join(self.notes))

    def _table(self, columns: Sequence[int]) -> Table:
        table = Table(title=self.title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        for column in columns:
            words = column in (0, 1, _CHANNELS)
            table.add_column(
                self.columns[column], justify="left" if words else "right", no_wrap=column != _CHANNELS, overflow="fold"
            )
        for row in self.rows:
            table.add_row(*(Text(row.cells[column]) for column in columns), style=row.style, end_section=row.last)
        return table


def _cells(runs: Sequence[RunSummary], accuracies: Sequence[float]) -> list[str]:
    scores = [run.target_score for run in runs if run.target_score is not None]
    sent = {channel: fmean(run.bytes_by_channel.get(channel, 0) for run in runs) for channel in _channels(runs)}
    own = [
        f"{channel} {megabytes(sent[channel])}{_CLEAR if _in_the_clear(channel, runs) else ''}"
        for channel in sent
        if not watched(channel)
    ]
    seconds = [fmean(run.seconds.get(phase, 0.0) for run in runs) for phase in ("local", "exchange", "protection")]
    return [
        _percent(accuracies) + (f" {COLLAPSED}" if any(run.only_class is not None for run in runs) else ""),
        f"{fmean(scores):.3f}" if scores else "-",
        f"{fmean(run.rounds for run in runs):.1f}".removesuffix(".0"),
        "\n".join(own) or "-",
        megabytes(sum(sent[channel] for channel in sent if watched(channel))),
        *(f"{phase:.1f}" for phase in seconds),
        f"{fmean(run.seconds_total for run in runs):.1f}",
    ]


def _in_the_clear(channel: str, runs: Iterable[RunSummary]) -> bool:
    """Whether single messages of a channel are read by who receives them, in runs that hide those of another."""
    return any(
        channel in run.channels
        and any(_hides(about) for about in run.backends.values())
        and not _hides(run.backends.get(channel))
        for run in runs
    )


def _hides(about: Description | None) -> bool:
    return about is not None and not about.backend.startswith("Plain")


def _channels(runs: Iterable[RunSummary]) -> list[str]:
    return list(dict.fromkeys(channel for run in runs for channel in run.bytes_by_channel))


def _percent(accuracies: Sequence[float]) -> str:
    if not accuracies:
        return "-"
    text = f"{100 * fmean(accuracies):.1f}"
    return f"{text} ± {100 * stdev(accuracies):.1f}" if len(accuracies) > 1 else text


def marks(summaries: Sequence[RunSummary]) -> list[str]:
    """Sentences on figures that are not what the column names: of models that predict one class alone, or of noise."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for run in summaries:
        if run.only_class is not None:
            found.setdefault((run.method, run.target, run.only_class), []).append(run.seed)
    lines = [
        f"{COLLAPSED} {method} on {target}, {_seeds(seeds)}, predicts nothing but {name!r}"
        for (method, target, name), seeds in found.items()
    ]
    if any(run.noised for run in summaries):
        lines.append(
            "Numbers of clients, the oracle's as well, carry the noise of differential privacy (reports of the "
            "strategy), and may lie outside 0 to 100%"
        )
    return lines


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"


def _missing_seeds(summaries: Sequence[RunSummary]) -> list[str]:
    """Rows of fewer seeds than others have, where means over seeds stand side by side."""
    every = sorted({run.seed for run in summaries})
    found: dict[tuple[str, str], set[int]] = {}
    for run in summaries:
        found.setdefault((run.method, run.target), set()).add(run.seed)
    return [
        f"{method} on {target} has {_seeds(sorted(seeds))} alone, of {_seeds(every)}"
        for (method, target), seeds in found.items()
        if len(seeds) < len(every)
    ]


def _not_ranked(summaries: Sequence[RunSummary]) -> list[str]:
    """A warning where several methods have scores that invite to be compared."""
    scored = [run for run in summaries if run.target_score is not None]
    if len(methods_of(scored)) < 2:
        return []
    return [
        "the target score compares rounds of one method, not methods: fedlit fit --select best compares these, by "
        "validator/trust"
    ]


def _differences(summaries: Sequence[RunSummary]) -> list[str]:
    """How many points of accuracy each method is above or below the floor, on the targets and seeds that both have."""
    lines = []
    for method in methods_of(summaries):
        by_target = {} if method == FLOOR else gains(summaries, method)
        if not by_target:
            continue
        each = ", ".join(f"{target} {fmean(by_seed.values()):+.1f}" for target, by_seed in by_target.items())
        means = mean_gains(by_target)
        average = f"{fmean(means):+.1f} points on average ({each})" if means else f"{each} points"
        lines.append(f"{method} - {FLOOR}: {average if len(by_target) > 1 else f'{each} points'}")
    return lines


def _selections(summaries: Sequence[RunSummary]) -> list[str]:
    """What choosing a round by the label-free score comes to, next to the best round, for methods that have both."""
    lines = []
    for method in methods_of(summaries):
        runs = [run for run in summaries if run.method == method]
        selected = [run.selected_accuracy for run in runs if run.selected_accuracy is not None]
        best = [run.best_accuracy for run in runs if run.best_accuracy is not None]
        if selected and best:
            lines.append(
                f"{method}, on validation samples (oracle): {100 * fmean(selected):.1f} in the round of the highest "
                f"target score, {100 * fmean(best):.1f} in the best round"
            )
    return lines


def _alternatives(summaries: Sequence[RunSummary]) -> list[str]:
    """Accuracies of methods that predict in several ways."""
    lines = []
    for method in methods_of(summaries):
        runs = [run for run in summaries if run.method == method and run.oracle_alternatives]
        names = dict.fromkeys(name for run in runs for name in run.oracle_alternatives)
        if names:
            each = [
                f"{name} {100 * fmean(r.oracle_alternatives[name] for r in runs if name in r.oracle_alternatives):.1f}"
                for name in names
            ]
            lines.append(f"{method}, by prediction (oracle): {', '.join(each)}")
    return lines


def _privacy(summaries: Sequence[RunSummary]) -> list[str]:
    """What each channel's backend hides and reveals; a method is named where the others differ."""
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
    if not by_text:
        return ["privacy: nothing is sent"]
    everyone = methods_of(summaries)
    return [
        f"privacy: {text}" if methods == everyone else f"privacy ({', '.join(methods)}): {text}"
        for text, methods in by_text.items()
    ]
