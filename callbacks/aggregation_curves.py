"""AggregationCurves: the sources' weights and the numbers that they follow from, as curves and as a file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedlit.callbacks.plots import colors_of, over_rounds
from fedlit.callbacks.shared import federated, is_dry, log_folder, write_rows
from fedlit.run.component import Component
from fedlit.run.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WHOLE = ("beta", "target_variance")
"""Metrics of a round."""
PER_SOURCE = ("beta", "distance", "tau")
"""Metrics of a source in a round, ``METRIC/SOURCE``."""

_MARKERS = "osD^vP*X<>"
_FOOT = 0.15
"""Share of the height below a logarithmic axis for values that it cannot show."""


class AggregationCurves(Callback, Component):
    r"""Collect what FedDA and FedGP log of the sources' weights, and write it as curves and as a table.

    These are ``beta`` and ``beta/SOURCE`` (weights of the sources), ``target_variance`` (:math:`\sigma^2`),
    ``distance/SOURCE`` (:math:`d^2`) and ``tau/SOURCE``, of every round; which of them there are depends on the
    method and on what its privacy backend reveals. At the end of a fit process 0 writes ``aggregation_curves.csv``,
    one row per round, empty where nothing was logged, and ``aggregation_curves.png`` into the Trainer's ``log_dir``, or
    its ``default_root_dir``. A resumed run's files include the rounds before. Nothing is written under
    ``fast_dev_run``, or if no round logged any of them; then there is a warning.

    Attributes:
        rounds: By round, the logged numbers.
    """

    def __init__(self) -> None:
        self.rounds: dict[int, dict[str, float]] = {}
        self._seen: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the rounds before this one, if this run resumes, and nothing else."""
        now = federated(pl_module, self).federation.round_idx
        self.rounds = {round_idx: row for round_idx, row in self.rounds.items() if round_idx < now}
        self._seen = {}

    def on_round_end(self, run: Run) -> None:
        """Collect the numbers of the round that ended."""
        metrics, round_idx = run.trainer.callback_metrics, run.clock.round_idx
        names = [name for name in _columns(client.name for client in run.sources) if name in metrics]
        # callback_metrics keeps the numbers of earlier rounds; those of this round are other tensors
        fresh = {name: metrics[name] for name in names if metrics[name] is not self._seen.get(name)}
        self._seen |= fresh
        if fresh:
            self.rounds[round_idx] = {name: float(value) for name, value in fresh.items()}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the table and the curves."""
        module, folder = federated(pl_module, self), log_folder(trainer)
        if not trainer.is_global_zero:
            return
        if not self.rounds:
            rank_zero_warn(
                f"AggregationCurves has nothing to show: {type(module).__name__} logged none of {', '.join(WHOLE)}, "
                f"{', '.join(f'{metric}/SOURCE' for metric in PER_SOURCE)} in any round, and no file is written. FedDA "
                "and FedGP log them once their warm-up is over; with other methods, remove the callback"
            )
        elif not is_dry(trainer):
            columns = [name for name in _columns(self._sources()) if any(name in row for row in self.rounds.values())]
            rows = [[r, *(self.rounds[r].get(name, "") for name in columns)] for r in sorted(self.rounds)]
            write_rows(folder / "aggregation_curves.csv", [["round", *columns], *rows])
            self.plot().savefig(folder / "aggregation_curves.png", dpi=120)

    def state_dict(self) -> dict[str, Any]:
        """The rounds so far."""
        return {"rounds": {round_idx: dict(row) for round_idx, row in self.rounds.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the rounds of a checkpoint."""
        self.rounds = {int(round_idx): dict(row) for round_idx, row in state_dict["rounds"].items()}

    def plot(self) -> Figure:
        """Curves over rounds: beta, variance and squared distances on a logarithmic axis, and tau.

        Metrics that were never logged get no panel. An estimate of a squared distance can be zero or negative, which a
        logarithmic axis cannot show: it is a mark at the panel's foot.

        Raises:
            ValueError: If no round has been collected.
        """
        from matplotlib.figure import Figure

        sources = self._sources()
        metrics = {name.partition("/")[0] for row in self.rounds.values() for name in row}
        panels = [
            (draw, width)
            for draw, needs, width in (
                (self._draw_beta, {"beta"}, 1.2),
                (self._draw_distances, {"target_variance", "distance"}, 1.2),
                (self._draw_tau, {"tau"}, 1.0),
            )
            if needs & metrics
        ]
        if not panels:
            raise ValueError("plot needs at least one collected round, got none: fit FedDA or FedGP with this callback")
        figure = Figure(figsize=(5 * len(panels) + 2, 4.6), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=[width for _, width in panels])[0]
        handles: dict[str, Any] = {}
        for axis, (draw, _) in zip(axes, panels, strict=True):
            draw(axis, sources)
            over_rounds(axis)
            for line, label in zip(*axis.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, line)
        figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=9, frameon=False)
        return figure

    def _sources(self) -> list[str]:
        """Names of sources, in the order of the columns."""
        names = (name.partition("/") for row in self.rounds.values() for name in row)
        return list(dict.fromkeys(source for metric, slash, source in names if slash and metric in PER_SOURCE))

    def _curve(self, name: str) -> tuple[list[int], list[float]]:
        """Rounds and values; NaN where a round between lacks it interrupts the line."""
        if not any(name in row for row in self.rounds.values()):
            return [], []
        rounds = list(range(min(self.rounds), max(self.rounds) + 1))
        return rounds, [self.rounds.get(round_idx, {}).get(name, math.nan) for round_idx in rounds]

    def _draw_sources(self, axis: Axes, metric: str, sources: list[str]) -> None:
        for place, (source, color) in enumerate(zip(sources, colors_of(len(sources)), strict=True)):
            x, y = self._curve(f"{metric}/{source}")
            if metric == "distance":
                y = [value if value > 0 else math.nan for value in y]
            if x:
                look = {"color": color, "marker": _MARKERS[place % len(_MARKERS)], "markersize": 5, "alpha": 0.9}
                axis.plot(x, y, markevery=_marked(y, place, len(sources)), label=source, linewidth=1.3, **look)

    def _draw_whole(self, axis: Axes, metric: str, label: str, linestyle: str, linewidth: float) -> None:
        x, y = self._curve(metric)
        if x:
            marker = "." if len(x) == 1 else ""
            axis.plot(x, y, color="black", linestyle=linestyle, marker=marker, linewidth=linewidth, label=label)

    def _draw_beta(self, axis: Axes, sources: list[str]) -> None:
        self._draw_sources(axis, "beta", sources)
        self._draw_whole(axis, "beta", "mean of sources", "--", 2)
        axis.set_ylim(-0.03, 1.03)
        axis.set_title(r"weight of the source, $\beta$")

    def _draw_distances(self, axis: Axes, sources: list[str]) -> None:
        axis.set_yscale("log")
        self._draw_sources(axis, "distance", sources)
        self._draw_whole(axis, "target_variance", r"target variance $\sigma^2$", ":", 2.5)
        curves = [self._curve(f"distance/{source}") for source in sources]
        if any(value <= 0 for _, y in curves for value in y):
            low, high = axis.get_ylim()
            axis.set_ylim(low * (low / high) ** _FOOT, high)
        for place, ((x, y), color) in enumerate(zip(curves, colors_of(len(sources)), strict=True)):
            below = [round_idx for round_idx, value in zip(x, y, strict=True) if value <= 0]
            if below:
                heights = [0.01 + _FOOT * place / len(sources)] * len(below)
                look = {"markersize": 7, "color": color, "clip_on": False}
                axis.plot(below, heights, "_", transform=axis.get_xaxis_transform(), **look)
                axis.plot([], [], "_", color="grey", markersize=7, label=r"$d^2$ estimated $\leq 0$")
        axis.set_title(r"squared distance $d^2$ and target variance $\sigma^2$")

    def _draw_tau(self, axis: Axes, sources: list[str]) -> None:
        self._draw_sources(axis, "tau", sources)
        axis.set_ylim(-0.03, 1.03)
        axis.set_title(r"$\tau$, distance of $g_T$ to the directions of $g_S$, over $d$")


def _columns(sources: Iterable[str]) -> list[str]:
    names = list(sources)
    return [*WHOLE, *(f"{metric}/{source}" for metric in PER_SOURCE for source in names)]


def _marked(values: list[float], place: int, number: int) -> list[int]:
    """Positions that get a marker: all of a short curve, and of a long one some, and those that no line reaches.

    Sources take turns with their markers, so that equal curves are seen to be several.
    """
    step = max(number, math.ceil(len(values) / 25)) if len(values) > 2 * number else 1
    gap = [True, *(math.isnan(value) for value in values), True]
    return [at for at in range(len(values)) if at % step == place * step // number or (gap[at] and gap[at + 2])]
