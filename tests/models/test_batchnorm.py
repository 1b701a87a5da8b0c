"""BatchNorm statistics estimated on samples, and those of a mixture, against torch and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlit.functional import mixture_variance
from fedlit.models import MixedBatchNorm, SmallCNN, batchnorm_layers, estimate_statistics_, with_mixed_batchnorm


def network() -> nn.Sequential:
    """Two BatchNorm layers, and dropout, which has to be off."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3), nn.BatchNorm1d(3)]
    return nn.Sequential(*layers)


def samples(size: int, generator: torch.Generator) -> Tensor:
    return 2 * torch.randn(size, 4, generator=generator) + torch.tensor([0.0, 1.0, -3.0, 5.0])


@pytest.mark.parametrize("sizes", [(40,), (17, 22, 1)])
def test_layer_by_layer_they_are_those_of_all_samples(sizes: tuple[int, ...], generator: torch.Generator) -> None:
    """A layer's inputs are what the layers before it make of the samples with their final statistics."""
    net, x = network(), samples(40, generator)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    estimate_statistics_(net, lambda: x.split(sizes), pass_per_layer=True)
    first = net[0](x).detach()
    hidden = net[4](((first - first.mean(0)) / (first.var(0, correction=0) + 1e-5).sqrt()).relu()).detach()
    for layer, inputs in ((net[1], first), (net[5], hidden)):
        np.testing.assert_allclose(layer.running_mean.numpy(), inputs.double().mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(layer.running_var.numpy(), np.var(inputs.numpy(), axis=0), rtol=1e-4)
    assert all(module.training for module in net.modules())
    others = [name for name in state if not name.endswith(("running_mean", "running_var"))]
    assert all(torch.equal(net.state_dict()[name], state[name]) for name in others)


def test_one_pass_is_the_same_if_all_samples_are_one_batch_and_near_it_otherwise(generator: torch.Generator) -> None:
    x = samples(400, generator)
    each, one, batches = network(), network(), network()
    estimate_statistics_(each, lambda: [x], pass_per_layer=True)
    estimate_statistics_(one, lambda: [x])
    estimate_statistics_(batches, lambda: x.split(100))
    for ours, theirs, near in zip(each.buffers(), one.buffers(), batches.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(ours, near, rtol=0.1, atol=0.1)
    # the first layer sees samples as they are
    torch.testing.assert_close(batches[1].running_var, each[1].running_var)


def test_images_are_counted_by_pixel_and_eval_mode_is_kept(generator: torch.Generator) -> None:
    net = SmallCNN(1, width=4).eval()
    net.layers[3].weight.requires_grad_(False)
    x = torch.randn(9, 1, 8, 8, generator=generator)
    estimate_statistics_(net, lambda: x.split(4))
    inputs = net.layers[0](x).detach().numpy()
    np.testing.assert_allclose(net.layers[1].running_var.numpy(), inputs.var(axis=(0, 2, 3)), rtol=1e-4)
    assert not any(module.training for module in net.modules())
    assert len(batchnorm_layers(net)) == 3
    assert all(not layer._forward_pre_hooks for layer in batchnorm_layers(net).values())


def mixed(share: float = 0.75, learned: bool = False, **kwargs: Any) -> MixedBatchNorm:
    norm = nn.BatchNorm1d(3, **kwargs)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    layer = with_mixed_batchnorm(norm, share, learned)
    assert isinstance(layer, MixedBatchNorm)
    return layer


def test_a_batch_is_normalised_by_the_mixture_of_its_moments_with_the_others(generator: torch.Generator) -> None:
    layer, x = mixed(), samples(20, generator)[:, :3].double()
    layer.double()
    other_mean, other_var = torch.tensor([1.0, -2.0, 0.5]).double(), torch.tensor([0.5, 2.0, 9.0]).double()
    layer.receive_(other_mean, other_var)
    means, variances = torch.stack([x.mean(0), other_mean]), torch.stack([x.var(0, correction=0), other_var])
    weights = torch.tensor([0.75, 0.25]).double()
    mean = weights @ means
    second = weights @ (variances + means.square()) - mean.square()
    torch.testing.assert_close(second, mixture_variance(means, variances, weights))
    expected = (x - mean) / (second + 1e-5).sqrt() * layer.weight + layer.bias
    torch.testing.assert_close(layer(x), expected)
    # what is predicted with is the running statistics, which are of its own samples alone
    layer.eval()
    own = torch.stack([layer.running_mean, other_mean]), torch.stack([layer.running_var, other_var])
    scale = (mixture_variance(*own, weights) + 1e-5).sqrt()
    expected = (x - weights @ own[0]) / scale * layer.weight + layer.bias
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.running_mean, 0.1 * x.mean(0))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("received", [False, True])
def test_with_nobody_to_mix_with_it_is_batchnorm(
    momentum: float | None, received: bool, generator: torch.Generator
) -> None:
    """Before it has received anything, or with a share of 1: outputs, gradients and running statistics."""
    layer = mixed(1.0 if received else 0.6, momentum=momentum)
    plain = nn.BatchNorm1d(3, momentum=momentum)
    plain.load_state_dict({name: layer.state_dict()[name] for name in plain.state_dict()})
    if received:
        layer.receive_(torch.ones(3), torch.full((3,), 4.0))
    for _ in range(3):
        x = samples(16, generator)[:, :3]
        given = [x.clone().requires_grad_(), x.clone().requires_grad_()]
        outputs = [net(each) for net, each in zip((layer, plain), given, strict=True)]
        torch.testing.assert_close(outputs[0], outputs[1])
        gradients = [torch.autograd.grad(out.square().sum(), each)[0] for out, each in zip(outputs, given, strict=True)]
        torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-4)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(layer.get_buffer(name), plain.get_buffer(name))


def test_the_share_is_learned_and_kept_within_its_range(generator: torch.Generator) -> None:
    layer, x = mixed(0.9, learned=True), samples(20, generator)[:, :3]
    assert not mixed(0.9).share.requires_grad
    layer(x).square().sum().backward()
    assert layer.share.grad == 0  # nobody to mix with
    layer.receive_(torch.ones(3), torch.ones(3))
    layer.double()

    def loss(share: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"share": share}, (x.double(),)).square().sum()

    assert torch.autograd.gradcheck(loss, torch.tensor(0.9, dtype=torch.float64, requires_grad=True))
    for value, kept in ((0.3, 0.5), (1.2, 1.0), (0.7, 0.7)):
        layer.share.data.fill_(value)
        layer.clamp_()
        assert float(layer.share.detach()) == pytest.approx(kept)


def test_a_network_is_copied_with_all_its_layers_replaced_and_none_twice() -> None:
    net = network()
    net.append(net[5])  # a layer in two places
    net[1].weight.requires_grad_(False)
    net[1].eval()
    made = with_mixed_batchnorm(net, 0.8, True)
    assert made[5] is made[6]
    assert not made[1].weight.requires_grad
    assert not made[1].training
    assert made[5].training
    assert not any(isinstance(module, MixedBatchNorm) for module in net.modules())
    state = made.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())
