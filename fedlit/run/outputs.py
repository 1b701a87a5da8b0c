"""Interpretation of outputs: scale of labels and radius of intervals in regression, the target's temperature.

Networks learn labels of mean 0 and deviation 1, since a squared error grows with the labels' unit and no learning rate
would fit metres and millimetres alike; predictions are in the labels' unit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedlit.checks import check
from fedlit.federation import Channel, FederatedLoader, RosterError, SampleError, Summed
from fedlit.federation.samples import check_labels
from fedlit.functional.table_moments import agree_on_moments, own_moments
from fedlit.run.component import Component
from fedlit.run.tasks import Regression

if TYPE_CHECKING:
    from fedlit.run.run import Run

NAME = "label_statistics"
"""Name of the channel."""

ROUNDING = 0.01
"""Share of the labels' deviation by which a Trainer's precision may round them."""


@dataclass(frozen=True, eq=False)
class LabelScale:
    """Mean and deviation of a client's labels in the run, for k numbers to predict.

    Args:
        mean: In the labels' unit, float64, shape (k,).
        deviation: In the labels' unit, positive, float64, shape (k,).
    """

    mean: Tensor
    deviation: Tensor

    def standardised(self, labels: Tensor) -> Tensor:
        """Return labels of shape (n,) or (n, k), less the mean and over the deviation; NaN stays NaN."""
        numbers = labels.reshape(len(labels), -1).double()
        scaled = ((numbers - self.mean.to(labels.device)) / self.deviation.to(labels.device)).reshape(labels.shape)
        return scaled.to(labels.dtype if labels.is_floating_point() else torch.get_default_dtype())

    def in_unit(self, outputs: Tensor) -> Tensor:
        """Return outputs of shape (n, k) in the labels' unit, as float64: float32 has steps of 64 at 1e9."""
        return outputs.double() * self.deviation.to(outputs.device) + self.mean.to(outputs.device)

    def state(self) -> dict[str, list[float]]:
        """Return plain data for a checkpoint."""
        return {"mean": self.mean.tolist(), "deviation": self.deviation.tolist()}

    @classmethod
    def from_state(cls, state: Any, num_outputs: int) -> LabelScale:
        """Restore what `state` returned; a `RosterError` if it is something else, or of another number of outputs."""
        mean, deviation = (state.get(key) if isinstance(state, Mapping) else None for key in ("mean", "deviation"))
        if not _numbers(mean, num_outputs, -inf) or not _numbers(deviation, num_outputs, 0.0):
            raise RosterError(
                f"the checkpoint's scale of labels must have the mean and the positive deviation of {num_outputs} "
                f"numbers (num_classes), got {str(state)[:200]}"
            )
        return cls(torch.tensor(mean, dtype=torch.float64), torch.tensor(deviation, dtype=torch.float64))

    @classmethod
    def of(cls, mean: Tensor, deviation: Tensor, labels: Mapping[str, Tensor]) -> LabelScale:
        """Build from statistics of shape (k,) and local labels of shape (n, k); constant labels keep their unit."""
        for name, numbers in labels.items():
            known = numbers[numbers.isfinite().all(dim=1)]
            if bool(((deviation == 0) & (known != known[:1]).any(dim=0)).any()):
                warnings.warn(
                    f"labels of client {name!r} differ by too little, or by too little of their size, for their "
                    "deviation to be found: they are learnt in their unit. Give them in another one, or less an offset",
                    stacklevel=2,
                )
        return cls(mean, torch.where(deviation > 0, deviation, 1.0))


def _numbers(given: object, number: int, above: float) -> bool:
    return (
        isinstance(given, list)
        and len(given) == number
        and all(isinstance(each, float) and above < each < inf for each in given)
    )


