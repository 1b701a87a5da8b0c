"""Validators: scores that choose a model without labels of the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from fedlit import functional as fn
from fedlit.callbacks.shared import (
    CLASS_MEANS,
    SOURCE_MOMENTS,
    VALIDATION_CLASSES,
    SourceStatistics,
    federated,
    report_target,
)
from fedlit.checks import check_at_least, check_one_of, check_positive
from fedlit.federation import Channel, RosterError, Summed
from fedlit.federation.lone_classes import LoneClasses, check_lone_classes, class_sources, find_lone_classes
from fedlit.federation.nested import Inputs, leaves
from fedlit.functional import SourceMoments
from fedlit.functional.symmetric import from_upper_half, upper_half
from fedlit.module import FederatedModule

Validator = Literal[
    "certainty",
    "diversity",
    "information",
    "density",
    "iwv",
    "dev",
    "calibrated",
    "neighbourhood",
    "trust",
    "class_means",
]

WEIGHTED = ("iwv", "dev")
"""Scores that weight the sources' samples by their resemblance to the target's."""

_CALIBRATED = ("calibrated", "trust")
"""Scores with a temperature that is fitted to the sources' samples."""

_MATCHED = ("class_means", "trust")
"""Scores that compare means of classes."""

FROM_SOURCES = (*WEIGHTED, *_CALIBRATED, "class_means")
"""Scores that need statistics of the sources."""

_OF_INPUTS = ("neighbourhood", "trust", "class_means")
"""Scores of the inputs, which are the same for every method."""

_DIRECTIONS = 128
"""Maximum number of dimensions of a class mean that is sent."""

_PIXELS = 32
"""Height and width that larger images are shrunk to before they are compared."""


