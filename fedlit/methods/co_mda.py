"""Co-MDA (Liu, Xi, Li, Xu, Bai, Zhao, IEEE TCSVT 2023), by the authors' code: the paper's equations were not at hand.

Differences from that code:

- ``exchange="votes"`` is new, and not the default.
- Five rounds of FedAvg over the sources (``warmup_rounds``) replace five in which the target waits.
- All clients train at once, the target on answers of the round before; its two networks train in the same steps.
- The bias of young ensembles is corrected in all rounds; the code divides by the next round's correction.
- Sources answer, and the target is evaluated, in evaluation mode; the code is always in training mode. Labels that the
  target's networks give themselves are of training mode: by running statistics a network follows itself into one class.
- At least two samples of a batch are kept.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlit import ReplicaSpec, Run
from fedlit.checks import check, check_at_least
from fedlit.federation import Channel, Client, FederationError, Summed
from fedlit.federation.nested import mapped, take
from fedlit.federation.streams import enter_stream, torch_streams
from fedlit.functional import between_class_variance
from fedlit.functional.knowledge import draw_mixup
from fedlit.methods.shared import divided
from fedlit.methods.taught_target import ExchangeName, TaughtTarget, on_grid
from fedlit.models import Replica, Twins
from fedlit.models.twins import STAYS_LOCAL
from fedlit.run.replicas import Replicas

RAMP = 10
"""Rounds over which the share of samples that are left out rises."""


class CoMDA(TaughtTarget):
    r"""Two networks of the target learn from the sources' predictions (Liu et al., IEEE TCSVT 2023, by its code).

    .. math:: M = \frac{\sum_k e_k z_k}{\sum_k e_k}, \qquad e_k = \exp(\sigma \, O_k)

    The sources train alone. At the end of a round each answers for every training sample of the target; z_k is the
    moving mean of its answers, and O_k how far apart they are for different classes (`between_class_variance`). In the
    next round each of the target's two networks takes the class of M, in the second half of a run mixed with its
    predictions, for the label, and trains on those samples of a batch on which the other's loss is least.

    Args:
        warmup_rounds: Rounds of FedAvg over the sources; with 0 the sources' weights are never averaged.
        ensemble: Share of its past that a moving mean keeps, in [0, 1).
        sharpness: sigma, at least 0 (the plain mean); the larger, the more the best source counts.
        forget_rate: Share of a batch that is left out, in [0, 1), once it has risen over 10 rounds.
        mixup: beta of the mixture of samples in a batch, whose shares are Beta(beta, beta); 0 mixes nothing.
        exchange: As of `KD3A`; weighted answers go through a secure sum.
        kwargs: See `FederatedModule`.

    Raises:
        FederationError: At the end of a round, if all weights are 0 on the grid of the secure sum.

    Notes:
        With models, |G| + |h| numbers of each source go to the target alone in each round.

        With votes, a backend masks a source's answers and weight, n_T C + 1 numbers up in each round; the target learns
        M and the sum of the weights. Every source receives the target's inputs once (n_T |x| numbers) and keeps them,
        in checkpoints too; beside a backend they are encrypted on their way.
    """

    replicas: Replicas[Replica]
    replica_spec: ClassVar[ReplicaSpec] = replace(TaughtTarget.replica_spec, local=STAYS_LOCAL, several_models=True)

    def __init__(
        self,
        *args: Any,
        warmup_rounds: int | float = 5,
        ensemble: float = 0.6,
        sharpness: float = 5.0,
        forget_rate: float = 0.06,
        mixup: float = 0.3,
        exchange: ExchangeName = "models",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, warmup_rounds=warmup_rounds, exchange=exchange, **kwargs)
        for name, share in (("ensemble", ensemble), ("forget_rate", forget_rate)):
            check(0 <= share < 1, name, "in [0, 1)", share)
        for name, number in (("sharpness", sharpness), ("mixup (beta)", mixup)):
            check_at_least(name, number, 0)
        self.ensemble = ensemble
        self.sharpness = sharpness
        self.forget_rate = forget_rate
        self.mixup = mixup

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Models or samples, and the weighted sum of votes."""
        if self.exchange == "models":
            return (self.teaching,)
        divided = "the sum of weighted answers is divided by that of the weights"
        mixture = Summed("mixture", "weighted answers on each of the target's samples, and the weight", "sources",
                         "target", too_few="skip", unblurred=divided)  # fmt: skip
        return self.teaching, mixture

    # ---------------------------------------------------------------- a local step

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Return a source's loss on its labels; the target's, each network on the other's easiest samples."""
        if not client.is_target:
            return super().loss(client, batch)
        twins, pseudo, inputs = self.twins, self.pseudo_labels(), batch[0]
        both: tuple[Callable[[Tensor], Tensor], ...] = (twins.own, twins.peer)
        losses = [torch.as_tensor(self.labelled_loss(network, batch), device=self.device) for network in both]
        if not pseudo:
            return torch.stack(
                [loss + 0 * network(inputs).sum() for loss, network in zip(losses, both, strict=True)]
            ).sum()
        share = self.own_share()
        with torch.no_grad():
            logits = [network(inputs) for network in both]
        for turn, (network, own, peer) in enumerate(zip(both, logits, reversed(logits), strict=True)):
            labels = ((1 - share) * pseudo["mixture"] + share * own.softmax(dim=1)).argmax(dim=1)
            easy = easiest(F.cross_entropy(peer, labels, reduction="none"), self.kept_share())
            classes = F.one_hot(labels[easy], self.num_classes).to(own.dtype)
            mix = draw_mixup(len(easy), self.mixup, at_least_half=True)
            mixed = mapped(mix, take(inputs, easy))
            losses[turn] = losses[turn] + F.cross_entropy(network(mixed), mix(classes))
        return torch.stack(losses).sum()

    def own_share(self) -> float:
        """Return a, the weight of a network's own predictions: 0 in the first half of a run, then up to 1."""
        return max(0.0, 2 * self.share_over() - 1)

    def kept_share(self) -> float:
        """Return the share of a batch on which a network trains: less in later rounds, all towards the end."""
        ramp = min(1.0, (self.federation.round_idx - self.warmup_rounds - 1) / RAMP)
        return 1 - (1 - self.own_share()) * self.forget_rate * ramp

    # ---------------------------------------------------------------- rounds

    def on_round_start(self, run: Run) -> None:
        """Start both of the target's networks from a warm-up's extractor."""
        super().on_round_start(run)
        if self.warmup_rounds and run.clock.round_idx == self.warmup_rounds and self.federation.is_local(self.target):
            self.twins.start_peer_()

    def on_round_end(self, run: Run) -> None:
        """Give the target the weighted mean of the sources' answers as pseudo-labels."""
        teachers = self.teachers()
        if not teachers:
            return
        weighted = {name: self.weigh_(name, own) for name, own in self.ask_(teachers).items()}
        for total in self.add_("mixture", weighted, teachers).values():
            if total["weight"] > 0:
                self._pseudo_labels = {"mixture": total["mixture"] / total["weight"]}
            else:  # at the target; the next exchange raises it on every process
                self.federation.fail(
                    FederationError(
                        f"the weights of all sources are 0 on the grid of sums: lower sharpness ({self.sharpness})"
                    )
                )
        if self.exchange == "models":
            self._log({name: float(own["weight"]) for name, own in weighted.items()})

    def weigh_(self, source: str, answers: Tensor) -> dict[str, Tensor]:
        """Update a source's moving mean z by its answers, shape (n_T, C); return z times the weight, and the weight.

        Weights are e_k over their maximum, at O = 1 - 1/C, so that grids hold them.
        """
        kept = self.kept(source)
        before, count = kept.get("ensemble", torch.zeros_like(answers)), int(kept.get("count", 0)) + 1
        moved = self.ensemble * before + (1 - self.ensemble) * answers
        kept |= {"ensemble": moved, "count": torch.tensor(count)}
        corrected = moved / (1 - self.ensemble**count)
        spread = float(between_class_variance(corrected))
        weight = math.exp(self.sharpness * (spread - (1 - 1 / self.num_classes)))
        return {"mixture": on_grid(weight * corrected), "weight": on_grid(torch.tensor([weight]))}

    def _log(self, weights: dict[str, float]) -> None:
        """Log the weight of each source, of sum 1, where the target has their models."""
        total = sum(weights.values())
        reported = {self.target.name: {f"weight/{name}": own / total for name, own in weights.items()}} if total else {}
        every = [f"weight/{client.name}" for client in self.sources]
        self.run.log(self.federation.report(reported, every).get(self.target.name, {}), self.target)

    # ---------------------------------------------------------------- set-up

    def on_run_start(self, run: Run) -> None:
        """Warn of short runs: the second network starts with an untrained classifier."""
        run.clock.warn_of_few_steps("with 100 it ended up to 16 points below SourceOnly, with 250 up to 3", enough=200)

    @property
    def twins(self) -> Twins:
        """The target's two networks, where it is hosted."""
        return cast(Twins, self.replicas[self.target])

    def build_target(self, replica: Replica) -> Twins:
        """Return two networks with different classifiers."""
        classifier = copy.deepcopy(replica.classifier)
        with torch_streams():
            enter_stream(self.federation.seed, "classifier of the peer")
            for module in classifier.modules():
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
        return Twins(replica, classifier)

    def client_param_groups(self) -> list[dict[str, Any]]:
        """Return a group per local client, and one for the target's second network."""
        groups, target = super().client_param_groups(), self.target.name
        return divided(groups, lambda client: self.twins.peer if client == target else None)


def easiest(losses: Tensor, share: float) -> Tensor:
    """Return sorted indices of the share, in (0, 1], of samples with the smallest losses, rounded up, at least two."""
    number = max(math.ceil(share * len(losses) - 1e-9), min(2, len(losses)))  # BatchNorm cannot train on one
    return losses.argsort(stable=True)[:number].sort().values
