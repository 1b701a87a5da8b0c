"""Extractors that run a second time in the backward pass: the same numbers, without the activations of all clients."""

from __future__ import annotations

import copy
import pickle
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedlit.methods import FedAvg, FedMMD
from fedlit.models import MLP, Replica
from fedlit.models.recomputed import recompute_
from helpers import STATEFUL, build, digits, layers, loader, same, trainer, unequal, weights
from method_table import METHODS, ONE_PASS, one_of_each

CLIENTS = ["clean", "blended", "fonts"]


def network() -> Any:
    """With buffers, random numbers, and a layer whose buffers change its output."""
    torch.manual_seed(0)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 12))
    return layers(16, spectral, nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 16))


@pytest.mark.parametrize("name", one_of_each([name for name in METHODS if name not in ONE_PASS]))
def test_numbers_of_every_method_are_those_without(name: str) -> None:
    method, arguments, of_data = METHODS[name]
    found = []
    for recompute in (False, True):
        data = digits(**of_data)
        options = {**STATEFUL, **arguments, "extractor": network(), "recompute": recompute}
        del options["dropout"]
        module = build(method, data, **options)
        trainer(3, strategy={"local_steps": 2}).fit(module, datamodule=data)
        found.append({client: weights(module, client) for client in CLIENTS})
    assert all(same(found[0][client], found[1][client]) for client in CLIENTS)


class Helper:
    """A generator that is no attribute of a layer."""

    def __init__(self) -> None:
        self.rng = torch.Generator().manual_seed(0)


class Drifting(MLP):
    """Adds what it draws from a generator that is nobody's attribute, or scales with what is no buffer."""

    def __init__(self, where: str) -> None:
        super().__init__(64, [16])
        self.where, self.scale, self.helper = where, 1.0, Helper()
        self.nested = ((torch.Generator().manual_seed(0),),)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "attribute":
            self.scale *= 0.9
            return self.scale * super().forward(x)
        rng = self.helper.rng if self.where == "helper" else self.nested[0][0]
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=rng))


@pytest.mark.parametrize("where", ["helper", "nested", "attribute"])
def test_an_output_that_differs_the_second_time_is_refused(where: str) -> None:
    data = digits()
    with pytest.raises(RuntimeError, match="Drifting has another output when it is run again"):
        trainer(1).fit(build(FedAvg, data, extractor=Drifting(where), recompute=True), data)


def test_a_replica_without_an_extractor_is_refused() -> None:
    with pytest.raises(ValueError, match="recompute must be False with replicas that have no module named extractor"):
        recompute_(nn.ModuleDict({"net": nn.Linear(2, 2)}))


class Kept(nn.Module):
    """A layer of which autograd keeps something until the backward pass; calls and kept things are counted."""

    calls = alive = most = 0

    def forward(self, x: Tensor) -> Tensor:
        Kept.calls += 1
        return _Kept.apply(x)  # type: ignore[no-any-return]

    @staticmethod
    def count(change: int) -> None:
        Kept.alive += change
        Kept.most = max(Kept.most, Kept.alive)


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        array = np.zeros(1)
        weakref.finalize(array, Kept.count, -1)
        Kept.count(1)
        ctx.save_for_backward(torch.from_numpy(array))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (_,) = ctx.saved_tensors
        return grads[0]


def test_activations_are_of_one_client_at_a_time_where_all_exchange_in_a_step() -> None:
    most, calls = [], []
    for recompute in (False, True):
        Kept.calls = Kept.alive = Kept.most = 0
        torch.manual_seed(0)
        kept = layers(6, nn.Linear(5, 6), *(Kept() for _ in range(10)))
        module = FedMMD(["c0", "c1", "c2", "c3"], "c3", 2, kept, degree=1, recompute=recompute)
        data = unequal(8, 8, 8, 8)
        trainer(1, strategy={"local_steps": 2}).fit(module, loader(data, 8))
        most.append(Kept.most)
        calls.append(Kept.calls)
    assert most[0] == 30  # 10 layers of 3 clients, as pairs of a source and the target train
    assert most[1] <= 11
    assert 1.5 * calls[0] < calls[1] <= 2 * calls[0]


def test_a_second_call_has_what_the_first_had() -> None:
    plain, twice = (Replica(network().train(), nn.Linear(16, 2)) for _ in range(2))
    twice.load_state_dict(plain.state_dict())
    recompute_(twice)
    x, found = torch.randn(16, 64), []
    for replica in (plain, twice):
        state = {name: 2 * param.detach() for name, param in replica.named_parameters()}
        state = {name: tensor.requires_grad_() for name, tensor in state.items()}
        torch.manual_seed(1)
        out = functional_call(replica, state, (x,))  # whose weights are in place during the call alone
        replica.eval()
        torch.manual_seed(2)
        first = torch.autograd.grad(out.square().sum(), list(state.values()), retain_graph=True)
        again = torch.autograd.grad(out.square().sum(), list(state.values()))  # as of several losses
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
        assert not replica.extractor.training
        found.append((out.detach(), first, torch.rand(1), replica.state_dict()))
    (out, grads, drawn, state), (others, other_grads, other_drawn, other_state) = found
    assert torch.equal(out, others)
    assert all(torch.equal(one, other) for one, other in zip(grads, other_grads, strict=True))
    assert torch.equal(drawn, other_drawn)
    assert same(state, other_state)


