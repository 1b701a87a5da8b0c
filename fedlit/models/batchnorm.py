"""BatchNorm's statistics: estimated anew on samples, or mixed with those of another client's samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedlit.functional.mixtures import mixture_moments


def batchnorm_layers(network: nn.Module) -> dict[str, _BatchNorm]:
    """BatchNorm layers with running statistics, by name.

    Args:
        network: Network that has them.
    """
    layers = network.named_modules()
    return {name: each for name, each in layers if isinstance(each, _BatchNorm) and each.track_running_stats}


@torch.no_grad()
def estimate_statistics_(
    network: nn.Module, batches: Callable[[], Iterable[Tensor]], pass_per_layer: bool = False
) -> None:
    """Set statistics of BatchNorm layers to the mean and variance of their inputs over some samples.

    The network is in evaluation mode meanwhile, so that nothing random takes part; its modes are restored.

    Args:
        network: Layers that it does not go through keep their statistics.
        batches: Goes through the samples, each time in the same order.
        pass_per_layer: Go through the samples once for each layer, first to last, so that a layer's inputs are those
            under the final statistics of the layers before it. ``False`` goes through them once, with the statistics
            so far; equal if all samples are one batch.
    """
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        layers: list[Sequence[_BatchNorm]] = [list(batchnorm_layers(network).values())]
        if pass_per_layer:
            layers = [[layer] for layer in _in_order(network, layers[0], next(iter(batches())))]
        for group in layers:
            with _estimating(group):
                for batch in batches():
                    network(batch)
    finally:
        for module, training in modes:
            module.training = training


def _in_order(network: nn.Module, layers: Sequence[_BatchNorm], batch: Tensor) -> list[_BatchNorm]:
    """Layers that a network goes through, first to last."""
    passed: list[_BatchNorm] = []
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(lambda layer, inputs: passed.append(layer)).remove)
        network(batch)
    return list(dict.fromkeys(passed))


@contextmanager
def _estimating(layers: Iterable[_BatchNorm]) -> Iterator[None]:
    """Let layers set their statistics to those of all inputs so far before they normalise an input."""
    seen: dict[_BatchNorm, tuple[int, Tensor, Tensor]] = {}

    def update(layer: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        values = inputs[0].transpose(0, 1).flatten(1).double()
        count, mean, variance = values.shape[1], values.mean(dim=1), values.var(dim=1, correction=0)
        if layer in seen:
            before, *moments = seen[layer]
            means, variances = (torch.stack(pair) for pair in zip(moments, (mean, variance), strict=True))
            count += before
            shares = means.new_tensor([before / count, 1 - before / count])
            mean, variance = mixture_moments(means, variances, shares)
        seen[layer] = count, mean, variance
        assert layer.running_mean is not None
        assert layer.running_var is not None
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance)

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(update).remove)
        yield


class MixedBatchNorm(_BatchNorm):
    """BatchNorm by the statistics of a mixture of local samples with another client's, see `receive_`.

    Until it has received any, it is the layer that it was made from.

    Args:
        norm: BatchNorm layer with running statistics, whose parameters and statistics it starts with.
        share: Share alpha of local samples in the mixture, in [1/2, 1].
        learned: Train the share; keep it within its range with `clamp_`.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    other_mean: Tensor
    other_var: Tensor
    heard: Tensor

    def __init__(self, norm: _BatchNorm, share: float, learned: bool) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine)
        self.load_state_dict(norm.state_dict())
        for name, param in norm.named_parameters():
            self.get_parameter(name).requires_grad_(param.requires_grad)
        self.to(norm.running_mean)
        self.train(norm.training)
        self.share = nn.Parameter(self.running_mean.new_tensor(share), requires_grad=learned)
        self.register_buffer("other_mean", torch.zeros_like(self.running_mean))
        self.register_buffer("other_var", torch.ones_like(self.running_var))
        self.register_buffer("heard", torch.tensor(False, device=self.running_mean.device))

    def _check_input_dim(self, x: Tensor) -> None:
        """Take inputs of any number of dimensions from 2 on."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalised inputs, of the same shape (n, F, ...)."""
        mean, var = self._local_moments(x) if self.training else (self.running_mean, self.running_var)
        means = torch.stack([mean, torch.where(self.heard, self.other_mean, mean)])
        variances = torch.stack([var, torch.where(self.heard, self.other_var, var)])
        mixed_mean, mixed_var = mixture_moments(means, variances, torch.stack([self.share, 1 - self.share]))
        shape = (1, -1, *[1] * (x.dim() - 2))
        scale = (mixed_var + self.eps).rsqrt()
        output = (x - mixed_mean.reshape(shape)) * scale.reshape(shape)
        return output * self.weight.reshape(shape) + self.bias.reshape(shape) if self.affine else output

    def _local_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of a batch, with their graph; updates the running statistics as BatchNorm does."""
        values = x.transpose(0, 1).flatten(1)
        mean, var, count = values.mean(dim=1), values.var(dim=1, correction=0), values.shape[1]
        if count < 2:  # as torch's BatchNorm refuses it
            raise ValueError(f"expected more than 1 value per channel when training, got inputs of {tuple(x.shape)}")
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean), factor)
            self.running_var.lerp_((var * (count / (count - 1))).to(self.running_var), factor)
        return mean, var

    @torch.no_grad()
    def receive_(self, mean: Tensor, variance: Tensor) -> None:
        """Take the moments of the layer's inputs at another client, each of shape (F,)."""
        self.other_mean.copy_(mean)
        self.other_var.copy_(variance)
        self.heard.fill_(True)

    @torch.no_grad()
    def clamp_(self) -> None:
        """Bring a trained share back into [1/2, 1]."""
        self.share.clamp_(0.5, 1.0)


def with_mixed_batchnorm(network: nn.Module, share: float, learned: bool) -> nn.Module:
    """A copy of a network with a `MixedBatchNorm` in place of each BatchNorm layer with running statistics.

    Args:
        network: Any network.
        share: See `MixedBatchNorm`.
        learned: See `MixedBatchNorm`.
    """
    whole = nn.ModuleList([copy.deepcopy(network)])  # a parent, if the network is such a layer itself
    mixed = {layer: MixedBatchNorm(layer, share, learned) for layer in batchnorm_layers(whole).values()}
    for name, module in list(whole.named_modules(remove_duplicate=False)):  # a layer with two names, under both
        if module in mixed:
            whole.set_submodule(name, mixed[module])
    return whole[0]
