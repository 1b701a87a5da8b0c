"""FedMMD: adaptation through a Taylor-expanded MMD (Kang, Li and Zhang, IEEE TPDS 2022), encrypted or summed.

Differences from the paper, where it leaves something open or does not work as printed:

- Moments are of one batch and grouped: 21 numbers for 4 features at degree 2 (paper: 41), 14 for features of length 1.
- All three terms have the truncated kernel. The paper truncates the third alone (``within="exact"``), and the sum does
  not vanish between equal distributions. The kernel is expanded around the domains' mean squared distance in each
  round's first step (paper: ``center=0``).
- Pairwise, a side asks for its gradient at so few of a batch's samples that the other's moments stay hidden.
- Each source weighs its discrepancy with lambda; equation 18 divides by the number of sources.
- The paper states neither alpha nor a scale of features: here length 1 and 1/4, at which no pair is repelled (an even
  degree repels pairs beyond a distance).
- ``exchange="summed"``, a secure mean of moments, is not in the paper; ``"open"`` is its baseline. The loss is not
  reported to the sources.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

import fedlit.functional as fn
from fedlit import FederatedModule, ReplicaSpec, Requires, Run
from fedlit.checks import check_at_least, check_count, check_one_of, refuse
from fedlit.federation import Channel, ChannelError, Client, FederatedLoader, Open, Pairwise, RosterError, Summed
from fedlit.methods.shared import Message, exchange_means, send_classifiers, sources_in_step
from fedlit.models import Committee, MomentReplica, feature_width
from fedlit.models.committee import STAYS_LOCAL
from fedlit.models.copies import copied
from fedlit.module import Batch
from fedlit.run.component import Phase
from fedlit.run.replicas import Replicas
from fedlit.run.tasks import Classification
from fedlit.run.warmup import WarmUp

SCALED_ALPHA = 0.25
"""Kernel parameter after scaling features that are not of length 1, so that moments are of order 1 in any unit."""


class FedMMD(FederatedModule):
    r"""Align features by a Taylor-expanded MMD of mini-batches (Kang et al., IEEE TPDS 2022).

    .. math:: L_i = L_C + \lambda \, (L_{p1}^{(i)} + L_{p3}^{(i)}), \qquad
              L_t = \lambda \, (L_{p2} + \tfrac{1}{S} \textstyle\sum_i L_{p3}^{(i)})

    The sources pre-train one network (``warmup_rounds``). Then every client trains its own: in each local step clients
    exchange moments of their features, and lower the discrepancy; a source its task's loss too. The target predicts
    with the mean prediction of the sources' classifiers on its features.

    ``exchange="open"`` sends the features themselves and uses the Gaussian kernel, without `degree`, `center` and
    `within`: the paper's centralised baseline.

    Args:
        warmup_rounds: Rounds of pre-training; without, features are aligned before they separate classes.
        degree: Degree D of the Taylor polynomial, 1 to 3; messages have O(L^D) numbers.
        alpha: Kernel parameter, positive; ``None`` is 1/4 for features of length 1, and else 1/(4L), for L features of
            variance about 1.
        center: Squared distance around which the kernel is expanded; ``None`` estimates their mean in each round.
        within: Kernel of the terms within a domain, ``"truncated"`` or ``"exact"``: see `taylor_mmd_squared`.
        mmd_weight: Weight lambda of the discrepancy, at least 0; the paper's is 0.25.
        exchange: ``"summed"``, ``"pairwise"``, or ``"open"``, which protects nothing.
        unit_norm: Scale features to length 1, so that one alpha and one grid of fixed-point numbers fit all extractors.
        classifier_period: Rounds T_C after which sources send their classifiers. With ``None`` as in the paper: the
            warm-up averages extractors alone, and classifiers leave their sources at the end of the run.

    Notes:
        The target learns the classifiers, in the warm-up their mean; with ``classifier_period=None`` it predicts at
        random until the end. Summed, it learns the sources' mean moments, and every source the target's in
        plaintext; moments of a small batch reveal much of its samples. The backend of "moments" hides single sources.

        Pairwise, each source and the target run two affine exchanges in each local step, by the ``two_party`` protocol
        of "moments". Each side learns gradients that are linear in the other's moments, for as many of its batch's
        first samples as the protocol grants without giving the moments away (`fedlit.privacy.affine_bound`), of which
        sources, who may pool what they learn, share the target's. 4 features have too few moments for one sample: take
        more or a higher degree, or ``reveal_moments=True`` of the protocol. With that, or without a protocol, gradients
        are the paper's, for all samples, and the other side can solve for the moments. This is of each batch alone:
        nothing bounds what the moments of many batches tell together of samples that come again and again.
    """

    replicas: Replicas[MomentReplica]
    requires: ClassVar[Requires] = Requires(
        unlabelled_target=True,
        ignores_target_labels=True,
        matches_distributions=True,
        adaptation_weight="mmd_weight",
    )
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(local=STAYS_LOCAL, apart="FedMMD sends classifiers alone")

    def __init__(
        self,
        *args: Any,
        warmup_rounds: int | float = 5,
        degree: int = 2,
        alpha: float | None = None,
        center: float | None = None,
        within: Literal["truncated", "exact"] = "truncated",
        mmd_weight: float = 0.25,
        exchange: Literal["summed", "pairwise", "open"] = "summed",
        unit_norm: bool = True,
        classifier_period: int | None = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, warmup_rounds=warmup_rounds, **kwargs)
        self.width = feature_width(self.originals[0])
        fn.num_taylor_moments(self.width, degree)
        self.alpha = (0.25 if unit_norm else 1 / (4 * self.width)) if alpha is None else alpha
        fn.taylor_coefficients(self.alpha, degree, center or 0.0)
        self._alpha = self.alpha if unit_norm else SCALED_ALPHA
        self._scale = math.sqrt(self.alpha / self._alpha)
        check_one_of("within", within, ("truncated", "exact"))
        check_at_least("mmd_weight (lambda)", mmd_weight, 0)
        check_one_of("exchange", exchange, ("summed", "pairwise", "open"))
        if classifier_period is not None:
            check_count("classifier_period (T_C)", classifier_period, 1, "round", "null sends them at the end alone")
        self.degree = degree
        self.center = None if center is None else center * self._scale**2
        self.within = within
        self.mmd_weight = mmd_weight
        self.exchange = exchange
        self.unit_norm = unit_norm
        self.classifier_period = classifier_period
        self._places = fn.moments_to_send(self.width, degree, unit_norm)
        self._sent = torch.from_numpy(np.unique(self._places.numpy(), return_index=True)[1][1:])  # less the constant 1
        self._classified_in = -1  # round in which the target last got the classifiers
        self._warned = False

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Moments, as set by ``exchange``, and the sources' classifiers."""
        step, contents = "every local step", "moments of a batch's features"
        summed = "take exchange='summed', which privacy hides" + (
            "" if self.exchange == "open" else " among the sources"
        )
        ways: dict[str, tuple[Channel, ...]] = {
            "summed": (
                Summed("moments", contents, "sources", "target", step, too_few="skip",
                       otherwise="take exchange='pairwise', which two_party protects"),
                Open("target_moments", contents, "target", "sources", step),
            ),
            "pairwise": (
                Pairwise("moments", f"linear functions of {contents}", how_often=step, otherwise=summed),
                Open("center", "squared distance that the kernel is expanded around", "target", "sources"),
            ),
            "open": (
                Open("moments", "features of each sample of a batch", how_often=step, otherwise=summed, samples=True),
            ),
        }  # fmt: skip
        period = "at the end" if self.classifier_period is None else f"every {self.classifier_period} rounds"
        return (*ways[self.exchange], Open("classifier", "classifier of a source", "sources", "target", period))

    # ---------------------------------------------------------------- a local step (section 4.2)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Exchange moments, and return each client's loss."""
        features = {
            client.name: self.replicas[client].features(samples[0]) for client, samples in self.run.in_streams(batch)
        }
        scaled = {name: own * self._scale for name, own in features.items()}
        moments = {name: fn.taylor_moments(own, self.degree) for name, own in scaled.items()}
        sources = sources_in_step(self, "moments")
        meet = {"summed": self.meet_summed, "pairwise": self.meet_pairwise, "open": self.meet_open}[self.exchange]
        met = meet(sources, scaled, moments) if sources else {}
        losses = {}
        for client, samples in self.run.in_streams(batch, "classify"):
            name = client.name
            parts = []
            if not client.is_target:
                replica = self.replicas[client]
                outputs = replica.classifier(replica.readable(features[name]))
                parts.append(self.task.loss(client, outputs, samples[1]))
            if name in met:
                center, across = met[name]
                alignment = across + self.within_domain(scaled[name], moments[name], center)
                parts.append(self.mmd_weight * alignment.to(features[name].dtype))
            if parts:
                losses[name] = torch.stack(parts).sum()
        return losses

    def within_domain(self, features: Tensor, moments: Tensor, center: float) -> Tensor:
        """Return L_p1 or L_p2 from scaled features (n, L) and their moments (M,); 0 for one sample, without pairs."""
        if len(features) < 2:
            return moments.new_zeros(())
        if self.within == "exact" or self.exchange == "open":
            return fn.exact_within_domain_mean(features, self._alpha)
        coefficients = fn.taylor_coefficients(self._alpha, self.degree, center)
        return fn.within_domain_mean(moments, len(features), self.width, coefficients)

    def meet_summed(
        self, sources: Sequence[Client], features: Mapping[str, Tensor], moments: Mapping[str, Tensor]
    ) -> dict[str, tuple[float, Tensor]]:
        """Exchange mean moments; return kernel centre and L_p3, with a gradient, by local client that received any.

        Features are scaled ones of local clients' batches, shape (n, L), and moments theirs, shape (M,).
        """
        target, center = self.target.name, 0.0

        def answer(mean: Message | None) -> Message | None:
            nonlocal center
            if mean is None:
                return None
            others = self.from_message(mean["moments"])
            center = self.center_for(fn.mean_squared_distance(others, moments[target], self.width, self.degree))
            self.check_repulsion(features[target], center)
            return {"moments": sent[target]["moments"], "center": torch.tensor(center, dtype=torch.float64)}

        sent = {name: {"moments": self.to_send(own)} for name, own in moments.items()}
        received = exchange_means(self.federation, ("moments", "target_moments"), sent, sources, answer=answer)
        met = {}
        for name, message in received.items():
            if name in moments:
                around = center if name == target else float(message["center"])
                coefficients = fn.taylor_coefficients(self._alpha, self.degree, around)
                others = self.from_message(message["moments"]).detach()
                met[name] = (around, -2 * moments[name] @ fn.pair_with_kernel(others, self.width, coefficients))
        return met

    def meet_pairwise(
        self, sources: Sequence[Client], features: Mapping[str, Tensor], moments: Mapping[str, Tensor]
    ) -> dict[str, tuple[float, Tensor]]:
        """As `meet_summed`; value and gradient of L_p3 are computed on encrypted moments (optimisations 1 and 2)."""
        federation, target = self.federation, self.target
        names = {target.name, *(client.name for client in sources)}
        sent = {name: self.to_send(own).double() for name, own in moments.items() if name in names}
        self.agree_on_center_(sources, features, moments, sent)
        asked = self.samples_asked()
        centers, maps, own = {}, {}, {}
        for client in federation.local_clients:
            name, center = client.name, float(self.replicas[client].center)
            if name in sent and center >= 0:
                centers[name], own[name] = center, features[name][: asked[name]]
                rows = self.map_for(own[name], fn.taylor_moments(own[name], self.degree), center)
                maps[name] = {other.name: rows for other in (sources if client.is_target else [target])}
        pairs = [pair for client in sources for pair in ((client, target), (target, client))]
        most = {name: self.width * samples + 1 for name, samples in asked.items()}
        outputs = federation.affine("moments", sent, maps, pairs, most)
        met = {}
        for name, by_peer in outputs.items():
            y, z = torch.stack(list(by_peer.values())).mean(dim=0), own[name]
            slope = y[:-1].view_as(z).to(z) / len(z)
            met[name] = (centers[name], fn.loss_from_gradient(z, slope, y[-1]))
        return met

    def meet_open(
        self, sources: Sequence[Client], features: Mapping[str, Tensor], moments: Mapping[str, Tensor]
    ) -> dict[str, tuple[float, Tensor]]:
        """As `meet_summed`, from the other side's features and the Gaussian kernel; the centre is not used."""
        to = {self.target.name: sources, **{client.name: [self.target] for client in sources}}
        sent = {name: {"features": own.detach()} for name, own in features.items() if name in to}
        met = {}
        for name, messages in self.federation.exchange("moments", sent, to=to).items():
            if name in features and messages:
                means = [
                    fn.exact_between_domains_mean(features[name], message["features"], self._alpha)
                    for message in messages.values()
                ]
                met[name] = (0.0, -2 * torch.stack(means).mean())
        return met

    def map_for(self, features: Tensor, moments: Tensor, center: float) -> tuple[Tensor, Tensor]:
        """Return matrix and offset that map the other side's moments to n times the gradient, and the value, of L_p3.

        From scaled features (n, L) and their moments (M,); of shapes (n L + 1, number sent) and (n L + 1,).
        """
        coefficients = fn.taylor_coefficients(self._alpha, self.degree, center)
        # times their number, so that batches of any size use the same digits
        slope = len(features) * fn.gradient_map(features, coefficients)
        value = fn.pair_with_kernel(moments.detach(), self.width, coefficients)
        return self.of_sent(-2 * torch.cat([slope, value[None]]))

    def to_send(self, moments: Tensor) -> Tensor:
        """Return the moments that are sent, in float32: equal ones once, without the constant 1."""
        return moments.detach()[self._sent.to(moments.device)].float()

    def from_message(self, received: Tensor) -> Tensor:
        """Return all moments from those that are sent, shape (M,), float64."""
        known = torch.cat([received.new_ones(1, dtype=torch.float64), received.double()])
        return known[self._places.to(known.device)]

    def of_sent(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return linear functions of all moments, shape (k, M), as matrix and offset for those that are sent."""
        folded = rows.new_zeros(len(rows), 1 + len(self._sent))
        folded.index_add_(1, self._places.to(rows.device), rows)
        return folded[:, 1:], folded[:, 0]

    def center_for(self, distance: Tensor) -> float:
        """Return the round's centre: the argument, or the mean squared distance of the round's first step."""
        if self.center is not None:
            return self.center
        kept = self.replicas[self.target].center
        if self.federation.batch_idx == 0 or kept < 0:
            kept.fill_(float(distance.detach().clamp(min=0)))
        return float(kept)

    def agree_on_center_(
        self,
        sources: Sequence[Client],
        features: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
        sent: Mapping[str, Tensor],
    ) -> None:
        """In a round's first step, give the target its mean squared distance to each source; it sends their mean."""
        federation, target = self.federation, self.target.name
        if federation.batch_idx:
            return
        for client in federation.local_clients:
            self.replicas[client].center.fill_(-1.0 if self.center is None else self.center)
        if self.center is None:
            maps = {}
            if target in sent:
                other = torch.zeros_like(moments[target]).requires_grad_()
                distance = fn.mean_squared_distance(other, moments[target].detach(), self.width, self.degree)
                (row,) = torch.autograd.grad(distance, other)
                matrix, offset = self.of_sent(row[None])
                offset = offset + distance.detach()  # at moments of 0
                maps[target] = {client.name: (matrix, offset) for client in sources}
            holders = {name: own for name, own in sent.items() if name != target}
            distances = federation.affine("moments", holders, maps, [(client, self.target) for client in sources], 1)
            message = {}
            if distances.get(target):
                mean = torch.stack(list(distances[target].values())).mean().double()
                message[target] = {"center": self.replicas[self.target].center.fill_(float(mean.clamp(min=0)))}
            received = federation.exchange("center", message, to=sources)
            for client in sources:
                if target in received.get(client.name, {}):
                    self.replicas[client].center.copy_(received[client.name][target]["center"])
        if target in features and self.replicas[self.target].center >= 0:
            self.check_repulsion(features[target], float(self.replicas[self.target].center))

    def check_repulsion(self, features: Tensor, center: float) -> None:
        """Warn once if the target's scaled features, shape (n, L), are so long that pairs may be repelled."""
        limit = fn.repelling_distance(self._alpha, self.degree, center)
        if self._warned or math.isinf(limit):  # in all local steps: no need to wait for the device
            return
        widest = 4 * float(features.detach().double().square().sum(dim=1).max())
        if widest > limit:
            self._warned = True
            warnings.warn(
                f"features are up to {math.sqrt(widest / 4) / self._scale:.3g} long, so that pairs of samples can be "
                f"further apart than {math.sqrt(limit) / self._scale:.3g}, where the Taylor kernel of degree "
                f"{self.degree} repels: lower alpha ({self.alpha:.3g}), take an odd degree, or unit_norm=True",
                stacklevel=2,
            )

    def samples_asked(self) -> dict[str, int]:
        """Return by client at how many samples of a batch, the first ones, it learns its gradient of L_p3, at most."""
        loader = self.trainer.train_dataloader
        if not isinstance(loader, FederatedLoader):
            raise RosterError(
                "exchange='pairwise' has to know every client's batch size: train on a fedlit.data.DomainDataModule or "
                "a FederatedLoader, or take exchange='summed'"
            )
        largest = max(loader.batch_size_of(client.name) for client in self.clients)
        return {name: min(largest, samples) for name, samples in self.samples_granted().items()}

    def samples_granted(self) -> dict[str, int]:
        """Return by client of how many samples a gradient leaves the others' moments hidden under the protocol.

        Raises:
            ChannelError: If not even one sample's does.
        """
        protocol = self.federation.channels["moments"].protocol
        most = None if protocol is None else protocol.most_outputs(len(self._sent))
        if most is None:
            return dict.fromkeys((client.name for client in self.clients), sys.maxsize)
        # the target learns of each source a squared distance too; what sources learn of the target they may pool
        outputs = {True: most - (self.center is None), False: most // len(self.sources)}
        granted = {client.name: (outputs[client.is_target] - 1) // self.width for client in self.clients}
        if min(granted.values()) < 1:
            rule = f"other than pairwise for {self.width} features and degree {self.degree}"
            way_out = (
                f"about their {len(self._sent)} moments {most} numbers may be told, too few for one sample's gradient "
                "and value. Take 'summed', more features or a higher degree, or set reveal_moments=True on the "
                "two_party protocol, which then hides nothing"
            )
            refuse("exchange", rule, self.exchange, way_out, ChannelError)
        return granted

    # ---------------------------------------------------------------- rounds

    def phases(self) -> tuple[Phase, ...]:
        """Return the warm-up, of extractors alone where classifiers are sent at the end, and the method itself."""
        return WarmUp(self.run, self.label_loss, None if self.classifier_period else ("extractor",)), self

    def on_round_start(self, run: Run) -> None:
        """Let clients that were absent fetch the result of the pre-training."""
        run.weights.finish_warmup()

    def on_round_end(self, run: Run) -> None:
        """Send classifiers every T_C rounds."""
        if self.classifier_period is not None and (run.clock.round_idx + 1) % self.classifier_period == 0:
            self.send_classifiers_(run.clock.round_idx)

    def on_run_end(self, run: Run) -> None:
        """Send the classifiers of the last round, those of absent sources too; again if a client returns then."""
        last = run.clock.last_round
        if last >= self.warmup_rounds and (self._classified_in != last or run.federation.roster.returned):
            self.send_classifiers_(last, absent_too=True)

    def send_classifiers_(self, round_idx: int, absent_too: bool = False) -> None:
        """Send each source's classifier to the target's committee; see `send_classifiers`."""
        self._classified_in = round_idx
        for target, messages in send_classifiers(self.run, "classifier", absent_too).items():
            for name, classifier in messages.items():
                cast(Committee, self.replicas[target]).receive_(name, classifier)

    # ---------------------------------------------------------------- set-up and hooks

    def build_replica(self) -> nn.Module:
        """Return copies of extractor and classifier."""
        return MomentReplica(*copied(self.originals), self.unit_norm)

    def build_target(self, replica: MomentReplica) -> Committee:
        """Return the target's replica with room for all sources' classifiers."""
        names = [client.name for client in self.sources]
        return Committee(replica, names, of_logits=isinstance(self.task, Classification))

    def on_run_start(self, run: Run) -> None:
        """Note that no classifier was sent in this run yet, warn of short runs, and refuse moments too few to hide."""
        if self.exchange == "pairwise":
            self.samples_granted()
        if self.warmup_rounds and self.unit_norm:
            seen = "with 50, standardised inputs and features of length 1, it ended up to 6 points below SourceOnly"
            run.clock.warn_of_few_steps(seen)
        self._classified_in = self.federation.round_idx - 1
