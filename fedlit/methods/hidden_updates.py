"""FedDA's and FedGP's protocol where the backend of "update" hides single updates from the target.

Each source computes its weight and its projection itself, and the target receives the mean of the results. What sources
need of the target goes over "target_update", or by a two-party protocol over "inner_product".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedlit.federation import Channel, Client, Open, Pairwise
from fedlit.functional import Granularity, UpdateProducts, inner_products, products_with_sources
from fedlit.methods.combined_updates import UPDATE_ALONE, CombinedUpdates, Update


@dataclass(frozen=True)
class TargetSummary:
    """Numbers of the target by which a source weighs itself, besides products of their updates.

    ``square`` is the squared norm of its update, ``variance`` the estimated sigma^2 of its mean gradient (NaN if
    unknown), ``path`` the sum of the learning rates of its steps.
    """

    square: float
    variance: float
    path: float


@dataclass(frozen=True)
class Products:
    """Inner products of the target's update with a source's, and of each with itself; float64, shape (layers or 1,).

    ``target`` is ``None`` where the source does not know it.
    """

    inner: Tensor
    source: Tensor
    target: Tensor | None = None


@dataclass(frozen=True)
class SourceWeight:
    """A source's beta in [0, 1], from estimates of squared distances.

    ``distance`` (d^2) is between its gradient and the target's, ``residual`` (tau^2 d^2) between the target's gradient
    and the directions of the source's.
    """

    beta: float
    distance: float
    residual: float


class HiddenUpdates(CombinedUpdates):
    """The target combines updates, each or their mean; a subclass defines the weights and the rule."""

    auto: bool  # betas are computed in each round, and fixed by source otherwise
    betas: dict[str, Any]
    granularity: Granularity = "model"

    # ---------------------------------------------------------------- what a subclass defines

    def weigh(
        self, source: str, products: Products, summary: TargetSummary, across: float | None = None
    ) -> SourceWeight:
        """Return a source's weight."""
        raise NotImplementedError

    def contribution(self, update: Update, products: Products, beta: float) -> Update:
        """Return a source's summand of the rule."""
        raise NotImplementedError

    @property
    def needs_products(self) -> bool:
        """Whether sources need products with the target's update to contribute."""
        return self.auto

    # ---------------------------------------------------------------- who and over what

    @property
    def asks(self) -> bool:
        """Whether sources need anything of the target to contribute."""
        return self.needs_products or self.align_magnitudes

    @property
    def hides_updates(self) -> bool:
        """Whether the backend of "update" keeps single messages from the target."""
        return self.federation.channels["update"].hides

    @property
    def hides_target(self) -> bool:
        """Whether sources get products with the target's update by a two-party protocol, and not the update."""
        channels = self.federation.channels
        return "inner_product" in channels and channels["inner_product"].protocol is not None

    def target_channels(self, products_alone: bool) -> list[Channel]:
        """Return the channels for what sources need of the target, with one for products if these can be enough."""
        when = "every round in which 'update' is hidden"
        channels: list[Channel] = []
        if self.asks:
            contents = "the target's update, or three numbers of it"
            channels.append(Open("target_update", contents, "target", "sources", when, unblurred=UPDATE_ALONE))
        if products_alone:
            contents = "products with the target's update, if two_party is given"
            channels.append(
                Pairwise("inner_product", contents, "target", "sources", when, unblurred=UPDATE_ALONE, beside="update")
            )
        return channels

    def contributing_sources(self) -> list[Client]:
        """Return the sources that send updates in this round, and receive what they need for it."""
        channels = ["update"]
        if self.hides_updates and self.asks:
            channels.append("target_update")
            if self.needs_products and self.hides_target:
                channels.append("inner_product")
        participants = [{client.name for client in self.federation.present(channel)} for channel in channels]
        everywhere = set.intersection(*participants)
        if self.target.name not in everywhere:
            return []
        return [client for client in self.sources if client.name in everywhere and self.has_newest(client)]

    # ---------------------------------------------------------------- the protocol

    def combine_hidden(self, sources: Sequence[Client]) -> tuple[Update, dict[str, float]]:
        """Let sources weigh themselves, and return the target's step and numbers to log.

        sum_i w_i [(1 - beta_i) g_T + beta_i P_i] = (1 - sum_i w_i beta_i) g_T + sum_i w_i beta_i P_i, where P_i
        is the source's update or its projection: the two means on the right are all that the target needs.
        """
        federation = self.federation
        contributions = {}
        # where too few are left for a mean, the target's update is not sent either
        enough = federation.senders("update", among=sources)
        for client, update, products, summary in self.prepare_sources(sources) if enough else ():
            weight = self.weigh(client.name, products, summary)
            contributions[client.name] = self.contribution(update, products, weight.beta)
            if self.auto:
                contributions[client.name]["beta"] = torch.tensor(weight.beta)
        received = federation.mean("update", contributions, among=sources, weights=self.run.weights.mean_weights)
        if not federation.is_local(self.target):
            return {}, {}
        own = self.update(self.target)
        if self.target.name not in received:
            return own, {}
        mean = dict(received[self.target.name])
        names = [client.name for client in sources]
        betas = zip(self.shares(names), names, strict=True)
        beta = float(mean.pop("beta")) if self.auto else math.fsum(share * self.betas[name] for share, name in betas)
        step = {name: torch.add(mean[name], tensor, alpha=1 - beta) for name, tensor in own.items()}
        return step, {"beta": beta, **if_finite("target_variance", self.summary().variance)}

    def prepare_sources(self, sources: Sequence[Client]) -> list[tuple[Client, Update, Products, TargetSummary]]:
        """Send what sources need; return each local one's update, products with the target's, and its summary."""
        federation = self.federation
        local = [client for client in sources if federation.is_local(client)]
        if not self.asks:
            nothing = TargetSummary(math.nan, math.nan, 1.0)
            none = torch.zeros(0, dtype=torch.float64)
            return [(client, self.update(client), Products(none, none), nothing) for client in local]
        message: dict[str, Update] = {}
        if federation.is_local(self.target):
            summary = self.summary()
            needed = (
                summary.square if self.needs_products else 0.0,
                summary.variance if self.auto else 0.0,
                summary.path,
            )
            message[self.target.name] = {"summary": torch.tensor(needed, dtype=torch.float64)}
            if self.needs_products and not self.hides_target:
                message[self.target.name] |= self.parts(self.update(self.target))[0]
        received = federation.exchange("target_update", message, to=sources)
        messages = {client: received[client.name][self.target.name] for client in local if client.name in received}
        summaries = {client: TargetSummary(*each["summary"].tolist()) for client, each in messages.items()}
        updates = {client: self.aligned(self.rated(client), summaries[client].path) for client in messages}
        if not self.needs_products:
            products = dict.fromkeys(messages, Products(torch.zeros(0), torch.zeros(0)))
        elif not self.hides_target:
            pairs = {client: self.products(each, [updates[client]]) for client, each in messages.items()}
            products = {client: Products(pair.inner[0], pair.sources[0], pair.target) for client, pair in pairs.items()}
        else:
            products = self.exchange_products(sources, updates, summaries)
        return [(client, updates[client], products[client], summaries[client]) for client in messages]

    def exchange_products(
        self, sources: Sequence[Client], updates: Mapping[Client, Update], summaries: Mapping[Client, TargetSummary]
    ) -> dict[Client, Products]:
        """Give each source <g_T, g_S / |g_S|>, layer by layer, and nothing else of g_T; the target nothing of g_S.

        Both vectors are scaled to length 1 first, so that one grid of fixed-point numbers fits all.
        """
        federation = self.federation
        moments, maps, squares = {}, {}, {}
        if federation.is_local(self.target):
            own, _ = self.parts(self.update(self.target))
            flat = torch.cat([layer.flatten().double() for layer in own.values()])
            moments[self.target.name] = flat / flat.norm().clamp(min=torch.finfo(torch.float64).tiny)
        for client, update in updates.items():
            own, _ = self.parts(update)
            squares[client] = inner_products(own, own, self.granularity)
            layers = [layer.flatten().double() for layer in own.values()]
            rows = torch.cat(layers)[None]
            if self.granularity == "layer":
                rows = torch.block_diag(*layers)  # type: ignore[no-untyped-call]
            rows = rows / squares[client].sqrt().clamp(min=torch.finfo(torch.float64).tiny)[:, None]
            maps[client.name] = {self.target.name: (rows, torch.zeros(len(rows), dtype=torch.float64))}
        pairs = [(self.target, client) for client in sources]
        outputs = federation.affine("inner_product", moments, maps, pairs, self._num_layers)
        products = {}
        for client in updates:
            cosines = outputs[client.name][self.target.name].to(squares[client].device)
            inner = cosines * squares[client].sqrt() * math.sqrt(summaries[client].square)
            products[client] = Products(inner, squares[client])
        return products

    @property
    def _num_layers(self) -> int:
        local = self.federation.local_clients  # nobody at a server apart, which computes no products
        return len(self.parameters_of(local[0])) if local and self.granularity == "layer" else 1

    # ---------------------------------------------------------------- numbers of the target

    def products(self, target: Update, sources: Sequence[Update]) -> UpdateProducts:
        """Return inner products of the target's update with each source's, aligned if they are to be."""
        own, *others = (self.parts(update)[0] for update in (target, *sources))
        return products_with_sources(own, others, self.granularity)

    def summary(self) -> TargetSummary:
        """Return the target's summary after its local steps; called where it is hosted.

        The variance of its mean gradient is V / B, with V the variance between B batches at the round's start. Momentum
        and preconditioning filter gradients into steps, whose variance means little; the update is taken to have the
        noise of the mean gradient in proportion to its length.
        """
        memory = self.memory(self.target)
        layers, _ = self.parts(self.update(self.target))
        square = float(inner_products(layers, layers, "model"))
        statistics = memory.statistics
        if statistics.count < 2 or not memory.path:
            return TargetSummary(square, math.nan, memory.path)
        length = float(inner_products(statistics.mean, statistics.mean, "model"))
        relative = statistics.variance / statistics.count / length if length else 0.0
        return TargetSummary(square, relative * square / memory.path**2, memory.path)


def if_finite(name: str, value: float) -> dict[str, float]:
    """Return a number to log, unless it is infinite or NaN."""
    return {name: value} if math.isfinite(value) else {}
