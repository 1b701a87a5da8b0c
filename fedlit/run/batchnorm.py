"""Second moments of BatchNorm: E[x^2] = var + mean^2 averages exactly over clients, a mean of variances does not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

_VARIANCE, _MEAN, _SQUARE = "running_var", "running_mean", "running_square"


def variances_of(network: nn.Module) -> dict[str, str]:
    """Return the names of BatchNorm's running variances in a network's state, each with that of its running mean."""
    return {
        f"{prefix}.{_VARIANCE}".removeprefix("."): f"{prefix}.{_MEAN}".removeprefix(".")
        for prefix, module in network.named_modules(remove_duplicate=False)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is not None
    }


@torch.no_grad()
def as_second_moments(state: Mapping[str, Tensor], variances: Mapping[str, str]) -> dict[str, Tensor]:
    """Replace running variances with a mean (from `variances_of`) by second moments, under another name."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        mean = state.get(variances.get(name, ""))
        if mean is None:
            found[name] = tensor
        else:
            found[_renamed(name, _VARIANCE, _SQUARE)] = second_moment(mean, tensor)
    return found


def second_moment(mean: Tensor, variance: Tensor) -> Tensor:
    """Return E[x^2] = var + mean^2, in float32 or more: half precision has few digits for a variance beside a mean."""
    exact = variance.double() + mean.double().square()
    return exact.to(torch.promote_types(variance.dtype, torch.float32))


@torch.no_grad()
def as_variances(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `as_second_moments` in a mean of such states; other entries stay."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.rpartition(".")[2] == _SQUARE:
            mean = state[_renamed(name, _SQUARE, _MEAN)].double()
            # below 0 by rounding, or by the noise of differential privacy
            variance = (tensor.double() - mean.square()).clamp(min=0).to(tensor.dtype)
            found[_renamed(name, _SQUARE, _VARIANCE)] = variance
        else:
            found[name] = tensor
    return found


def _renamed(name: str, old: str, new: str) -> str:
    return name.removesuffix(old) + new
