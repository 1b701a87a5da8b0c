"""AdaBN (Li, Wang, Shi, Hou and Liu, Pattern Recognition 2018), Algorithm 1; AutoDIAL (Carlucci et al., ICCV 2017).

Differences from the papers, which have one source and no federation: BatchNorm statistics never leave their client,
while all other weights are FedAvg's. AutoDIAL's two sides are the target and the mean of all sources. A batch is mixed
with moments that the other side sent at the end of the last round, as constants; the papers mix two batches of one
step. Each client has its gradient by the share alpha, which is averaged like a weight.

Difference from AutoDIAL's published code: variances are mixed as second moments, as its text states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

from torch import Tensor, nn

from fedlit import Phase, Requires, Run
from fedlit.checks import check_at_least, refuse
from fedlit.federation import Channel, Client, Open, RosterError, Summed
from fedlit.methods.baselines import SourceOnly
from fedlit.models import (
    MixedBatchNorm,
    batchnorm_layers,
    estimate_statistics_,
    make_classifier,
    with_mixed_batchnorm,
)
from fedlit.run.batchnorm import as_variances, second_moment
from fedlit.run.warmup import WarmUp


class AdaptingWarmUp(WarmUp):
    """A warm-up, after each round of which the target adapts."""

    def __init__(self, run: Run, loss: Callable[[Client, Sequence[Any]], Tensor], adapt: Callable[[], None]) -> None:
        super().__init__(run, loss)
        self._adapt = adapt

    def on_round_end(self, run: Run) -> None:
        """Average all weights but statistics; then the target takes those of its own samples."""
        super().on_round_end(run)
        self._adapt()


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked", "other_mean", "other_var", "heard")


class AdaBN(SourceOnly):
    """FedAvg over the sources, with BatchNorm statistics of the target's samples (Li et al., 2018, Algorithm 1).

    At the end of a round the target goes through its training samples, without their labels, and takes mean and
    variance of what reaches each BatchNorm layer. Scales and shifts stay those of the sources (unlike with
    ``local_norm``, where the target would have to learn them by itself). Networks without BatchNorm are refused.

    With ``mixing`` it is AutoDIAL: each layer normalises by the statistics of a mixture of both sides, alpha of the
    client's samples and 1 - alpha of the other side's, and the target trains as well, to be certain of its predictions.
    Labels that it may have are not used. Train it with SGD: steps of Adam are as long whatever a loss is multiplied by,
    so that a small ``entropy_weight`` pulls as much as a source's loss, to predictions of one class.

    Args:
        extractor: Network from inputs to features; it or the classifier has BatchNorm layers.
        classifier: Network from features to logits; ``None`` is a linear layer.
        mixing: Share alpha of a client's samples, in [1/2, 1]: 1 are separate statistics, 1/2 pooled ones;
            ``"learned"`` starts each layer's at 1 and trains it; ``None`` is AdaBN.
        entropy_weight: With ``mixing``, weight of the mean entropy of the target's predictions, at least 0.
        pass_per_layer: Go through the target's samples once for every layer, so that each sees the final statistics of
            those before it; ``False`` goes through them once, and each batch of 512 meets the statistics so far.
        kwargs: See `FederatedModule`.

    Raises:
        ValueError: If the networks have no BatchNorm layer with running statistics.
        RosterError: When training starts, if the target has a single sample.
        TypeError: At the end of a round, if the data did not come from a `FederatedLoader`.

    Notes:
        AdaBN sends less than `SourceOnly`, and nothing of the target's; ``batchnorm_average`` has nothing to average.
        With ``mixing`` the sources learn mean and variance of each layer's inputs at the target, in plaintext, and the
        target the sources' mean of these; with a single source, its own. In rounds with fewer sources than a backend
        can hide, the target keeps the last ones.
    """

    requires: ClassVar[Requires] = Requires(
        unlabelled_target=True,
        ignores_target_labels=True,
        matches_distributions=True,
        trains_on_information="mixing",
        adaptation_weight="entropy_weight",
    )

    def __init__(
        self,
        clients: Sequence[Client | str],
        target: str,
        num_classes: int,
        extractor: nn.Module,
        classifier: nn.Module | None = None,
        *,
        mixing: float | Literal["learned"] | None = None,
        entropy_weight: float = 0.1,
        pass_per_layer: bool = False,
        **kwargs: Any,
    ) -> None:
        if mixing is not None and mixing != "learned" and (isinstance(mixing, str) or not 0.5 <= mixing <= 1):
            rule = "a share of a client's own samples in [0.5, 1], 'learned', or null for AdaBN without it"
            refuse("mixing (alpha)", rule, mixing)
        check_at_least("entropy_weight", entropy_weight, 0)
        if mixing is not None and kwargs.get("task", "classification") != "classification":
            refuse("mixing", f"null with task={kwargs['task']!r}, as it lowers the entropy of classes", mixing)
        if kwargs.get("local_norm"):
            rule = "False, as the target of AdaBN cannot learn the scales and shifts that it keeps at a client"
            refuse("local_norm", rule, True, "leave it out, statistics stay in any case")
        both = nn.ModuleList([extractor, make_classifier(extractor, num_classes) if classifier is None else classifier])
        if not batchnorm_layers(both):
            names = [type(network).__name__ for network in both]
            raise ValueError(
                f"AdaBN replaces the statistics of BatchNorm layers, and neither extractor {names[0]} nor classifier "
                f"{names[1]} has one with running statistics: take a network with BatchNorm, such as "
                "SmallCNN(norm='batch'), or SourceOnly"
            )
        if mixing is not None:
            share = 1.0 if mixing == "learned" else float(mixing)
            both = cast(nn.ModuleList, with_mixed_batchnorm(both, share, mixing == "learned"))
        # the run takes the networks when it is made, so these must be the mixed ones
        super().__init__(clients, target, num_classes, *both, **kwargs)
        self.mixing = mixing
        self.entropy_weight = entropy_weight
        self.pass_per_layer = pass_per_layer
        layers = batchnorm_layers(nn.ModuleDict(dict(zip(("extractor", "classifier"), self.originals, strict=True))))
        home = tuple(f"{layer}.{name}" for layer in layers for name in _STATISTICS)
        self.run.weights.stays_local = home

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Weights; with mixing, the moments that each side sends to the other."""
        weights = Summed("weights", "weights but BatchNorm statistics", up="learners")
        if self.mixing is None:
            return (weights,)
        contents = "mean and second moment of the inputs of BatchNorm layers"
        return (
            weights,
            Summed("statistics", contents, "sources", "target", too_few="skip"),
            Open("target_statistics", f"the target's {contents}", "target", "sources"),
        )

    # ---------------------------------------------------------------- local steps

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """The sources; with mixing, everyone."""
        return self.sources if self.mixing is None else self.clients

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """The task's loss of a source; entropy_weight times the mean entropy of the target's predictions."""
        if not client.is_target:
            return super().loss(client, batch)
        log_p: Tensor = self.replicas[client](batch[0]).log_softmax(dim=1)
        return -self.entropy_weight * (log_p.exp() * log_p).sum(dim=1).mean()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Take a step, and bring each alpha back into its range."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        for client in self.federation.local_clients if self.mixing == "learned" else ():
            for layer in self.mixed_layers(client).values():
                layer.clamp_()

    # ---------------------------------------------------------------- rounds

    def phases(self) -> tuple[Phase, ...]:
        """A warm-up in which the target takes its own statistics, too, as it has no others."""
        return AdaptingWarmUp(self.run, self.label_loss, self.adapt_), self

    def on_run_start(self, run: Run) -> None:
        """Refuse a target whose samples have no variance."""
        if self.federation.weights[self.target.name] < 2:
            raise RosterError(
                f"AdaBN takes the variance of the target's samples, and {self.target.name!r} has 1: give it more"
            )

    def on_round_end(self, run: Run) -> None:
        """Average all weights but statistics; then the target takes those of its own samples."""
        super().on_round_end(run)
        # in this order: the target's layers normalise by the sources' moments too, so its own statistics depend on them
        if self.mixing is not None:
            self.receive_sources_()
        self.adapt_()
        if self.mixing is not None:
            self.send_to_sources_()

    def adapt_(self) -> None:
        """The target, if it is present, takes the statistics of its own samples."""
        target = self.target
        if self.federation.is_local(target) and target in self.federation.present():
            with self.trainer.precision_plugin.forward_context():
                estimate_statistics_(
                    self.replicas[target], lambda: self.run.samples.mixed_inputs(target), self.pass_per_layer
                )

    def receive_sources_(self) -> None:
        """The target takes the moments of the mixture of all sources."""
        federation = self.federation
        sent = {client.name: self.moments(client) for client in self.sources if federation.is_local(client)}
        self.receive_(federation.mean("statistics", sent, weights=self.run.weights.mean_weights))

    def send_to_sources_(self) -> None:
        """The sources take the target's."""
        federation, target = self.federation, self.target
        sent = {target.name: self.moments(target)} if federation.is_local(target) else {}
        received = federation.exchange("target_statistics", sent)
        self.receive_({name: messages[target.name] for name, messages in received.items() if target.name in messages})

    def moments(self, client: Client) -> dict[str, Tensor]:
        """Running means and second moments of a local client's layers, by name."""
        moments: dict[str, Tensor] = {}
        for name, layer in self.mixed_layers(client).items():
            moments[f"{name}.running_mean"] = layer.running_mean
            moments[f"{name}.running_square"] = second_moment(layer.running_mean, layer.running_var)
        return moments

    def receive_(self, received: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Let layers of local clients mix with what was received: `moments`, or a mean of them."""
        for name, message in received.items():
            moments = as_variances(message)
            for key, layer in self.mixed_layers(name).items():
                layer.receive_(moments[f"{key}.running_mean"], moments[f"{key}.running_var"])

    def mixed_layers(self, client: Client | str) -> dict[str, MixedBatchNorm]:
        """Layers of a local client that mix, by name."""
        layers = batchnorm_layers(self.replicas[client])
        return {name: layer for name, layer in layers.items() if isinstance(layer, MixedBatchNorm)}