class Validators(SourceStatistics):
    """Log label-free scores of the target after each validation, as ``validator/NAME``; the higher, the better.

    Of the target's predictions alone: ``certainty`` (how sure each prediction is, by its entropy), ``diversity`` (how
    evenly classes are predicted, by the entropy of their shares), ``information`` (mutual information of inputs and
    predicted classes, the sum of both less 1) and ``density`` (soft neighbourhood density of predictions). Of its
    inputs too: ``neighbourhood`` (mutual information of a sample's predicted class and those of its nearest
    neighbours). From the sources' validation samples, weighted by their resemblance to the target's: ``iwv`` (accuracy
    by importance-weighted validation) and ``dev`` (accuracy by deep embedded validation, with less variance);
    unweighted: ``calibrated`` (``information`` at the temperature that fits the sources' labels) and
    ``class_means`` (similarity of means of predicted classes to means of the sources' classes, by angle). And
    ``trust`` (the one that compares methods: product of ``calibrated``, ``neighbourhood``, ``class_means`` and the
    sources' accuracy).

    By themselves ``diversity`` also rewards underconfident models, ``density`` those that predict everything alike, and
    ``information`` overconfident methods; ``trust`` does not. It assumes that a model does for the sources what it does
    for the target, that similar inputs (standardised by each client, scaled to length 1; images shrunk to 32 x 32) are
    often of one class, and some 50 samples at least. While a method has no classifier for the target, nothing is
    logged. All can be a ``monitor``, with ``mode="max"``. `fedlit.functional` has the formulas, benchmarks/RESULTS.md
    the accuracy that each loses.

    The target receives the mean over sources, each counted equally, through the privacy backend of the channel: on
    "source_moments" for ``iwv`` and ``dev`` 4 N^2 + 6 N numbers for N frequencies (mean random features of a source's
    samples, and its error rate), for ``calibrated`` and ``trust`` the mean loss at 53 temperatures from 0.05 to 20, for
    ``trust`` accuracy too; on "class_means" for ``class_means`` and ``trust`` 129 numbers for each class (means and
    shares). Under differential privacy of all channels every validation spends of the privacy budget, and scores of
    noisy statistics mean little: name only those there that need none.

    Args:
        names: Which scores; ``None`` is all of them.
        num_frequencies: N, of the random Fourier features that weights are linear in, at least 1.
        bandwidth: Of their Gaussian kernel, positive, in units of features scaled to length 1.
        ridge: See `importance_weighted_scores`.
        temperature: See `soft_neighbourhood_density`.
        lone_classes: Where a backend hides the means of classes, those of a class of which one source alone has
            validation samples are its own: ``"leave_out"``, and the class is not compared, or ``"send"`` them.

    Raises:
        ValueError: If a name is unknown or a number out of its range; when a run starts, if the method predicts no
            classes.
        RosterError: In a validation, if the target has no samples for it (for ``density``, fewer than 3; for those of
            its inputs, fewer than 4), or the sources have none.
    """

    def __init__(
        self,
        names: Sequence[Validator] | None = None,
        num_frequencies: int = 32,
        bandwidth: float = 0.5,
        ridge: float = 0.1,
        temperature: float = 0.05,
        lone_classes: LoneClasses = "leave_out",
    ) -> None:
        self.names: tuple[str, ...] = get_args(Validator) if names is None else tuple(names)
        for name in self.names:
            check_one_of("names", name, get_args(Validator))
        check_at_least("num_frequencies (N)", num_frequencies, 1)
        for argument, value in (("bandwidth", bandwidth), ("ridge", ridge), ("temperature", temperature)):
            check_positive(argument, value)
        check_lone_classes(lone_classes)
        self.ridge, self.temperature, self.lone_classes = ridge, temperature, lone_classes
        self._lone: dict[str, Tensor] = {}
        self._graph: tuple[Tensor, Tensor] | None = None
        super().__init__(num_frequencies, bandwidth)

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Statistics of the sources, if a score needs them."""
        contents = []
        if self._needs(WEIGHTED):
            contents.append("mean random features of validation samples, and how often the source errs")
        if self._needs(_CALIBRATED):
            contents.append("mean loss on validation samples at 53 temperatures")
        if "trust" in self.names:
            contents.append("accuracy on them")
        moments = Summed(SOURCE_MOMENTS, ", and ".join(contents), "sources", "target", "every validation", watched=True)
        inputs = "means and shares of classes of validation samples, standardised"
        means = Summed(CLASS_MEANS, inputs, "sources", "target", "every validation", watched=True, fixed=True)
        first = (class_sources(means, VALIDATION_CLASSES),) if self.lone_classes == "leave_out" else ()
        return ((moments,) if contents else ()) + ((means, *first) if self._needs(_MATCHED) else ())

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse regression."""
        super().setup(trainer, pl_module, stage)
        self._graph = None

    def _collect(self, module: FederatedModule, name: str, inputs: Inputs, labels: Tensor, logits: Tensor) -> None:
        kept, is_target = self._kept, name == module.target.name
        if is_target:
            kept["logits"][name].append(logits.double())
        else:
            if self._needs(_CALIBRATED):
                kept["losses"][name].append(fn.losses_at(logits, labels, self._temperatures))
            if self._needs(_CALIBRATED) or self._needs(WEIGHTED):
                kept["errors"][name].append((logits.argmax(dim=1) != labels).double())
            if self._needs(_MATCHED):
                kept["labels"][name].append(labels)
        if self._needs(_MATCHED) or (self._needs(_OF_INPUTS) and is_target):
            kept["inputs"][name].append(_flat(inputs))
        if self._needs(WEIGHTED):
            kept["features"][name].append(self._basis.of(module, name, inputs))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share and log the scores."""
        module = federated(pl_module, self)
        if not trainer.sanity_checking and module.federation.channels.reports != "off":
            self._find_lone_classes(module)
            received = self._means(module)
            scores = self._at_target(module, lambda: self._scores(module, received))
            reported = report_target(module, scores, list(self.names))
            module.run.log({f"validator/{name}": value for name, value in reported.items()}, module.target)
        if not trainer.sanity_checking:
            self._start_afresh()

    def _needs(self, names: Sequence[str]) -> bool:
        return any(name in names for name in self.names)

    def _statistics(self, channel: str, module: FederatedModule, source: str) -> dict[str, Tensor]:
        return (self._moments if channel == SOURCE_MOMENTS else self._class_means)(module, source)

    def _moments(self, module: FederatedModule, source: str) -> dict[str, Tensor]:
        """Statistics of a source's samples and predictions; zeros if it has none."""
        seen = self._has("errors", source)
        message = {"there": torch.tensor(float(seen), dtype=torch.float64)}
        errors = self._all("errors", source) if seen else torch.ones(1).double()
        if self._needs(_CALIBRATED):
            losses = self._all("losses", source).mean(dim=0) if seen else torch.zeros_like(self._temperatures)
            message["losses"] = losses.cpu()
        if "trust" in self.names:
            message["accuracy"] = 1 - errors.mean().cpu()
        if self._needs(WEIGHTED):
            features = self._all("features", source) if seen else torch.zeros(1, self._basis.size)
            message |= _packed(SourceMoments.of(features, errors if seen else torch.zeros(1)))
        return message

    def _class_means(self, module: FederatedModule, source: str) -> dict[str, Tensor]:
        """Means of a source's inputs by class, and shares of its classes; zeros if it has no samples."""
        seen = self._has("labels", source)
        sums, counts = torch.zeros(module.num_classes, _DIRECTIONS).double(), torch.zeros(module.num_classes).double()
        if seen:
            directions = fn.standardised_directions(self._all("inputs", source))
            sums, counts = _by_class(directions, self._all("labels", source), len(counts))
        if source in self._lone:
            sums[self._lone[source]], counts[self._lone[source]] = 0, 0
        number = counts.sum().clamp(min=1)
        return {"there": torch.tensor(float(seen)).double(), "sums": sums / number, "shares": counts / number}

    def _find_lone_classes(self, module: FederatedModule) -> None:
        counts = {
            client.name: torch.bincount(self._all("labels", client.name).cpu(), minlength=module.num_classes)
            if self._has("labels", client.name)
            else torch.zeros(module.num_classes)
            for client in module.sources
            if module.federation.is_local(client)
        }
        follows = "scores of means do not compare them"
        self._lone = find_lone_classes(module.federation, VALIDATION_CLASSES, counts, follows, absent_too=True)

    def _neighbours(self, inputs: Tensor) -> Tensor:
        """Nearest neighbours among the target's samples; computed once, as samples stay the same."""
        if self._graph is None or not torch.equal(self._graph[0], inputs):
            self._graph = (inputs, fn.nearest_neighbours(fn.standardised_directions(inputs)))
        return self._graph[1]

    def _check_samples(self, target: str, received: Mapping[str, Tensor]) -> None:
        """Raise a `RosterError` if samples are missing."""
        way_out = "raise val_fraction of the data module"
        number = sum(map(len, self._kept["logits"][target]))
        if number == 0:
            raise RosterError(
                f"Validators score predictions for {target!r}, which has no validation samples: {way_out}"
            )
        for names, minimum in ((("density",), 3), (_OF_INPUTS, 4)):
            affected = [name for name in self.names if name in names]
            if affected and number < minimum:
                raise RosterError(
                    f"{affected} of Validators need at least {minimum} validation samples of {target!r}, got "
                    f"{number}: {way_out}, or leave them out of names"
                )
        if self.channels and not float(received["there"]):
            affected = [name for name in self.names if name in FROM_SOURCES]
            raise RosterError(
                f"{affected} of Validators need validation samples of the sources, which have none: {way_out}, or "
                "leave them out of names"
            )

    def _scores(self, module: FederatedModule, received: Mapping[str, Tensor]) -> dict[str, float]:
        """Scores of the target, on the process that hosts it."""
        target = module.target.name
        self._check_samples(target, received)
        logits = self._all("logits", target)
        p, classes = logits.softmax(dim=1), logits.argmax(dim=1)
        mean, entropy = p.mean(dim=0), torch.special.entr(p).sum(dim=1).mean()
        scores: dict[str, Tensor] = {
            "certainty": fn.certainty_score(entropy, module.num_classes),
            "diversity": fn.diversity_score(mean),
            "information": fn.information_score(mean, entropy),
        }
        if "density" in self.names:
            scores["density"] = fn.soft_neighbourhood_density(p, self.temperature)
        if self._needs(WEIGHTED):
            features = self._all("features", target).mean(dim=0).cpu()
            scores["iwv"], scores["dev"] = fn.importance_weighted_scores(_unpacked(received), features, self.ridge)
        if self._needs(_CALIBRATED):
            temperature = fn.best_temperature(self._temperatures, received["losses"].cpu())
            scores["calibrated"] = fn.calibrated_information(logits, temperature)
        if self._needs(_OF_INPUTS):
            inputs = self._all("inputs", target)
            scores["neighbourhood"] = fn.neighbourhood_information(
                classes, self._neighbours(inputs), module.num_classes
            )
        if self._needs(_MATCHED):
            of_target = _by_class(fn.standardised_directions(inputs), classes, module.num_classes)
            scores["class_means"] = fn.class_mean_match(*of_target, received["sums"].cpu(), received["shares"].cpu())
        if "trust" in self.names:
            information, near, match = (scores[name].cpu() for name in ("calibrated", "neighbourhood", "class_means"))
            scores["trust"] = fn.trust_score(information, near, match, received["accuracy"].cpu())
        return {name: float(scores[name]) for name in self.names}