@dataclass(frozen=True, eq=False)
class Intervals:
    """Intervals around the k numbers that are predicted for a sample.

    Args:
        alpha: Share of new samples that may lie outside, in (0, 1).
        radius: Half of each interval's length, in the labels' unit, float64, shape (k,), at least 0.
    """

    alpha: float
    radius: Tensor

    def around(self, predictions: Tensor) -> tuple[Tensor, Tensor]:
        """Return lower and upper ends around predictions, two of shape (n, k), float64."""
        radius = self.radius.to(predictions.device)
        return predictions.double() - radius, predictions.double() + radius

    @property
    def promise(self) -> str:
        """What holds for the intervals and what does not, in a sentence."""
        return (
            f"each interval holds at least {100 * (1 - self.alpha):.4g}% of new samples that are like the sources' "
            "validation samples and predicted as these were, each number by itself; for a target that differs from "
            "the sources nothing is promised"
        )

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"alpha": self.alpha, "radius": self.radius.tolist()}

    @classmethod
    def from_state(cls, state: Any, num_outputs: int) -> Intervals:
        """Restore what `state` returned; a `RosterError` if it is something else, or of another number of outputs."""
        found: Any = state if isinstance(state, Mapping) else {}
        alpha, radius = found.get("alpha"), found.get("radius")
        fits = isinstance(alpha, float) and 0 < alpha < 1 and isinstance(radius, list) and len(radius) == num_outputs
        rule = f"alpha in (0, 1) and the radius of {num_outputs} numbers in the checkpoint"
        fits = fits and all(isinstance(each, float) and each >= 0 for each in radius)
        check(fits, "intervals", rule, state, error=RosterError, shown=str(state)[:200])
        return cls(alpha, torch.tensor(radius, dtype=torch.float64))


class Outputs(Component):
    """Keep the scale of labels, which is computed when a run starts, the target's temperature, and intervals.

    Attributes:
        scales_labels: Whether networks learn standardised labels in regression.
        temperature: Divisor of the target's logits at its process; 1 unless `Calibration` or a refinement has set
            another.
        is_refined: Whether the target's classifier is that of a refinement (`refine`), whose temperature it has.
        intervals: Around the target's predictions, at its process; ``None`` unless `ConformalIntervals` has measured
            them with the weights that clients have now.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.scales_labels = True
        self.temperature, self.is_refined = 1.0, False
        self.intervals: Intervals | None = None

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The channel for statistics of labels, from the sources and a target that trains on labels.

        None in classification, without ``scale_labels``, or where the target trains alone.
        """
        run = self._run
        scaled = isinstance(run.task, Regression) and self.scales_labels
        if not scaled or not (run.requires.sources or run.clock.warmup_rounds):
            return ()
        learners = {client.name for client in run.learners(run.clock.warmup_rounds)}
        return (
            Summed(
                NAME,
                "mean and deviation of labels, unless scale_labels is false",
                up="everyone" if run.target.labelled and run.target.name in learners else "sources",
                how_often="once",
                fixed=True,
                unblurred="statistics of labels are exact: give the model scale_labels=False and scale labels in the "
                "data, or let a mechanism blur other channels alone",
            ),
        )

    def on_run_start(self, run: Run) -> None:
        """Forget what an earlier run has left."""
        self.temperature, self.is_refined, self.intervals = 1.0, False, None

    def on_round_start(self, run: Run) -> None:
        """Forget intervals, which are those of the weights before."""
        self.intervals = None

    def client_state(self, client: str) -> dict[str, Any]:
        """Return a client's scale of labels, and the target's temperature and intervals."""
        task, state = self._run.task, dict[str, Any]()
        if isinstance(task, Regression) and client in task.scales:
            state["label_scale"] = task.scales[client].state()
        if client == self._run.target.name and self.temperature != 1:
            state["temperature"] = self.temperature
        if client == self._run.target.name and self.is_refined:
            state["refined"] = True
        if client == self._run.target.name and self.intervals is not None:
            state["intervals"] = self.intervals.state()
        return state

    def load_state(self, clients: Mapping[str, Mapping[str, Any]], public: Mapping[str, Any], resumes: bool) -> None:
        """Restore scales, temperature (default 1) and intervals; a `RosterError` if there is something else."""
        task = self._run.task
        if isinstance(task, Regression):
            states = {name: state.get("label_scale") for name, state in clients.items()}
            task.scales = {
                name: LabelScale.from_state(state, task.num_outputs)
                for name, state in states.items()
                if state is not None
            }
        # of the target's state, wherever it is hosted
        of_target = public.get("clients", {}).get(self._run.target.name, {})
        intervals, found = of_target.get("intervals"), of_target.get("temperature", 1.0)
        self.intervals = None if intervals is None else Intervals.from_state(intervals, task.num_outputs)
        is_positive = isinstance(found, float) and 0 < found < inf
        check(is_positive, "temperature", "a positive number in the checkpoint", found, error=RosterError)
        self.temperature, self.is_refined = found, bool(of_target.get("refined", False))

    def scale_labels_(self, loader: FederatedLoader, resumes: bool) -> None:
        """Compute the scale of labels at the start of a run, if the task has one; all processes call it."""
        task = self._run.task
        if isinstance(task, Regression) and self.scales_labels:
            task.scales = label_scales(self._run, task, loader, resumes)


