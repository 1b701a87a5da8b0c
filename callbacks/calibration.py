"""Calibration: a temperature for the target's probabilities, fitted without its labels or with few."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedlit.callbacks.oracle_accuracy import OracleAccuracy
from fedlit.callbacks.shared import CALIBRATION, SourceStatistics, federated, report_target
from fedlit.checks import check_one_of
from fedlit.federation import Channel, RosterError, Summed
from fedlit.federation.nested import Inputs
from fedlit.functional import best_temperature, fit_temperature, importance_weights, losses_at
from fedlit.functional.calibration import LOWEST
from fedlit.functional.symmetric import from_upper_half, upper_half
from fedlit.module import FederatedModule
from fedlit.run.outputs import Outputs

Using = Literal["sources", "weighted", "target"]

MIN_LABELS = 10
"""Labelled samples of the target that it takes to fit a temperature."""

RIDGE = 10.0
"""Of the importance weights: few samples show no more of a ratio of densities, and weights below 0 mislead."""


class Calibration(SourceStatistics):
    """Divide the target's logits by a temperature: above 1 if its probabilities are too sure, below 1 if not enough.

    The sources' samples show how sure a model is next to how often it is right on them; on a target that is harder, the
    temperature that fits the sources leaves the model too sure. It is fitted anew in each validation, logged as
    ``target/temperature``, kept in checkpoints with the target's state, and used in ``predict``, by
    `TargetPredictions`, `target_model` and in exported files; a new ``fit`` starts without. Predicted classes stay the
    same.

    A target whose classifier a refinement has replaced (``refine``) keeps the temperature that comes with it, as the
    sources' classifiers, whose logits have another scale, show nothing of it. Where no sample that it is fitted to is
    predicted wrongly, no temperature is too low for these: it stays 1, with a warning.

    Each source sends the mean loss of its model on its validation samples at 53 temperatures from 0.05 to 20; the
    target receives the mean over sources through the privacy backend of the channel "calibration". Where the target
    differs much from the sources, so may the temperature that it needs. Under differential privacy of all channels
    every validation spends of the privacy budget, and noise decides on the temperature: take ``using="target"`` there.

    Args:
        using: Samples that the temperature is fitted to. ``"sources"``: their validation samples. ``"weighted"``:
            those, weighted by the resemblance of their features to the target's (see `importance_weights`); sources
            send 5473 numbers. ``"target"``: the target's labelled training samples, at least 10; nothing is sent. The
            temperature is too low for a method that has trained on these, and at least 1 then, or at least that of
            the refinement. A method that trains no source, such as TargetOnly, keeps a temperature of 1 but for
            ``"target"``, with a warning.

    Raises:
        ValueError: If ``using`` is unknown; when a run starts, if the method predicts no classes, or `OracleAccuracy`
            is listed before, which would score with the temperature of the previous validation.
        RosterError: In a validation, on all processes, if there are no samples to fit a temperature to, or too few.

    References:
        Guo et al., On calibration of modern neural networks, ICML 2017; with weights: Park et al., Calibrated
        prediction with covariate shift via unsupervised domain adaptation, AISTATS 2020.
    """

    def __init__(self, using: Using = "sources") -> None:
        check_one_of("using", using, get_args(Using))
        self.using = using
        super().__init__()

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Losses of the sources, if they are used."""
        contents = "mean loss on validation samples at 53 temperatures"
        if self.using == "weighted":
            contents += ", and mean random features of them"
        losses = Summed(CALIBRATION, contents, "sources", "target", "every validation", watched=True)
        return () if self.using == "target" else (losses,)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse regression, and a place after the callback that scores the calibrated probabilities."""
        super().setup(trainer, pl_module, stage)
        before = trainer.callbacks[: trainer.callbacks.index(self)]  # type: ignore[attr-defined]
        if any(isinstance(callback, OracleAccuracy) for callback in before):
            raise ValueError("Calibration must be listed before OracleAccuracy, which scores what it mends: swap them")
        module = federated(pl_module, self)
        if stage == "fit" and not self._fits(module):
            rank_zero_warn(
                f"Calibration(using={self.using!r}) leaves the target's probabilities as they are: {module.run.name} "
                "trains no source, so that samples of the sources show nothing of it; using='target' takes labels of "
                "the target"
            )

    def _fits(self, module: FederatedModule) -> bool:
        """Whether a temperature can be fitted: samples of sources show nothing where no source is trained."""
        return self.using == "target" or module.requires.sources

    def _collect(self, module: FederatedModule, name: str, inputs: Inputs, labels: Tensor, logits: Tensor) -> None:
        if not self._fits(module):
            return
        if self.using == "weighted":
            self._kept["features"][name].append(self._basis.of(module, name, inputs))
        if self.using != "target" and name != module.target.name:
            self._kept["losses"][name].append(losses_at(logits, labels, self._temperatures))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit the temperature on the process that hosts the target, and report it."""
        # only a fit has the target's training samples; validation by itself keeps the checkpoint's temperature
        if trainer.sanity_checking or (self.using == "target" and trainer.state.fn != TrainerFn.FITTING):
            return
        module = federated(pl_module, self)
        if not self._fits(module):
            return
        received = self._means(module)
        fit = self._of_target if self.using == "target" else self._of_sources
        temperature = self._at_target(module, lambda: fit(module, received))
        if temperature is not None:
            module.run.outputs.temperature = temperature
        self.on_test_epoch_end(trainer, pl_module)
        self._start_afresh()

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the temperature that the target predicts with."""
        module = federated(pl_module, self)
        is_here = module.federation.is_local(module.target)
        local = {"temperature": module.run.outputs.temperature} if is_here else None
        reported = report_target(module, local, ["temperature"])
        module.run.log({f"target/{name}": value for name, value in reported.items()})

    def _statistics(self, channel: str, module: FederatedModule, source: str) -> dict[str, Tensor]:
        there = self._has("losses", source)
        losses = self._all("losses", source) if there else torch.zeros(1, len(self._temperatures))
        number, losses = len(losses), losses.double().cpu()
        message = {"there": torch.tensor(float(there), dtype=torch.float64)}
        if self.using != "weighted":
            return {**message, "losses": losses.mean(dim=0)}
        size = self._basis.size
        phi = self._all("features", source).cpu() if there else torch.zeros(1, size).double()
        return {**message, "square": upper_half(phi.T @ phi / number), "losses": phi.T @ losses / number}

    def _of_sources(self, module: FederatedModule, received: Mapping[str, Tensor]) -> float | None:
        """The temperature at which the sources' mean loss is lowest; a `RosterError` if samples are missing."""
        name = module.target.name
        if not received or not float(received["there"]) > 0:
            raise RosterError(
                "Calibration needs validation samples of the sources, which have none: raise val_fraction of the data "
                "module, or take using='target' with some labels of the target"
            )
        if self.using == "weighted" and not self._has("features", name):
            raise RosterError(
                f"Calibration(using='weighted') needs validation samples of {name!r}, without labels, and there are "
                "none: raise val_fraction of the data module, or take using='sources'"
            )
        if module.run.outputs.is_refined:
            return None
        means = {key: mean.double().cpu() for key, mean in received.items()}
        losses = means["losses"]
        if self.using == "weighted":
            target = self._all("features", name).mean(dim=0).cpu()
            losses = importance_weights(from_upper_half(means["square"], len(target)), target, RIDGE) @ losses
        found = best_temperature(self._temperatures, losses)
        return self._shown(found, "the sources' validation samples", module.run.outputs)

    def _of_target(self, module: FederatedModule, _: Mapping[str, Tensor]) -> float | None:
        """The temperature of the target's labelled training samples; a `RosterError` if there are too few."""
        target = module.target
        if not module.can_predict(target):
            return None
        samples = [(x, y) for _, x, y in module.run.samples.labelled([target]) if len(y)] if target.labelled else []
        number = sum(len(labels) for _, labels in samples)
        if number < MIN_LABELS:
            raise RosterError(
                f"Calibration(using='target') needs at least {MIN_LABELS} labelled training samples of "
                f"{target.name!r}, which has {number}: raise target_labels of the data module, or take using='sources'"
            )
        with torch.no_grad():
            logits = torch.cat([module.replicas[target.name](inputs).detach().cpu() for inputs, _ in samples])
        found = fit_temperature(logits, torch.cat([labels.cpu() for _, labels in samples]))
        outputs = module.run.outputs
        if target not in module.learners(module.run.clock.warmup_rounds):
            return self._shown(found, f"the labelled samples of {target.name!r}", outputs)
        # samples that a network has learnt by heart do not show that it is not sure enough
        return max(found, _own(outputs))

    def _shown(self, temperature: float, of: str, outputs: Outputs) -> float:
        """The temperature, unless samples without an error are the likelier the lower it is."""
        if temperature > 1.001 * LOWEST:
            return temperature
        more = "target_labels" if self.using == "target" else "val_fraction"
        warnings.warn(
            f"{of} have no error, so that no temperature is too low for them, and Calibration leaves the target's "
            f"probabilities as they are: raise {more} of the data module",
            stacklevel=2,
        )
        return _own(outputs)


def _own(outputs: Outputs) -> float:
    """The temperature that the target's classifier has without being calibrated."""
    return outputs.temperature if outputs.is_refined else 1.0