def _packed(moments: SourceMoments) -> dict[str, Tensor]:
    """Moments as a message, with the upper triangles of symmetric matrices."""
    return {
        "phi": moments.phi.cpu(),
        "square": upper_half(moments.square.cpu()),
        "loss": moments.loss.cpu(),
        "square_loss": upper_half(moments.square_loss.cpu()),
    }


def _unpacked(message: Mapping[str, Tensor]) -> SourceMoments:
    """Moments from a message of `_packed`."""
    phi = message["phi"].double().cpu()
    square, square_loss = (from_upper_half(message[name].cpu(), len(phi)) for name in ("square", "square_loss"))
    return SourceMoments(phi, square, message["loss"].double().cpu(), square_loss)


def _flat(inputs: Inputs) -> Tensor:
    """A batch of inputs as vectors, several tensors side by side; large images are shrunk."""
    flat = []
    for leaf in leaves(inputs).values():
        large = leaf.dim() == 4 and max(leaf.shape[2:]) > _PIXELS
        flat.append((F.adaptive_avg_pool2d(leaf, _PIXELS) if large else leaf).detach().reshape(len(leaf), -1))
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def _by_class(directions: Tensor, classes: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Sums over the samples of each class, shape (C, 128), and their numbers."""
    hashed = fn.feature_hash(directions.cpu(), _DIRECTIONS)
    counts = torch.bincount(classes.cpu(), minlength=num_classes).double()
    return torch.zeros(num_classes, _DIRECTIONS).double().index_add_(0, classes.cpu(), hashed), counts
