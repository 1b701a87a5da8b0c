"""ConformalIntervals: intervals around predicted numbers, from residuals of the sources' held-out samples."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fedlit.callbacks.oracle_accuracy import OracleAccuracy
from fedlit.callbacks.shared import INTERVALS, check_counts, federated, report_target, total_of_sources
from fedlit.checks import check
from fedlit.federation import Channel, RosterError, Summed
from fedlit.functional.quantiles import agree_on_quantiles, conformal_rank, fewest_residuals
from fedlit.run.component import Component
from fedlit.run.evaluation import named_outputs
from fedlit.run.outputs import Intervals
from fedlit.run.run import Run
from fedlit.run.tasks import Regression


class ConformalIntervals(Callback, Component):
    """Measure in each validation how wide an interval around a prediction has to be, by split conformal prediction.

    Promised, whatever the distribution and the model: an interval holds the label of a new sample with a probability
    of at least 1 - alpha, over the draw of that sample and of the sources' validation samples, if these are
    exchangeable and it is predicted by the network of its source. So it does if K sources differ and the new sample is
    from one of them, drawn with a probability proportional to n_k + 1 for n_k validation samples. Each of several
    numbers is by itself. Where all clients have one network (`FedAvg`), that is the target's.

    Not promised: anything for a target that differs from the sources, or for a kind of samples by themselves; nor that
    intervals are as wide as needed after a round or setting was chosen by these validation samples. `OracleAccuracy`
    measures the share at the target, ``oracle/target/coverage``.

    The radius is the r-th smallest absolute residual of all sources' validation samples, r = ceil((1 - alpha)(n + K)),
    rounded up to one of 256 steps between two powers of two: at most 0.4% too large, never too small. Sources send
    counts of residuals by size over the channel "intervals", of which the backend sums: 259 + 255 numbers for each
    number to predict. All clients learn the sum. It is logged in the labels' unit as ``target/radius``, of several
    numbers as ``target/radius/NUMBER`` beside their mean, and kept in checkpoints with the target's state. Predictions
    (`TargetPredictions`) and exported files have it. A round of training forgets it: validate after the last one.

    Args:
        alpha: Share of new samples that may lie outside, in (0, 1).

    Raises:
        ValueError: If alpha is out of range; when a run starts, if the method predicts classes, if `OracleAccuracy` is
            listed before, or if the backend's grid has fewer than 16 fraction bits.
        ChannelError: If all channels are to be blurred by differential privacy: the promise is of exact counts.
        RosterError: In a validation, on all processes, if the sources have fewer than K (1 - alpha) / alpha samples.

    References:
        Papadopoulos et al., Inductive confidence machines for regression, ECML 2002; Lei et al., Distribution-free
        predictive inference for regression, JASA 2018; Lu et al., Federated conformal predictors for distributed
        uncertainty quantification, ICML 2023.
    """

    def __init__(self, alpha: float = 0.1) -> None:
        check(0 < alpha < 1, "alpha", "above 0 and below 1", alpha)
        self.alpha = float(alpha)
        self._residuals: dict[str, list[Tensor]] = {}

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Counts of the sources."""
        contents, how_often = "counts of validation residuals by size", "twice every validation"
        way = (
            "intervals are promised of exact counts: remove ConformalIntervals, or let a mechanism blur other channels"
        )
        return (Summed(INTERVALS, contents, "sources", how_often=how_often, unblurred=way),)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse classification, and a place after the callback that scores the intervals."""
        if not isinstance(federated(pl_module, self).task, Regression):
            raise ValueError(
                "ConformalIntervals is for numbers, and the method predicts classes: give it task='regression', or "
                "list Calibration, which is for probabilities"
            )
        before = trainer.callbacks[: trainer.callbacks.index(self)]  # type: ignore[attr-defined]
        if any(isinstance(callback, OracleAccuracy) for callback in before):
            raise ValueError("ConformalIntervals must be listed before OracleAccuracy, which scores them: swap them")

    def on_run_start(self, run: Run) -> None:
        """Refuse a grid on which counts are not exact."""
        check_counts(run, INTERVALS)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the residuals of the last validation."""
        self._residuals = {}

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Keep residuals of the local sources."""
        module = federated(pl_module, self)
        for client in module.sources:
            if client.name in outputs and not trainer.sanity_checking:
                predicted = outputs[client.name].detach().double()
                residuals = (predicted - batch[client.name][1].reshape(predicted.shape)).abs()
                # a model that has diverged is wrong by any amount
                self._residuals.setdefault(client.name, []).append(residuals.nan_to_num(torch.inf, torch.inf).cpu())

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the radius, and report it."""
        if trainer.sanity_checking:
            return
        module = federated(pl_module, self)
        error: RosterError | None = None

        def values(name: str) -> Tensor:
            kept = self._residuals.get(name)
            return torch.full((0, module.num_classes), torch.nan) if kept is None else torch.cat(kept)

        def rank(numbers: Tensor, clients: Tensor) -> Tensor:
            nonlocal error
            number, several = int(numbers[0]), int(clients[0])  # each sample has all numbers
            needed = max(1, fewest_residuals(several, self.alpha))
            if number < needed:
                error = RosterError(
                    f"ConformalIntervals(alpha={self.alpha:g}) needs at least {needed} validation samples of the "
                    f"sources, which have {number}: raise val_fraction of the data module, or alpha"
                )
            return torch.full_like(numbers, conformal_rank(number, several, self.alpha))

        radius = agree_on_quantiles(module.num_classes, values, rank, total_of_sources(module, INTERVALS))
        module.federation.check("intervals", error)
        module.run.outputs.intervals = None if radius is None else Intervals(self.alpha, radius)
        self._residuals = {}
        self.on_test_epoch_end(trainer, pl_module)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the radius that the target predicts with."""
        module = federated(pl_module, self)
        intervals, size = module.run.outputs.intervals, module.num_classes
        names = ["radius", *(f"radius/{index}" for index in range(size) if size > 1)]
        local: dict[str, float] | None = None
        if intervals is not None and module.federation.is_local(module.target):
            each = intervals.radius.tolist()
            local = dict(zip(names, [sum(each) / size, *each], strict=False))
        reported = named_outputs(trainer, report_target(module, local, names))
        module.run.log({f"target/{name}": value for name, value in reported.items()})

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if there are no intervals for the weights of the last round."""
        module = federated(pl_module, self)
        if module.run.outputs.intervals is None and module.federation.is_local(module.target):
            warnings.warn(
                "rounds were trained after the last validation, and predictions have no intervals: let a validation "
                "follow the last round (check_val_every_n_epoch), or take a checkpoint of a validation",
                stacklevel=2,
            )
