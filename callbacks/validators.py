"""Scores by which a model can be chosen though the target has no labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fedlit.callbacks.shared import SOURCE_MOMENTS, RandomBasis, federated, triangle, unfold
from fedlit.federation import Channel, RosterError, Summed
from fedlit.functional import (
    SourceMoments,
    certainty_score,
    diversity_score,
    importance_weighted_scores,
    information_score,
    soft_neighbourhood_density,
)
from fedlit.module import FederatedModule
from fedlit.training.tasks import Classification

Validator = Literal["certainty", "diversity", "information", "density", "iwv", "dev"]

WEIGHTED = ("iwv", "dev")
"""Those that compare the target with the sources."""


class Validators(Callback):
    """Log label-free scores of the target after each validation, as ``validator/NAME``; the higher, the better.

    Of the target's predictions alone: ``certainty`` (how sure each prediction is, by its entropy), ``diversity`` (how
    evenly classes are predicted, by the entropy of their shares), ``information`` (mutual information of inputs and
    predicted classes, the sum of both less 1) and ``density`` (how many others each prediction is close to, by soft
    neighbourhood density). From the sources' validation samples too, weighted by how much their features resemble the
    target's: ``iwv`` (accuracy as importance-weighted validation estimates it) and ``dev`` (accuracy as deep embedded
    validation estimates it, with less variance). By themselves ``diversity`` also rewards models that are sure of
    nothing, and ``density`` those that predict everything alike, as untrained ones do. While a method has nothing to
    predict with at the target (FedRF-TCA before the first average of the classifiers), nothing is logged.

    All can be the ``monitor`` of ModelCheckpoint, EarlyStopping or a sweep, with ``mode="max"``, as can ``source/acc``,
    which is logged anyway, and ``target/score``, which is ``information``: in benchmarks/RESULTS.md the one that loses
    least accuracy. See `fedlit.functional` for what each computes.

    For ``iwv`` and ``dev`` each source sends 4 N^2 + 6 N numbers for N frequencies, of which the target receives the
    mean, through the privacy backend of the channel "source_moments". They tell the mean of random features of a
    source's samples, and how often it errs; never a sample. Each source counts equally, however many samples it has.
    Under differential privacy of all channels every validation spends of
    the privacy budget, and scores of clipped and noisy moments mean little: leave both out of ``names`` there.

    Args:
        names: Which scores; ``None`` is all of them.
        num_frequencies: N, of the random Fourier features that weights are linear in, at least 1.
        bandwidth: Of their Gaussian kernel, positive, in units of features scaled to length 1.
        ridge: See `importance_weighted_scores`.
        temperature: See `soft_neighbourhood_density`.

    Raises:
        ValueError: If a name is unknown or a number out of its range; when a run starts, if the method predicts no
            classes.
        RosterError: In a validation, if the target has no samples for it (for ``density``, fewer than 3), or the
            sources have none.
    """

    def __init__(
        self,
        names: Sequence[Validator] | None = None,
        num_frequencies: int = 32,
        bandwidth: float = 0.5,
        ridge: float = 0.1,
        temperature: float = 0.05,
    ) -> None:
        known = get_args(Validator)
        self.names: tuple[str, ...] = known if names is None else tuple(names)
        for name in self.names:
            if name not in known:
                raise ValueError(f"names must be among {list(known)}, got {name!r}")
        if num_frequencies < 1:
            raise ValueError(f"num_frequencies must be at least 1, got {num_frequencies}")
        for name, value in (("bandwidth", bandwidth), ("ridge", ridge), ("temperature", temperature)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")
        self.ridge = ridge
        self.temperature = temperature
        self._basis = RandomBasis(num_frequencies, bandwidth)
        self._start_afresh()

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Statistics of the sources, if a score needs them."""
        contents = "mean random features of validation samples, and how often the source errs"
        moments = Summed(SOURCE_MOMENTS, contents, "sources", "target", "every validation", watched=True)
        return (moments,) if self._weighs else ()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what predicts no classes."""
        if not isinstance(federated(pl_module, self).task, Classification):
            raise ValueError(
                "Validators score class probabilities, but the method has task='regression': remove the callback, and "
                "monitor 'source/r2'"
            )
        self._basis.forget_()  # those of the module's width and seed are drawn when its features are seen

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting afresh."""
        self._start_afresh()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note predictions of the target, and features and errors of clients on this process."""
        if trainer.sanity_checking:
            return
        module = federated(pl_module, self)
        for name, samples in batch.items():
            if name not in outputs:
                self._unready = True
                continue
            logits = outputs[name].detach()
            if name == module.target.name:
                self._predictions.append(logits.double().softmax(dim=1))
            if self._weighs:
                self._features.setdefault(name, []).append(self._basis.of(module, name, samples[0]))
                if name != module.target.name:
                    wrong = logits.argmax(dim=1) != samples[1]
                    self._errors.setdefault(name, []).append(wrong.double())

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share and log the scores."""
        if trainer.sanity_checking:
            return
        module = federated(pl_module, self)
        federation = module.federation
        if federation.channels.reports == "off":
            self._start_afresh()
            return
        received = self._exchange(module).get(module.target.name, {}) if self._weighs else {}
        scores: dict[str, dict[str, float]] = {}
        error: RosterError | None = None
        if federation.is_local(module.target) and not self._unready:
            error = self._missing(module.target.name, received)
            if error is None:
                scores[module.target.name] = self._scores(module, received)
        federation.check("validators", error)
        told = federation.report(scores, list(self.names)).get(module.target.name, {})
        metrics = {f"validator/{name}": value for name, value in told.items()}
        module.log_everywhere(metrics)
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._unready = False
        """Whether the target has nothing to predict with yet, such as FedRF-TCA's before the first classifier."""
        self._predictions: list[Tensor] = []
        self._features: dict[str, list[Tensor]] = {}
        self._errors: dict[str, list[Tensor]] = {}

    @property
    def _weighs(self) -> bool:
        return any(name in WEIGHTED for name in self.names)

    def _exchange(self, module: FederatedModule) -> dict[str, dict[str, Tensor]]:
        """At the target: the mean of the sources' moments, of symmetric matrices the upper triangle."""
        federation = module.federation
        size = self._basis.size
        sent = {}
        for client in module.sources:
            if not federation.is_local(client):
                continue
            seen = client.name in self._errors
            own = (
                SourceMoments.of(torch.cat(self._features[client.name]), torch.cat(self._errors[client.name]))
                if seen
                else SourceMoments.of(torch.zeros(1, size), torch.zeros(1))
            )
            there = torch.tensor(float(seen), dtype=torch.float64)
            sent[client.name] = {"there": there, **_packed(own)}
        return federation.mean(SOURCE_MOMENTS, sent, absent_too=True)

    def _missing(self, target: str, received: Mapping[str, Tensor]) -> RosterError | None:
        """What keeps the target from computing its scores."""
        number = sum(map(len, self._predictions))
        if number == 0:
            return RosterError(
                f"Validators score predictions for {target!r}, which has no validation samples: raise val_fraction of "
                "the data module"
            )
        if "density" in self.names and number < 3:
            return RosterError(
                f"'density' of Validators needs at least 3 validation samples of {target!r}, got {number}: raise "
                "val_fraction of the data module, or leave it out of names"
            )
        if self._weighs and not float(received["there"]):
            return RosterError(
                "'iwv' and 'dev' of Validators weigh validation samples of the sources, which have none: raise "
                "val_fraction of the data module, or leave both out of names"
            )
        return None

    def _scores(self, module: FederatedModule, received: Mapping[str, Tensor]) -> dict[str, float]:
        """Of the target, where it is hosted."""
        p = torch.cat(self._predictions)
        mean, entropy = p.mean(dim=0), torch.special.entr(p).sum(dim=1).mean()
        found: dict[str, Tensor] = {
            "certainty": certainty_score(entropy, module.num_classes),
            "diversity": diversity_score(mean),
            "information": information_score(mean, entropy),
        }
        if "density" in self.names:
            found["density"] = soft_neighbourhood_density(p, self.temperature)
        if self._weighs:
            there = received["there"]
            means = _unpacked({name: (total / there).cpu() for name, total in received.items()})
            target = torch.cat(self._features[module.target.name]).mean(dim=0).cpu()
            found["iwv"], found["dev"] = importance_weighted_scores(means, target, self.ridge)
        return {name: float(found[name]) for name in self.names}


def _packed(moments: SourceMoments) -> dict[str, Tensor]:
    """Moments as a message: of symmetric matrices the upper triangle."""
    above = triangle(len(moments.phi))
    return {
        "phi": moments.phi.cpu(),
        "square": moments.square.cpu()[above],
        "loss": moments.loss.cpu(),
        "square_loss": moments.square_loss.cpu()[above],
    }


def _unpacked(message: Mapping[str, Tensor]) -> SourceMoments:
    """What `_packed` packed."""
    phi = message["phi"].double()
    square, square_loss = (unfold(message[name], len(phi)) for name in ("square", "square_loss"))
    return SourceMoments(phi, square, message["loss"].double(), square_loss)
