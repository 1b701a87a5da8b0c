"""FedDA and FedGP (Jiang, Zhang and Koyejo, Principled Federated Domain Adaptation, ICLR 2024).

Algorithm 1, Definitions 4.1 and 4.3, and the auto-weights of section 4.2. Gradients are updates: weights after a
round's local steps less those before.

Differences from the paper, where it leaves something open or states two things:

- beta weights the source, as in the definitions and the published code; appendix C.9 prints the opposite.
- The projection is that of Definition 4.3; appendix C.9's, scaled by a cosine, is ``projection="cosine"``.
- Auto-weights compare the updates that are combined, aligned by learning rates and steps (``align_magnitudes``). The
  published code scales one side only, or both alike.
- The target's variance is that of its batch gradients at the round's start, scaled to its update by their lengths. The
  paper's practice takes that between training steps (``estimate_from="steps"``: `auto_beta` of the steps), which
  momentum and Adam make alike (under Adam about 20 times too small), and counts batches of several passes as new ones.
- The variance of the target's gradient is by default the same in all directions (``residual="isotropic"``); ``"exact"``
  is the paper's estimator. Batch gradients never leave the target; the paper sends them to the server.
- BatchNorm's running statistics are averaged with beta, and never projected.
- The protocol for hidden updates (`hidden_updates`) is not in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, Literal

import torch

import fedlit.functional as fn
from fedlit.checks import check, check_one_of
from fedlit.federation import Channel, Client, DivergedError, FederationError, Open, RosterError, Summed
from fedlit.functional.aggregation import check_granularity
from fedlit.methods.combined_updates import UPDATE_ALONE, Update, times
from fedlit.methods.hidden_updates import (
    HiddenUpdates,
    Products,
    SourceWeight,
    TargetSummary,
    if_finite,
)
from fedlit.run.run import Run
from fedlit.run.weights import Weighting

_DROWNED = "its noise would drown the numbers sent beside an update: take a fixed beta and align_magnitudes=False"
_ISOTROPIC = "take residual='isotropic', as 'exact' needs single updates at the target"
_ORTHOGONAL = (
    "take projection='orthogonal', as 'cosine' needs the length of each layer of the target's update, which two_party "
    "would keep from the sources"
)


class FedDA(HiddenUpdates):
    r"""Convex combinations of the target's update and each source's (Jiang et al., ICLR 2024, Definition 4.1).

    .. math:: \theta \leftarrow \theta + \sum_i w_i \left[ (1 - \beta_i) \, g_T + \beta_i \, g_{S_i} \right]

    In each round sources train on their data and the target on its few labels, all from the same model; the target
    combines the updates, and everyone goes on from the result. A round without the target changes nothing.

    With ``beta="auto"``, beta_i = sigma^2 / (sigma^2 + d_i^2) minimises a bound on the error of the combined gradient:
    sigma^2 is the variance of the target's gradient, estimated from a second gradient of each of its batches at the
    round's start, and d_i^2 its squared distance to the source's.

    Logged after each round: ``beta`` (mean over sources), ``target_variance`` (sigma^2), and while updates are open
    ``beta/SOURCE``, ``distance/SOURCE`` (d^2) and ``tau/SOURCE``, the distance of the target's gradient to the source's
    directions over d. Gradients are updates divided by the target's learning rates.

    Args:
        beta: Weight of the sources in [0, 1]: a number, a number for each source by name, or ``"auto"``.
        align_magnitudes: Scale a source's update as if it had taken the target's steps at its learning rates; ``None``
            does so if beta is "auto" (appendix C.4). `FedGP` depends on it with ``projection="cosine"`` only.
        weighting: Weights w_i of sources, in a warm-up too: uniform in the definitions, by samples in the paper's code.
        estimate_from: With ``beta="auto"``, estimate sigma^2 from the target's batch ``"gradients"`` at the round's
            start or, as in the paper's practice, from its local ``"steps"`` over their learning rates.
        kwargs: ``target_lr_ratio``, see `TargetRate`; the others, `FederatedModule`.

    Raises:
        RosterError: If the target has no labels, or with ``beta="auto"`` one batch in a round, without variance.

    Notes:
        Each present source's update goes to the target in plaintext. Under a backend of "update" that hides single
        messages the target receives the mean of the sources' contributions instead. If beta is "auto" or magnitudes are
        aligned, and for `FedGP`, sources receive over "target_update" the target's update or, with the strategy's
        ``two_party`` for "inner_product", three numbers, and products with the update over that channel.

        Under such a backend the target (and the server, if it can read totals) learns the means of contributions and
        betas; sources learn the new model and the target's update, from which much of its few samples can be read, and
        so the mean of contributions: of two sources each learns the other's. With ``two_party`` (for some thousand
        parameters) a source learns one product with the target's update for each layer; but while betas are small, the
        step of the new model is nearly that update. This is for clients that follow the protocol: another source can
        ask for a few coordinates in every round, and another target can choose its update or variance so that all
        sources but one contribute nothing, as honest rounds may by chance. Differential privacy of "update" bounds
        that; it needs a fixed beta.
    """

    watched_by: ClassVar[tuple[str, ...]] = ("fedlit.callbacks.AggregationCurves",)

    projection: Literal["orthogonal", "cosine"] = "orthogonal"
    residual: Literal["isotropic", "exact"] = "isotropic"

    def __init__(
        self,
        *args: Any,
        beta: float | dict[str, float] | Literal["auto"] = 0.5,
        align_magnitudes: bool | None = None,
        weighting: Weighting = "uniform",
        estimate_from: Literal["gradients", "steps"] = "gradients",
        **kwargs: Any,
    ) -> None:
        check_one_of("estimate_from", estimate_from, ("gradients", "steps"))
        align_magnitudes = beta == "auto" if align_magnitudes is None else align_magnitudes
        super().__init__(*args, align_magnitudes=align_magnitudes, weighting=weighting, **kwargs)
        names = [client.name for client in self.sources]
        self.auto = beta == "auto"
        self.observes_steps = self.auto and estimate_from == "steps"
        self.betas: dict[str, Any] = dict(beta) if isinstance(beta, Mapping) else dict.fromkeys(names, beta)
        if not self.auto:
            _check_betas(self.betas, names)

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Updates, what sources need of the target where these are hidden, and the new model."""
        changed = "what a source has changed"
        drowned = _DROWNED if self.auto or self.align_magnitudes else ""
        if self.keeps_gradients:
            update: Channel = Open("update", changed, "sources", "target", unblurred=drowned, otherwise=_ISOTROPIC)
        else:
            otherwise = _ORTHOGONAL if self.projection == "cosine" else ""
            update = Summed("update", changed, "sources", "target", singly=True, too_few="skip", unblurred=drowned,
                            otherwise=otherwise)  # fmt: skip
        products_alone = self.needs_products and self.projection != "cosine"
        model = Open("model", "the new weights", "target", "sources", unblurred=UPDATE_ALONE)
        return (update, *self.target_channels(products_alone), model)

    # ---------------------------------------------------------------- Algorithm 1

    def on_round_end(self, run: Run) -> None:
        """Combine the updates at the target, and send the new model."""
        participants = {client.name for client in run.federation.present("update")}
        step: Update = {}
        logged: dict[str, float] = {}
        if self.target.name in participants:
            sources = self.contributing_sources()
            self._check_steps()
            step, logged = self.combine_hidden(sources) if self.hides_updates else self.combine_open(sources)
        self.move_to_(step)
        if self.target.name in participants:
            self.hand_out_()
            self._log(logged)

    def combine_open(self, sources: Sequence[Client]) -> tuple[Update, dict[str, float]]:
        """Send updates to the target; return its step from the round's start, and numbers to log.

        Both are empty where the target is not hosted.
        """
        received = self.receive_updates(sources)
        if not self.federation.is_local(self.target):
            return {}, {}
        own, summary = self.update(self.target), self.summary()
        if not received:
            return own, {}
        names, updates = list(received), list(received.values())
        products = self.products(own, updates)
        weights = {
            name: self.weigh(name, Products(inner, squares), summary, self._across(update))
            for name, update, inner, squares in zip(names, updates, products.inner, products.sources, strict=True)
        }
        betas, shares = [weights[name].beta for name in names], self.shares(names)
        return self.combine(own, updates, products, betas, shares), _to_log(weights, shares, summary)

    def combine(
        self,
        target: Update,
        sources: Sequence[Update],
        products: fn.UpdateProducts,
        betas: Sequence[float],
        shares: Sequence[float],
    ) -> Update:
        """Return sum_i w_i [(1 - beta_i) g_T + beta_i g_Si] over aligned sources of shares w."""
        return fn.fedda(target, sources, betas, shares)

    def contribution(self, update: Update, products: Products, beta: float) -> Update:
        """Return beta_i g_Si, a source's summand of the rule."""
        return times(update, beta)

    # ---------------------------------------------------------------- weights (section 4.2, appendix A.5)

    def weigh(
        self, source: str, products: Products, summary: TargetSummary, across: float | None = None
    ) -> SourceWeight:
        """Return a source's distances to the target, less the target's noise, and its beta.

        With g_T the mean of the target's batch gradients, E|g_S - g_T|^2 = d^2 + sigma^2, and the squared distance of
        g_T to a span of directions is tau^2 d^2 plus the part of sigma^2 across them: (1 - L/m) sigma^2 for L of m
        directions, if the noise is isotropic (``across=None``), and else the share ``across`` of it.
        """
        unit = summary.path**2 or math.nan  # squared updates per squared gradient; without steps there are none
        apart = summary.square - 2 * float(products.inner.sum()) + float(products.source.sum())
        used = products.source > 0
        along = float((products.inner[used].square() / products.source[used]).sum())
        across = 1 - int(used.sum()) / self._num_parameters if across is None else across
        distance = apart / unit - summary.variance
        residual = (summary.square - along) / unit - across * summary.variance
        found = self.auto_weight(summary.variance, distance, residual) if self.auto else float(self.betas[source])
        return SourceWeight(found, distance, residual)

    def auto_weight(self, variance: float, distance: float, residual: float) -> float:
        """Return sigma^2 / (sigma^2 + d^2), the best beta, from estimates of sigma^2, d^2 and tau^2 d^2."""
        return float(fn.auto_weights(variance, distance))

    # ---------------------------------------------------------------- hooks and small things

    def _across(self, update: Update) -> float | None:
        """Return the share of the target's variance across a source's directions; ``None`` leaves it to `weigh`."""
        memory = self.memory(self.target)
        if not self.keeps_gradients or not memory.statistics.variance:
            return None
        directions, _ = self.parts(update)
        lengths = fn.inner_products(directions, directions, self.granularity).sqrt()
        along = [fn.inner_products(gradient, directions, self.granularity) for gradient in memory.gradients]
        variances = torch.stack(along).var(dim=0) / lengths.square()
        return 1 - float(variances[lengths > 0].sum()) / memory.statistics.variance

    def _check_steps(self) -> None:
        """Raise on every process if the target has no variance to weigh sources with."""
        if not self.auto:
            return
        error: RosterError | FederationError | None = None
        if self.federation.is_local(self.target):
            memory, name = self.memory(self.target), self.target.name
            batches = memory.statistics.count
            if not memory.path:
                error = RosterError(
                    f"beta='auto' compares updates by their learning rates, but those of {name!r} were 0 in a whole "
                    "round: give its schedule a higher start, or take a fixed beta"
                )
            elif batches < 2:
                error = RosterError(
                    f"beta='auto' estimates a variance from the target's batches in a round, which needs at least 2 of "
                    f"different samples; {name!r} had {batches}: lower its batch size, or take a fixed beta"
                )
            elif not all(bool(torch.isfinite(tensor).all()) for tensor in self.update(self.target).values()):
                error = DivergedError(
                    f"the update of {name!r} has NaN or infinite entries: its training has diverged, lower the "
                    "learning rate or clip gradients"
                )
        self.federation.check("target steps", error)

    @property
    def _num_parameters(self) -> int:
        return sum(param.numel() for param in self.parameters_of(self.federation.local_clients[0]).values())

    def _log(self, logged: Mapping[str, float]) -> None:
        kinds = [f"{kind}/{client.name}" for kind in ("beta", "distance", "tau") for client in self.sources]
        mine = {self.target.name: logged} if self.federation.is_local(self.target) else {}
        self.run.log(
            self.federation.report(mine, ["beta", "target_variance", *kinds]).get(self.target.name, {}), self.target
        )


