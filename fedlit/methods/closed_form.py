"""Methods without training: every client goes once through its samples, and one secure mean of moments follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from fedlit import FederatedModule, Requires, Run
from fedlit.checks import refuse
from fedlit.federation import Channel, Client, DivergedError, Open, RosterError, Summed
from fedlit.federation.lone_classes import (
    CLASS_SOURCES,
    LoneClasses,
    check_lone_classes,
    class_sources,
    find_lone_classes,
)
from fedlit.functional import RandomFeatureSums
from fedlit.functional.symmetric import from_upper_half, upper_half
from fedlit.module import Batch


class ClosedForm(FederatedModule):
    """A method of one round: sums of features by client, their mean at the target, and a model of it for everyone.

    The extractor is fixed (the identity on features computed beforehand, or a pretrained network). Then the run stops.
    With ``warmup_rounds`` this is the round after them, and the extractor is the one trained in them. Sources that are
    absent in it (by default nobody) are left out and get no model.

    A subclass says what the `features` are, what a source sends (`moments`), and what follows from the mean (`solve`).

    Args:
        lone_classes: Where a backend hides the moments, those of a class that one source alone has are its own:
            ``"leave_out"`` that source's samples of it, so that nobody predicts the class, or ``"send"`` them.
        kwargs: See `FederatedModule`.

    Raises:
        RosterError: If the round did not go through all training samples of a client, or the target or every source is
            absent in it.
    """

    requires: ClassVar[Requires] = Requires(
        unlabelled_target=True, ignores_target_labels=True, tasks=("classification",), class_weights=False
    )
    problem: ClassVar[str]
    """What is solved, in errors."""
    solution: ClassVar[tuple[str, ...]]
    """Names in a replica's state of what is handed out."""
    solution_words: ClassVar[str]
    """The same, in words."""

    def __init__(
        self,
        clients: Sequence[Client | str],
        target: str,
        num_classes: int,
        extractor: nn.Module,
        classifier: nn.Module,
        *,
        lone_classes: LoneClasses = "leave_out",
        **kwargs: Any,
    ) -> None:
        if kwargs.get("local_norm"):
            refuse("local_norm", "False, as moments of different extractors do not add up", True, "leave it out")
        check_lone_classes(lone_classes)
        super().__init__(clients, target, num_classes, extractor, classifier, **kwargs)
        self.lone_classes = lone_classes
        self._sums: dict[str, RandomFeatureSums] = {}
        self._class_sums: dict[str, Tensor] = {}

    @property
    def contents(self) -> str:
        """What a source sends, in words."""
        raise NotImplementedError

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Moments to the target, and the model that it makes of them."""
        moments = Summed("moments", self.contents, "sources", "target", "once", fixed=True)
        first = (class_sources(moments),) if self.lone_classes == "leave_out" else ()
        alone = self.target not in self.counted
        unblurred = "it is computed from the moments, which a mechanism can blur, and from nothing else" * alone
        model = Open("model", self.solution_words, "target", "sources", "once", unblurred=unblurred, derived=alone)
        return moments, *first, model

    @property
    def counted(self) -> tuple[Client, ...]:
        """Clients of whose samples there are sums: everyone."""
        return self.clients

    @property
    def least_sources(self) -> int:
        """Number of sources that must take part."""
        return 1

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Those whose samples are counted, in the first round after a warm-up."""
        return self.counted if round_idx == self.warmup_rounds else ()

    def features(self, client: Client, inputs: Any) -> Tensor:
        """Return the features of a batch of a local client, shape (b, p), in evaluation mode."""
        raise NotImplementedError

    def columns(self, features: Tensor) -> Tensor:
        """Return what is summed up by class, shape (b, q), of features of shape (b, p): these themselves."""
        return features

    @property
    def factor(self) -> float:
        """What outer products of features are multiplied by, as fixed-point grids are absolute and products small."""
        raise NotImplementedError

    @property
    def scale(self) -> float:
        """`factor`, or 1 where a mechanism clips: products that are larger than all else would leave no norm to it."""
        return self.factor if self.federation.channels["moments"].mechanism is None else 1.0

    def solve(self, mean: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what is handed out, as entries of a replica's state, from the sources' mean `moments`."""
        raise NotImplementedError

    @torch.no_grad()
    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Add a batch's moments; nothing is trained, so there are no losses."""
        for client, samples in self.run.in_streams(batch):
            self.replicas[client].eval()
            features = self.features(client, samples[0])
            name = client.name
            if not features.isfinite().all():  # every process is to know why the run ends
                self.federation.fail(
                    DivergedError(
                        f"the features of client {name!r} hold NaN or infinity: scale its inputs, or take another "
                        "extractor"
                    )
                )
                continue
            self.add_(client, features, None if client.is_target else samples[1])
        return {}

    def add_(self, client: Client, features: Tensor, labels: Tensor | None) -> None:
        """Add a batch's features, shape (b, p), to a client's sums; ``labels`` are a source's."""
        name = client.name
        sums = RandomFeatureSums.of(features)
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums
        if labels is not None:
            members = F.one_hot(labels, self.num_classes).double()
            ones = torch.ones(len(features), 1, dtype=torch.float64, device=features.device)
            by_class = torch.cat([self.columns(features.double()), ones], dim=1).T @ members  # the last row counts
            self._class_sums[name] = self._class_sums.get(name, torch.zeros_like(by_class)) + by_class

    def on_round_start(self, run: Run) -> None:
        """Clients that were away fetch a warm-up's result; sources that return after the end, the model."""
        run.weights.finish_warmup()
        target, returned = self.target.name, run.federation.roster.returned
        if not returned or target in returned:
            return
        sent = (
            {target: {name: run.weights.of(target)[name] for name in self.solution}}
            if run.federation.is_local(target)
            else {}
        )
        received = run.federation.exchange("model", sent, to=sorted(returned))
        run.weights.load_({name: messages[target] for name, messages in received.items()})

    @torch.no_grad()
    def on_round_end(self, run: Run) -> None:
        """One secure mean over the sources, to the target; one model from there to everyone."""
        if run.clock.round_idx > self.warmup_rounds:
            return
        self._check_complete()
        federation = self.federation
        lone = self.leave_out_()
        received = federation.mean(
            "moments",
            {client.name: self.moments(client) for client in self.sources if client.name in self._sums},
            weights=self.run.weights.mean_weights,
        )
        self.choose_(received)
        solved: dict[str, dict[str, Tensor]] = {}
        try:
            for name in {self.target.name} & received.keys():
                solved[name] = self.solve(_whole(received[name]) if name in lone else received[name])
        except ValueError as error:  # on one process; the next exchange raises it on all
            federation.fail(RosterError(f"{self.problem} cannot be solved for these data: {error}"))
        handed_out = federation.exchange("model", solved)
        models = {**solved, **{name: messages[self.target.name] for name, messages in handed_out.items()}}
        self.run.weights.load_(models)
        self.forget_()
        self.trainer.should_stop = True

    def choose_(self, means: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Choose what the solution depends on, from sources' means by local receiver; all processes call it."""

    def leave_out_(self) -> dict[str, Tensor]:
        """Take samples of classes that one source alone has out of its sums; return these classes by local client.

        Out of all sums: the mean of all features less those of the other classes would be the class's.
        """
        counts = {name: each[-1] for name, each in self._class_sums.items()}
        found = find_lone_classes(self.federation, CLASS_SOURCES, counts, "nobody will predict them")
        lone = {name: classes for name, classes in found.items() if bool(classes.any())}
        for client in (each for each in self.sources if each.name in lone and each.name in counts):
            name, own = client.name, lone[client.name].to(counts[client.name].device)
            if not bool((own & (counts[name] > 0)).any()):
                continue
            before = self._sums[name]
            zeros = torch.zeros_like(before.second_moment), torch.zeros_like(before.total)
            self._sums[name], self._class_sums[name] = RandomFeatureSums(*zeros, 0), 0 * self._class_sums[name]
            self.replicas[client].eval()
            for _, inputs, labels in self.run.samples.labelled([client]):
                kept = ~own[labels]
                with self.trainer.precision_plugin.forward_context():
                    features = self.features(client, inputs)[kept]
                if len(features):
                    self.add_(client, features, labels[kept])
        return lone

    def forget_(self) -> None:
        """Leave no sums for another run."""
        self._sums.clear()
        self._class_sums.clear()

    def moments(self, client: Client) -> dict[str, Tensor]:
        """Return what a source sends: means over its samples, and of the symmetric matrix the upper half alone."""
        sums = self._sums[client.name]
        count = max(sums.count, 1)  # 0 if it alone has each of its classes: zeros are added
        return {
            "second": upper_half(sums.second_moment) * (self.scale / count),
            "first": sums.total / count,
            "by_class": self._class_sums[client.name] / count,
        }

    def second_moment(self, mean: Mapping[str, Tensor]) -> Tensor:
        """Return the mean of outer products that a mean of `moments` has, shape (p, p), float64."""
        return from_upper_half(mean["second"].double() / self.scale, len(mean["first"]))

    def on_fit_start(self) -> None:
        """Start with empty sums, and warn if nobody trains the extractor; a resumed run may have nothing left to do."""
        super().on_fit_start()
        self.forget_()
        if not self.warmup_rounds and any(p.requires_grad for p in self.originals[0].parameters()):
            rounds = max(2, self.trainer.max_epochs or 0)
            rank_zero_warn(
                f"{type(self).__name__} takes its extractor as it is and stops after one round: one that is not "
                f"pretrained stays at its first weights. Give warmup_rounds={rounds - 1} of {rounds} rounds "
                "(max_epochs), in which FedAvg trains it; or freeze a pretrained one (requires_grad_(False))"
            )
        backend = self.federation.channels["moments"].backend
        if not backend.adds:
            rank_zero_warn(
                f"{type(backend).__name__} takes a median or the like of each number of channel 'moments', and such "
                f"numbers are moments of no data: what {type(self).__name__} solves for can be far off. Give the "
                "channel another backend: privacy={'moments': Plain()}"
            )
        if self.federation.round_idx > self.warmup_rounds:
            self.trainer.should_stop = True

    def _check_complete(self) -> None:
        """Raise on every process unless each participating local client has been through all of its samples."""
        federation = self.federation
        participants = federation.present("moments")
        error: RosterError | None = None
        number = sum(not client.is_target for client in participants)
        if number == len(participants) or number < self.least_sources:
            error = RosterError(
                f"round {federation.round_idx} takes the target and the moments of at least {self.least_sources} "
                f"source(s), but only {[client.name for client in participants]} participate: give no participation, "
                "which means everyone"
            )
        for client in participants:
            if federation.is_local(client) and client in self.counted:
                seen = self._sums[client.name].count if client.name in self._sums else 0
                if seen != client.num_samples and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
                    error = RosterError(
                        f"the moments of client {client.name!r} cover {seen} of {client.num_samples} training samples: "
                        "give drop_last=False, FederatedStrategy(local_steps=None) and no limit_train_batches, and "
                        "do not resume within the round"
                    )
        federation.check("moments", error)


def _whole(mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean over the sources that have sent moments and not zeros: those whose class shares are above 0."""
    share = mean["by_class"][-1].sum()
    return {name: tensor / share for name, tensor in mean.items()}
