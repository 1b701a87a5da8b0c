"""ClinicMetrics: how well one class is distinguished from the others, in the measures of a clinic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import nan
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics.functional.classification import (
    binary_sensitivity_at_specificity,
    binary_specificity_at_sensitivity,
)

from fedlit.callbacks.shared import CLINIC, CLINIC_CLASSES, check_counts, class_names, federated, total_of_sources
from fedlit.checks import check, check_one_of
from fedlit.federation import Channel, Summed, reveal_for_oracle
from fedlit.federation.labels import known_labels
from fedlit.federation.lone_classes import LoneClasses, check_lone_classes, class_sources, find_lone_classes
from fedlit.federation.metrics import ORACLE
from fedlit.functional import auroc_interval, predictive_values
from fedlit.functional.quantiles import agree_on_quantiles
from fedlit.module import FederatedModule
from fedlit.run.component import Component
from fedlit.run.run import Run
from fedlit.run.tasks import Classification

_OWN = {"specificity": "sensitivity_at_specificity", "sensitivity": "specificity_at_sensitivity"}
"""By what is held, the metric whose threshold is chosen by the samples that are scored."""


class ClinicMetrics(Callback, Component):
    """Measure how one class is distinguished from all others: AUROC, sensitivity at a specificity, predictive values.

    Logged for each source as ``source/NAME/...``, and of the target's hidden labels as ``oracle/target/...``:

    ``auroc``, ``auroc_low`` and ``auroc_high``: area under the ROC curve with its 95% interval, see `auroc_interval`.
    ``sensitivity_at_specificity`` and ``specificity_at_sensitivity``: the highest at any threshold that keeps the other
    at least as high as asked. The samples that are scored choose the threshold: at the target an oracle twice over.
    ``at_specificity/sensitivity``, ``at_specificity/specificity``, ``at_specificity/ppv`` and ``at_specificity/npv``
    (and ``at_sensitivity/...``): at the threshold that all sources' validation samples choose, as it would be used at a
    target without labels, where neither is as high as asked unless it is like the sources. The predictive values are at
    ``prevalence``, see `predictive_values`.

    The threshold is of the probability of the class without `Calibration`, and logged as ``threshold/specificity``: the
    lowest with which at least so many of the sources' negatives are at or below it (``threshold/sensitivity``: the
    highest with which so many positives are above it), on a grid and rounded to the safe side. Sources send counts
    of their samples by log odds over the channel "clinic", of which the backend sums; all clients learn the sums. It is
    kept in checkpoints; a round of training forgets it. Undefined numbers are NaN, such as of a client with one class.

    Args:
        positive: Name of the class that counts as positive; without names its number.
        specificity: Held at least, in (0, 1); ``None`` leaves what hangs on it out.
        sensitivity: Likewise.
        prevalence: Share of positives where the model is used, in (0, 1); ``None`` leaves predictive values out.
        lone_classes: Where a backend hides counts, those of positives or negatives that one source alone has are its
            own: ``"leave_out"`` of the threshold, or ``"send"`` them.

    Raises:
        ValueError: If a number is out of range; when a run starts, in regression, if the class is unknown, or if the
            backend's grid has fewer than 16 fraction bits.
    """

    def __init__(
        self,
        positive: str,
        specificity: float | None = 0.9,
        sensitivity: float | None = None,
        prevalence: float | None = None,
        lone_classes: LoneClasses = "leave_out",
    ) -> None:
        for name, value in (("specificity", specificity), ("sensitivity", sensitivity), ("prevalence", prevalence)):
            check(value is None or 0 < value < 1, name, "above 0 and below 1, or None", value)
        check_lone_classes(lone_classes)
        self.positive, self.prevalence, self.lone_classes = str(positive), prevalence, lone_classes
        asked = {"specificity": specificity, "sensitivity": sensitivity}
        self._held = {name: value for name, value in asked.items() if value is not None}
        self._thresholds: dict[str, float] | None = None  # of log odds, by what is held
        self._label = 0
        self._start_afresh()

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Counts of the sources, and scores on labels that no federation has."""
        if not self._held:
            return (ORACLE,)
        contents, how_often = "counts of validation samples by log odds and class", "twice every validation"
        way = "thresholds are of exact counts: give ClinicMetrics specificity=None and sensitivity=None"
        counts = Summed(CLINIC, contents, "sources", how_often=how_often, unblurred=way)
        first = (class_sources(counts, CLINIC_CLASSES),) if self.lone_classes == "leave_out" else ()
        return (counts, *first, ORACLE)

    @property
    def names(self) -> list[str]:
        """What is measured of each client."""
        names = ["auroc", "auroc_low", "auroc_high", *(_OWN[held] for held in self._held)]
        shares = ["sensitivity", "specificity", *(["ppv", "npv"] if self.prevalence is not None else [])]
        return [*names, *(f"at_{held}/{share}" for held in self._held for share in shares)]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse regression and an unknown class."""
        module = federated(pl_module, self)
        if not isinstance(module.task, Classification):
            raise ValueError("ClinicMetrics is for classes, and the method has task='regression': remove the callback")
        several = sum(isinstance(each, ClinicMetrics) for each in trainer.callbacks)  # type: ignore[attr-defined]
        check(several < 2, "callbacks", "with one ClinicMetrics, as names of metrics are the same", several)
        classes = class_names(trainer, module)
        check_one_of("positive", self.positive, classes, "name one of these classes")
        self._label = classes.index(self.positive)

    def on_run_start(self, run: Run) -> None:
        """Refuse a grid on which counts are not exact."""
        if self._held:
            check_counts(run, CLINIC)

    def on_round_start(self, run: Run) -> None:
        """Forget the threshold, which is one of the weights before."""
        self._thresholds = None

    def client_state(self, client: str) -> dict[str, Any]:
        """The thresholds, and what they hold."""
        return {"clinic": {"asked": self._asked, "thresholds": self._thresholds}} if self._thresholds else {}

    def load_state(self, clients: Mapping[str, Mapping[str, Any]], public: Mapping[str, Any], resumes: bool) -> None:
        """Go on with the thresholds of a checkpoint, if they hold the same."""
        states = (state.get("clinic") for state in clients.values())
        same = [each["thresholds"] for each in states if each is not None and each["asked"] == self._asked]
        self._thresholds = dict(same[0]) if same else None

    @property
    def _asked(self) -> list[Any]:
        return [self.positive, *map(list, self._held.items())]

    # ---------------------------------------------------------------- samples

    def _start_afresh(self) -> None:
        self._kept: dict[str, list[tuple[Tensor, Tensor]]] = {}  # log odds, and whether samples are positive

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the samples of the last evaluation."""
        self._start_afresh()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Keep log odds of the clients on this process."""
        target = federated(pl_module, self).target.name
        for name, logits in outputs.items() if isinstance(outputs, Mapping) and not trainer.sanity_checking else ():
            if len(batch[name]) < 2:
                continue
            labels = reveal_for_oracle(batch[name][1]) if name == target else batch[name][1]
            known = known_labels(labels)
            if not bool(known.any()):
                continue
            z = logits.detach()[known].double()
            others = [label for label in range(z.shape[1]) if label != self._label]
            odds = z[:, self._label] - z[:, others].logsumexp(dim=1)
            self._kept.setdefault(name, []).append((odds.cpu(), (labels[known] == self._label).cpu()))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the sources choose thresholds; measure and log."""
        if trainer.sanity_checking:
            return
        module = federated(pl_module, self)
        if self._held:
            self._thresholds = self._agree(module)
        self._log(module)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure and log, with the thresholds of the last validation."""
        self._log(federated(pl_module, self))

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end

    # ---------------------------------------------------------------- thresholds and scores

    def _samples(self, client: str) -> tuple[Tensor, Tensor]:
        if client not in self._kept:
            return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.bool)
        odds, positive = map(torch.cat, zip(*self._kept[client], strict=True))
        return odds, positive

    def _agree(self, module: FederatedModule) -> dict[str, float] | None:
        """Thresholds of the log odds; ``None`` in a process without clients."""
        # whose samples are counted; one other class stands for all
        classes = {"specificity": int(self._label == 0), "sensitivity": self._label}
        lone: dict[str, Tensor] = {}
        total = total_of_sources(module, CLINIC)

        def values(client: str) -> Tensor:
            odds, positive = self._samples(client)
            columns = {
                "specificity": torch.where(positive, nan, odds),
                "sensitivity": torch.where(positive, -odds, nan),
            }
            left_out = [name for name in self._held if client in lone and bool(lone[client][classes[name]])]
            return torch.stack([torch.full_like(odds, nan) if n in left_out else columns[n] for n in self._held], dim=1)

        def guarded(message: Callable[[str], Tensor]) -> Tensor | None:
            nonlocal lone
            counts = {}
            for client in (each.name for each in module.sources if module.federation.is_local(each)):
                counts[client], positive = torch.zeros(module.num_classes), self._samples(client)[1]
                for name in self._held:
                    counts[client][classes[name]] = (positive == (name == "sensitivity")).sum()
            follows = "the threshold is without them"
            lone = find_lone_classes(module.federation, CLINIC_CLASSES, counts, follows, absent_too=True)
            return total(message)

        def rank(numbers: Tensor, _: Tensor) -> Tensor:
            shares = [Fraction(str(share)) for share in self._held.values()]
            return torch.tensor([math.ceil(s * int(n)) for s, n in zip(shares, numbers.tolist(), strict=True)]).double()

        found = agree_on_quantiles(len(self._held), values, rank, guarded)
        if found is None:
            return None
        thresholds = dict(zip(self._held, found, strict=True))
        if "sensitivity" in thresholds:  # positives at it count as found, and samples are found above a threshold
            thresholds["sensitivity"] = torch.nextafter(-thresholds["sensitivity"], torch.tensor(-torch.inf).double())
        return {name: float(each) for name, each in thresholds.items()}

    def _scores(self, client: str) -> dict[str, float]:
        odds, positive = self._samples(client)
        scores = dict(zip(self.names, auroc_interval(odds, positive), strict=False))
        # probabilities near 1 would be ties
        ranks = torch.searchsorted(odds.sort().values, odds) / max(len(odds) - 1, 1)
        defined = not bool(odds.isnan().any())
        both = defined and 0 < int(positive.sum()) < len(positive)
        for held, least in self._held.items():
            of = binary_sensitivity_at_specificity if held == "specificity" else binary_specificity_at_sensitivity
            scores[_OWN[held]] = float(of(ranks, positive.long(), least)[0]) if both else nan
            threshold = nan if self._thresholds is None else self._thresholds[held]
            sensitivity = specificity = nan
            if defined and not math.isnan(threshold):
                found = odds > threshold
                sensitivity, specificity = (float((found == side)[positive == side].double().mean()) for side in (1, 0))
            values = [sensitivity, specificity]
            if self.prevalence is not None:
                values += predictive_values(sensitivity, specificity, self.prevalence)
            names = ("sensitivity", "specificity", "ppv", "npv")
            scores |= {f"at_{held}/{name}": value for name, value in zip(names, values, strict=False)}
        return scores

    def _log(self, module: FederatedModule) -> None:
        run, federation, target = module.run, module.federation, module.target
        scores = {client: self._scores(client) for client in self._kept}
        of_target = {client: scores.pop(client) for client in [*scores] if client == target.name}
        run.log(run.metric_names(federation.report(scores, self.names)))
        reported = federation.report(of_target, self.names, channel=ORACLE.name).get(target.name, {})
        run.log({f"oracle/target/{name}": value for name, value in reported.items()}, target)
        mine = {client.name: self._thresholds or {} for client in federation.local_clients}
        agreed = next(iter(federation.report(mine, [*self._held]).values()), {}) if self._held else {}
        run.log({f"threshold/{name}": float(torch.tensor(odds).sigmoid()) for name, odds in agreed.items()})
        self._start_afresh()