class Drawing(nn.Module):
    """Scales features by what it draws: of numpy and Python, or of generators that it or its class holds."""

    shared = np.random.default_rng(1)

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.linear, self.out_features, self.own = nn.Linear(5, 4), 4, own
        self.torch, self.numpy, self.python = torch.Generator(), np.random.default_rng(0), random.Random(0)
        self.several, self.by_name = [np.random.RandomState(0)], {"bits": np.random.MT19937(0)}
        self.shared.bit_generator.state = np.random.default_rng(1).bit_generator.state

    def forward(self, x: Tensor) -> Tensor:
        if self.own:
            bits = np.random.Generator(self.by_name["bits"])
            arrays = [each.random(4) for each in (self.numpy, self.shared, bits)] + [self.several[0].rand(4)]
            drawn = [torch.rand(4, generator=self.torch), *map(torch.tensor, arrays), self.python.random()]
        else:
            drawn = [torch.rand(4), torch.tensor(np.random.rand(4)), random.random()]  # noqa: NPY002
        for each in drawn:
            x = (x if x.shape[1] == 4 else self.linear(x)) * each
        return x.float().tanh()


@pytest.mark.parametrize("own", [False, True])
def test_a_second_call_draws_the_same_from_every_generator(own: bool) -> None:
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        extractor = Drawing(own)
        replica = Replica(extractor, nn.Linear(4, 2))
        if recompute:
            recompute_(replica)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        for _ in range(2):
            out = replica(torch.ones(3, 5))
            between = [torch.rand(1).item(), np.random.rand(), random.random(), extractor.python.random()]  # noqa: NPY002
            out.square().sum().backward()
            after = [torch.rand(1).item(), np.random.rand(), random.random(), extractor.shared.random()]  # noqa: NPY002
            gradient = extractor.linear.weight.grad
            assert gradient is not None
            found.append((out.detach(), gradient.clone(), [*between, *after]))
    for (out, gradient, drawn), (other, other_gradient, others) in zip(found[:2], found[2:], strict=True):
        assert torch.equal(out, other)
        assert torch.equal(gradient, other_gradient)
        assert drawn == others


class Making(nn.Module):
    """Makes its generator when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out_features, self.random = nn.Linear(5, 4), 4, None

    def forward(self, x: Tensor) -> Tensor:
        self.random = self.random or random.Random(0)
        return self.linear(x).tanh() * self.random.random()  # type: ignore[no-any-return]


def test_what_cannot_be_drawn_again_is_refused() -> None:
    replica = Replica(Making(), nn.Linear(4, 2))
    recompute_(replica)
    with pytest.raises(
        RuntimeError, match=r"Making makes a random generator .* make it before, or give recompute=False"
    ):
        replica(torch.ones(3, 5)).sum().backward()
    replica(torch.ones(3, 5)).sum().backward()  # it has one from then on
    replica.extractor.random = random.SystemRandom()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"SystemRandom.*let the layer draw from random\.Random"):
        replica(torch.ones(3, 5))


class Careless(nn.Module):
    """Takes what it is given apart, and has one buffer in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.counter, self.out_features = nn.Linear(5, 4), nn.Module(), 4
        self.register_buffer("seen", torch.zeros(5))
        self.counter.register_buffer("seen", self.seen)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        x = given.pop("x")
        given["scale"] = x.mean()
        try:
            self.get_buffer("seen").add_(x.detach().mean(dim=0))
            return self.linear(x - self.counter.get_buffer("seen")).tanh()  # type: ignore[no-any-return]
        except Exception as error:
            raise AssertionError("nothing is to be caught") from error


def test_inputs_may_be_taken_apart_and_modules_share_a_buffer() -> None:
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        replica = Replica(Careless(), nn.Linear(4, 2))
        if recompute:
            recompute_(replica)
        for step in range(3):
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
            replica.extractor.zero_grad()
            replica.classifier(replica.extractor({"x": x})).square().sum().backward()
        grads = {
            name: param.grad.clone() for name, param in replica.extractor.named_parameters() if param.grad is not None
        }
        found.append((grads, replica.state_dict()))
    assert all(same(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("nested", [False, True])
def test_inputs_that_are_changed_in_place_are_refused(nested: bool) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 4)

        def forward(self, given: Any) -> Tensor:
            return self.linear((given["x"] if nested else given).mul_(2))  # type: ignore[no-any-return]

    replica, x = Replica(InPlace(), nn.Linear(4, 2)), torch.randn(6, 5)
    recompute_(replica)
    with pytest.raises(RuntimeError, match="InPlace changes its inputs in place, so that it cannot be run again"):
        replica.extractor({"x": x} if nested else x)


def test_copies_run_their_own_network() -> None:
    replica = Replica(layers(3, nn.Linear(5, 3)), nn.Linear(3, 2))
    recompute_(replica)
    x, own = torch.randn(4, 5), copy.deepcopy(replica)
    read = pickle.loads(pickle.dumps(replica))
    for other in (own, read):
        before = replica(x)
        with torch.no_grad():
            other.extractor[0].weight.add_(1)
        assert torch.equal(replica(x), before)
        assert not torch.equal(other(x), before)
        other(x).sum().backward()
        assert other.extractor[0].weight.grad is not None
    assert replica.extractor[0].weight.grad is None
    assert replica.state_dict().keys() == Replica(layers(3, nn.Linear(5, 3)), nn.Linear(3, 2)).state_dict().keys()


def test_it_is_refused_where_it_would_do_nothing() -> None:
    with pytest.raises(ValueError, match="recompute must be False beside vectorize, which is for tiny networks"):
        FedAvg(["c0", "c1"], "c1", 2, MLP(5, [4]), recompute=True, vectorize=True)
    compiled: Any = torch.compile(MLP(5, [4]))
    module = FedAvg(["c0", "c1"], "c1", 2, compiled, recompute=True)
    with pytest.raises(
        ValueError,
        match="False with an extractor that is compiled, or has another forward than its class, got 'Optimized",
    ):
        module.configure_model()
