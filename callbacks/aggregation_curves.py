"""AggregationCurves: how much each source weighed, and why, as curves and as a file."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedlit.callbacks.shared import federated
from fedlit.run.component import Component
from fedlit.run.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WHOLE = ("beta", "target_variance")
"""Metrics of a round."""
PER_SOURCE = ("beta", "distance", "tau")
"""Metrics of a source in a round, ``KIND/SOURCE``."""

_MARKERS = "osD^vP*X<>"


class AggregationCurves(Callback, Component):
    r"""Collects what FedDA and FedGP log of the sources' weights, and writes it as curves and as a table.

    These are ``beta`` and ``beta/SOURCE`` (weights of the sources), ``target_variance`` (:math:`\sigma^2`),
    ``distance/SOURCE`` (:math:`d^2`) and ``tau/SOURCE``, of every round; how many of them there are depends on the
    method and on what its privacy backend keeps open. At the end of a fit process 0 writes ``aggregation_curves.csv``,
    one row per round, empty where nothing was logged, and ``aggregation_curves.png`` into the Trainer's ``log_dir``, or
    its ``default_root_dir``. A resumed run's files include the rounds before. Nothing is written under
    ``fast_dev_run``, or if no round logged any of them; then there is a warning.

    Attributes:
        rounds: By round, what was logged in it.
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
        """Collect what was logged in the round that ended."""
        metrics = run.trainer.callback_metrics
        names = [name for name in _columns(client.name for client in run.sources) if name in metrics]
        # callback_metrics keeps the numbers of earlier rounds; those of this round are other tensors
        fresh = {name: metrics[name] for name in names if metrics[name] is not self._seen.get(name)}
        self._seen |= fresh
        if fresh:
            self.rounds[run.clock.round_idx] = {name: float(value) for name, value in fresh.items()}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the table and the curves."""
        module = federated(pl_module, self)
        # log_dir is a broadcast: all processes ask for it
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if not trainer.is_global_zero:
            return
        if not self.rounds:
            rank_zero_warn(
                f"AggregationCurves has nothing to show: {type(module).__name__} logged none of {', '.join(WHOLE)}, "
                f"{', '.join(f'{kind}/SOURCE' for kind in PER_SOURCE)} in any round, and no file is written. FedDA and "
                "FedGP log them once their warm-up is over; with other methods, remove the callback"
            )
        elif not trainer.fast_dev_run:  # type: ignore[attr-defined]
            folder.mkdir(parents=True, exist_ok=True)
            self._write(folder / "aggregation_curves.csv")
            self.plot().savefig(folder / "aggregation_curves.png", dpi=120)

    def state_dict(self) -> dict[str, Any]:
        """The rounds so far."""
        return {"rounds": {round_idx: dict(row) for round_idx, row in self.rounds.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the rounds of a checkpoint."""
        self.rounds = {int(round_idx): dict(row) for round_idx, row in state_dict["rounds"].items()}

    def plot(self) -> Figure:
        """Curves over rounds: beta, variance and squared distances on a logarithmic axis, and tau.

        What was never logged gets no panel. An estimate of a squared distance can be zero or negative, which a
        logarithmic axis cannot show: it is a mark at the panel's foot.

        Raises:
            ValueError: If no round has been collected.
        """
        from matplotlib.figure import Figure

        sources, kinds = self._sources(), {name.partition("/")[0] for row in self.rounds.values() for name in row}
        panels = [
            (draw, width)
            for draw, needs, width in (
                (self._draw_beta, {"beta"}, 1.2),
                (self._draw_distances, {"target_variance", "distance"}, 1.2),
                (self._draw_tau, {"tau"}, 1.0),
            )
            if needs & kinds
        ]
        if not panels:
            raise ValueError("plot needs at least one collected round, got none: fit FedDA or FedGP with this callback")
        figure = Figure(figsize=(5 * len(panels) + 2, 4.6), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=[width for _, width in panels])[0]
        handles: dict[str, Any] = {}
        for axis, (draw, _) in zip(axes, panels, strict=True):
            draw(axis, sources)
            axis.set_xlabel("round")
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.grid(alpha=0.25)
            lines, labels = axis.get_legend_handles_labels()
            handles |= {label: line for line, label in zip(lines, labels, strict=True) if label not in handles}
        figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=9, frameon=False)
        return figure

    def _sources(self) -> list[str]:
        """Names of sources, in the order of the columns."""
        names = (name.partition("/") for row in self.rounds.values() for name in row)
        return list(dict.fromkeys(source for kind, slash, source in names if slash and kind in PER_SOURCE))

    def _curve(self, name: str) -> tuple[list[int], list[float]]:
        """Rounds and values, not-a-number where a round between lacks it, so that the line is interrupted."""
        rounds = sorted(self.rounds)
        if not any(name in self.rounds[round_idx] for round_idx in rounds):
            return [], []
        everywhere = list(range(rounds[0], rounds[-1] + 1))
        return everywhere, [self.rounds.get(round_idx, {}).get(name, math.nan) for round_idx in everywhere]

    def _draw_sources(self, axis: Axes, kind: str, sources: list[str]) -> None:
        for place, source in enumerate(sources):
            x, y = self._curve(f"{kind}/{source}")
            if kind == "distance":
                y = [value if value > 0 else math.nan for value in y]
            if x:
                axis.plot(x, y, markevery=_marked(y, place, len(sources)), label=source, **_style(place, sources))

    def _draw_beta(self, axis: Axes, sources: list[str]) -> None:
        self._draw_sources(axis, "beta", sources)
        x, y = self._curve("beta")
        if x:
            marker = "." if len(x) == 1 else ""
            axis.plot(x, y, color="black", linestyle="--", marker=marker, linewidth=2, label="mean of sources")
        axis.set_ylim(-0.03, 1.03)
        axis.set_title(r"weight of the source, $\beta$")

    def _draw_distances(self, axis: Axes, sources: list[str]) -> None:
        axis.set_yscale("log")
        self._draw_sources(axis, "distance", sources)
        x, y = self._curve("target_variance")
        if x:
            marker = "." if len(x) == 1 else ""
            label = r"target variance $\sigma^2$"
            axis.plot(x, y, color="black", linestyle=":", marker=marker, linewidth=2.5, label=label)
        foot, curves = 0.15, [self._curve(f"distance/{source}") for source in sources]
        if any(value <= 0 for _, y in curves for value in y):
            low, high = axis.get_ylim()
            axis.set_ylim(low * (low / high) ** foot, high)
        for place, (x, y) in enumerate(curves):
            where = [round_idx for round_idx, value in zip(x, y, strict=True) if value <= 0]
            if where:
                style = {"color": _style(place, sources)["color"], "clip_on": False}
                heights = [0.01 + foot * place / len(sources)] * len(where)
                axis.plot(where, heights, "_", markersize=7, transform=axis.get_xaxis_transform(), **style)
                axis.plot([], [], "_", color="grey", markersize=7, label=r"$d^2$ estimated $\leq 0$")
        axis.set_title(r"squared distance $d^2$ and target variance $\sigma^2$")

    def _draw_tau(self, axis: Axes, sources: list[str]) -> None:
        self._draw_sources(axis, "tau", sources)
        axis.set_ylim(-0.03, 1.03)
        axis.set_title(r"$\tau$, distance of $g_T$ to the directions of $g_S$, over $d$")

    def _write(self, path: Path) -> None:
        columns = [name for name in _columns(self._sources()) if any(name in row for row in self.rounds.values())]
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["round", *columns])
            writer.writeheader()
            for round_idx in sorted(self.rounds):
                writer.writerow({"round": round_idx, **self.rounds[round_idx]})


def _columns(sources: Iterable[str]) -> list[str]:
    names = list(sources)
    return [*WHOLE, *(f"{kind}/{source}" for kind in PER_SOURCE for source in names)]


def _marked(values: list[float], place: int, number: int) -> list[int]:
    """Which values get a marker: all of a short curve, and of a long one some, and those that no line reaches.

    Sources take turns with their markers, so that equal curves are seen to be several.
    """
    step = max(number, math.ceil(len(values) / 25)) if len(values) > 2 * number else 1
    gap = [True, *(math.isnan(value) for value in values), True]
    return [at for at in range(len(values)) if at % step == place * step // number or (gap[at] and gap[at + 2])]


def _style(place: int, sources: list[str]) -> dict[str, Any]:
    """Colour and marker of a source, alike in all panels."""
    import matplotlib as mpl

    few = len(sources) <= 10
    color = mpl.colormaps["tab10"](place) if few else mpl.colormaps["turbo"](0.04 + 0.92 * place / (len(sources) - 1))
    return {"color": color, "marker": _MARKERS[place % len(_MARKERS)], "markersize": 5, "linewidth": 1.3, "alpha": 0.9}
