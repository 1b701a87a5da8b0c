"""AggregationCurves: the sources' weights and the numbers that they follow from, as curves and as a file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedlit.callbacks.shared import colors_of, federated, is_dry, log_folder, over_rounds, write_rows
from fedlit.run.component import Component
from fedlit.run.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WHOLE = ("beta", "target_variance")
"""Metrics of a round."""
PER_SOURCE = ("beta", "distance", "tau")
"""Metrics of a source in a round, ``METRIC/SOURCE``."""

_PANELS = (
    ("beta", r"weight of the source, $\beta$", "beta", "mean of sources"),
    (
        "distance",
        r"squared distance $d^2$ and target variance $\sigma^2$",
        "target_variance",
        r"target variance $\sigma^2$",
    ),
    ("tau", r"$\tau$, distance of $g_T$ to the directions of $g_S$, over $d$", None, None),
)
"""Of each panel, the metric of its sources, its title, and the metric of the round in it with its label."""


class AggregationCurves(Callback, Component):
    r"""Collect what FedDA and FedGP log of the sources' weights, and write it as curves and as a table.

    These are ``beta`` and ``beta/SOURCE`` (weights of the sources), ``target_variance`` (:math:`\sigma^2`),
    ``distance/SOURCE`` (:math:`d^2`) and ``tau/SOURCE``, of every round, as far as the method and its privacy backend
    show them. At the end of a fit process 0 writes ``aggregation_curves.csv``, one row per round, also of those before
    a resumption, and ``aggregation_curves.png`` into the Trainer's ``log_dir`` or ``default_root_dir``; across
    organisations, where a backend hides, the target's process does. Nothing is written under ``fast_dev_run``, or if no
    round logged any of them; then there is a warning.

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
        if not run.federation.shows(run.target):  # who has reported them
            return
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
        if not trainer.is_global_zero or not module.federation.shows(module.target):
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
        """Curves over rounds: beta, variance and squared distances, and tau; metrics never logged get no panel.

        The axis of distances is linear around 0, as an estimate can be negative. A `ValueError` without any round.
        """
        from matplotlib.figure import Figure

        logged = {name.partition("/")[0] for row in self.rounds.values() for name in row}
        panels = [panel for panel in _PANELS if {panel[0], panel[2]} & logged]
        if not panels:
            raise ValueError("plot needs at least one collected round, got none: fit FedDA or FedGP with this callback")
        figure = Figure(figsize=(5 * len(panels) + 2, 4.6), layout="constrained")
        handles: dict[str, Any] = {}
        for axis, (metric, title, whole, label) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            self._draw(axis, metric, whole, label)
            axis.set_title(title)
            over_rounds(axis)
            for line, name in zip(*axis.get_legend_handles_labels(), strict=True):
                handles.setdefault(name, line)
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

    def _draw(self, axis: Axes, metric: str, whole: str | None, label: str | None) -> None:
        sources, values = self._sources(), list[float]()
        for place, (source, color) in enumerate(zip(sources, colors_of(len(sources)), strict=True)):
            x, y = self._curve(f"{metric}/{source}")
            values += y
            if x:  # smaller dots on top show that equal curves are several; a dot shows a round between two gaps
                size = 6 - 4 * place / len(sources)
                axis.plot(x, y, color=color, marker="o", markersize=size, linewidth=1.3, label=source)
        x, y = self._curve(whole) if whole else ([], [])
        if x:
            axis.plot(x, y, color="black", linestyle="--", marker="" if len(x) > 1 else ".", linewidth=2, label=label)
        if metric == "distance":
            sizes = [abs(value) for value in values + y if value and math.isfinite(value)]
            axis.set_yscale("symlog", linthresh=min(sizes, default=1.0))
        else:
            axis.set_ylim(-0.03, 1.03)


def _columns(sources: Iterable[str]) -> list[str]:
    names = list(sources)
    return [*WHOLE, *(f"{metric}/{source}" for metric in PER_SOURCE for source in names)]