class FedGP(FedDA):
    r"""The target's update and its projections on the sources' (Jiang et al., ICLR 2024, Definition 4.3).

    .. math::
        \theta \leftarrow \theta + \sum_i w_i \left[ (1 - \beta_i) \, g_T
        + \beta_i \, \frac{\max(\langle g_T, g_{S_i} \rangle, 0)}{|g_{S_i}|^2} \, g_{S_i} \right]

    With ``beta="auto"``, beta_i = sigma^2 / (sigma^2 + tau_i^2 d_i^2). Protocol, channels and who learns what are those
    of `FedDA`. With the orthogonal projection the step never opposes the target's update and is never longer, so that
    sources add nothing else: where labels are few, begin with ``warmup_rounds``, as ``configs/methods`` does with 10.

    Args:
        granularity: Project ``"layer"`` by layer, as the paper's experiments do, or the whole ``"model"`` at once.
        projection: ``"orthogonal"`` is Definition 4.3; ``"cosine"`` adds max(cos, 0) g_S (appendix C.9), for
            ``align_magnitudes=True``.
        residual: Variance along a source's directions: ``"isotropic"`` is the share L/m of all; ``"exact"`` estimates
            it from the target's batch gradients, kept for a round (one copy of the parameters each; no hidden updates).
        filtered: Leave out what opposes the target; ``False`` adds it with a negative factor (figure 4's ablation).
        kwargs: See `FedDA`.
    """

    def __init__(
        self,
        *args: Any,
        granularity: fn.Granularity = "layer",
        projection: Literal["orthogonal", "cosine"] = "orthogonal",
        residual: Literal["isotropic", "exact"] = "isotropic",
        filtered: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_granularity(granularity)
        check_one_of("projection", projection, ("orthogonal", "cosine"))
        check_one_of("residual", residual, ("isotropic", "exact"))
        check_one_of("filtered", filtered, (True, False))
        self.granularity = granularity
        self.projection = projection
        self.residual = residual
        self.filtered = filtered

    @property
    def needs_products(self) -> bool:
        """Always true: projections are made of them."""
        return True

    @property
    def keeps_gradients(self) -> bool:
        """Whether the residual is exact."""
        return self.auto and self.residual == "exact"

    def combine(
        self,
        target: Update,
        sources: Sequence[Update],
        products: fn.UpdateProducts,
        betas: Sequence[float],
        shares: Sequence[float],
    ) -> Update:
        """Return sum_i w_i [(1 - beta_i) g_T + beta_i Proj+(g_T | g_Si)]; running statistics as in `FedDA.combine`."""
        parts = [self.parts(update) for update in (target, *sources)]
        (own, *layers), (own_rest, *rests) = zip(*parts, strict=True)
        if self.projection == "cosine":
            ones = [1.0] * len(sources)  # updates are as long as they are to be: see align_magnitudes
            step = fn.fedgp_cosine(own, layers, betas, ones, shares, self.granularity, products, self.filtered)
        else:
            step = fn.fedgp(own, layers, betas, shares, self.granularity, products, self.filtered)
        return step | fn.fedda(own_rest, rests, betas, shares)

    def contribution(self, update: Update, products: Products, beta: float) -> Update:
        """Return beta_i Proj+(g_T | g_Si), a source's summand of the rule."""
        squares = products.source
        if self.projection == "cosine":
            assert products.target is not None
            squares = (products.source * products.target).sqrt()
        layers, rest = self.parts(update)
        coefficients = fn.projection_coefficients(products.inner, squares, self.filtered)
        return times(fn.scale_layers(layers, coefficients) | rest, beta)

    def auto_weight(self, variance: float, distance: float, residual: float) -> float:
        """Return sigma^2 / (sigma^2 + tau^2 d^2), the best beta."""
        return float(fn.auto_weights(variance, residual))


def _check_betas(betas: Mapping[str, Any], sources: Sequence[str]) -> None:
    check(set(betas) == set(sources), "beta", f"one number for each source of {list(sources)}", dict(betas))
    for name, beta in betas.items():
        holds = isinstance(beta, Real) and 0 <= float(beta) <= 1
        check(holds, "beta", f"'auto' or in [0, 1] for source {name!r}", beta, "it weighs the source")


def _to_log(weights: Mapping[str, SourceWeight], shares: Sequence[float], summary: TargetSummary) -> dict[str, float]:
    """Return the numbers to log; tau is NaN where a source is not distinguished from the target."""
    logged = {"beta": sum(share * weight.beta for share, weight in zip(shares, weights.values(), strict=True))}
    logged |= if_finite("target_variance", summary.variance)
    for name, weight in weights.items():
        logged[f"beta/{name}"] = weight.beta
        logged |= if_finite(f"distance/{name}", weight.distance)
        if math.isfinite(weight.residual):
            sine = math.sqrt(max(weight.residual, 0.0) / weight.distance) if weight.distance > 0 else math.nan
            logged[f"tau/{name}"] = min(sine, 1.0)
    return logged