def label_scales(run: Run, task: Regression, loader: FederatedLoader, resumes: bool) -> dict[str, LabelScale]:
    """Compute the scale of labels by local client, equal at all clients.

    It is that of all training labels of the channel's senders, absent clients included. A target that trains alone
    computes it from its labels, and the sources have none. Scales of a checkpoint or an earlier run are kept; a
    checkpoint without scales continues without.

    Raises:
        RosterError: On every process, if labels are not k finite numbers for each sample, or the Trainer's precision
            rounds them by more than `ROUNDING`.
    """
    federation, kept, num_outputs = run.federation, dict(task.scales), task.num_outputs
    if NAME not in federation.channels:
        labels = _local_labels(run, loader, [run.target.name], num_outputs)
        alone = {name: LabelScale.of(*own_moments(each.double()), {name: each}) for name, each in labels.items()}
        _check_rounding(run, labels, alone)
        return kept if resumes or kept else alone
    local = [client.name for client in federation.local_clients]
    complete, losable = resumes or kept.keys() >= {*local}, federation.transport.losable
    # A site may return later without a checkpoint, and replays the messages from here: there must be some every time.
    if not losable:
        federation.settle()
        answers = federation.transport.all_gather(complete, "whether labels have a scale")
        if all(each is True for each in answers):
            return kept
    senders = federation.channels[NAME].senders
    labels = _local_labels(run, loader, senders, num_outputs)
    samples = {client.name: client.num_samples or 0 for client in federation.clients if client.name in senders}

    def total(_: str, message: Callable[[str], Tensor]) -> Tensor | None:
        payloads = {name: {"moments": message(name)} for name in labels}
        received = federation.mean(NAME, payloads, absent_too=True)
        mean = next(iter(received.values()), None)
        return None if mean is None else len(senders) * mean["moments"].double().cpu()

    scale = LabelScale.of(*agree_on_moments(num_outputs, lambda name: labels[name].double(), samples, total), labels)
    _check_rounding(run, labels, dict.fromkeys(labels, scale))
    return kept if complete and losable else dict.fromkeys(local, scale)


def _local_labels(run: Run, loader: FederatedLoader, clients: Sequence[str], num_outputs: int) -> dict[str, Tensor]:
    """Return training labels of these clients that are local, each of shape (n, k), NaN where unknown."""
    labels: dict[str, Tensor] = {}
    error: RosterError | None = None
    target = run.target.name
    for name in (each for each in clients if each in loader.datasets):
        batches = loader.in_order([name], labelled_only=name == target and not run.requires.unlabelled_target)
        numbers = torch.cat([torch.as_tensor(batch[name][1]) for batch in batches])
        try:  # a loss from outside of fedlit has had no look at them
            check_labels(numbers, name, "regression", num_outputs, may_lack=name == target, exact=False)
        except SampleError as found:
            error = error or found
        numbers = numbers.reshape(len(numbers), -1)
        known = numbers.isfinite().all(dim=1)
        labels[name] = numbers if known.all() else torch.where(known[:, None], numbers, torch.nan)
    run.federation.check("labels", error)
    return labels


def _check_rounding(run: Run, labels: Mapping[str, Tensor], scales: Mapping[str, LabelScale]) -> None:
    """Refuse a Trainer's precision that rounds labels coarsely before training and evaluation receive them."""
    error: RosterError | None = None
    plugin = run.trainer.precision_plugin
    for name, exact in labels.items():
        rounded = plugin.convert_input(exact).double()
        lost = ((rounded - exact.double()).abs() / scales[name].deviation).nan_to_num(0.0)
        if len(lost) and float(lost.max()) > ROUNDING:
            error = error or RosterError(
                f"precision={plugin.precision!r} rounds labels of client {name!r} by up to {float(lost.max()):.2g} of "
                "their deviation: give the Trainer precision='bf16-mixed' or '32-true', or scale the labels in the data"
            )
    run.federation.check("rounded labels", error)
