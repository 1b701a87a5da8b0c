"""A client whose local steps train nothing is an error that names it, or its network is refused before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import fedlit
import processes
from fedlit import FederatedModule
from fedlit.federation import NotTrainedError
from fedlit.methods import FedAvg, SourceOnly
from fedlit.models import MLP
from helpers import loader, same, shards, trainer, weights
from own_modules import Simple
from refused import refused

NAMES = ["c0", "c1", "c2"]
OTHER = nn.Linear(5, 2)


class Elsewhere(nn.Module):
    """Runs the weights of another network."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out_features = nn.Linear(5, 2), 2

    def forward(self, x: Tensor) -> Tensor:
        return OTHER(x)


def data() -> dict[str, TensorDataset]:
    return shards(3, size=16)


def fit(module: FederatedModule, rounds: int = 1, **kwargs: Any) -> FederatedModule:
    trainer(rounds, **kwargs).fit(module, loader(data()))
    return module


def small() -> nn.Module:
    torch.manual_seed(0)
    return MLP(5, [4])


def method(extractor: nn.Module, classifier: nn.Module | None = None, cls: Any = FedAvg, **kwargs: Any) -> Any:
    torch.manual_seed(1)
    return cls(NAMES, "c2", 2, extractor, nn.Linear(4, 2) if classifier is None else classifier, **kwargs)


class Net(Simple):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(nn.Sequential(small(), nn.Linear(4, 2)), lr)


def wrapped(net: pl.LightningModule) -> FederatedModule:
    return fedlit.Federated(net, NAMES, "c2", 2)


@pytest.mark.parametrize("optimizer", [SGD, Adam])
@pytest.mark.parametrize("fused", [True, False])
def test_a_client_whose_loss_does_not_use_its_weights_is_an_error(optimizer: Any, fused: bool) -> None:
    module = method(Elsewhere(), nn.Identity(), optimizer=lambda params: optimizer(params, lr=0.1, fused=fused))
    expected = r"no weight of client 'c0' changed in its local steps of round 0: no gradient reaches"
    with pytest.raises(NotTrainedError, match=expected):
        fit(module)


def on_processes(devices: int) -> str:
    """What a process says of such a client, which is hosted by the second one."""
    module = method(Elsewhere(), nn.Identity(), cls=SourceOnly)
    module.build_replica = lambda: build(module)  # of one client alone
    try:
        fit(module, devices=devices, strategy={"placement": [["c0"], ["c1", "c2"]] if devices > 1 else None})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def build(module: FederatedModule) -> nn.Module:
    good = len(module.replicas) == 0 and module.federation.is_local("c0")
    return fedlit.models.Replica(small(), nn.Linear(4, 2)) if good else FederatedModule.build_replica(module)


@pytest.mark.multiprocess
def test_every_process_raises_the_error_of_one() -> None:
    for message in processes.results(on_processes, 2, ranks=2):
        assert "no weight of client 'c1' changed in its local steps of round 0" in message


class WithoutGroups(FedAvg):
    """Has an optimiser of some clients alone."""

    def client_param_groups(self) -> list[dict[str, Any]]:
        return [group for group in super().client_param_groups() if group["client"] != "c1"]


def test_a_client_of_which_the_optimizer_has_nothing_is_an_error() -> None:
    with pytest.raises(NotTrainedError, match=r"client 'c1' .*the optimizer has none"):
        fit(method(small(), cls=WithoutGroups))


@pytest.mark.parametrize(("fused", "start"), [(True, 0.0), (False, 0.0), (True, 1e-30)])
def test_a_schedule_that_starts_at_rate_zero_is_no_error(fused: bool, start: float) -> None:
    module = method(
        small(),
        optimizer=lambda params: SGD(params, lr=0.1, fused=fused),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda round_idx: start if round_idx < 2 else 1.0),
    )
    before = {**small().state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "You defined a `validation_step`")
        fit(module, 3)
    assert not same(before, {**module.replicas["c0"].extractor.state_dict()})


def test_a_run_that_changed_nothing_ends_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"no local step of this run"):
        fit(method(small(), optimizer=lambda params: SGD(params, lr=0.0)))


class Nothing(FedAvg):
    """Has a loss whose gradient is 0."""

    def loss(self, client: Any, batch: Any) -> Tensor:
        return 0 * super().loss(client, batch)


@pytest.mark.filterwarnings("ignore:no local step")
@pytest.mark.parametrize(
    "make",
    [
        lambda: method(small(), cls=Nothing),
        lambda: method(small(), vectorize=True, optimizer=lambda params: SGD(params, lr=0.0)),
    ],
    ids=["loss 0", "vectorized, rate 0"],
)
def test_weights_that_are_not_to_move_are_no_error(make: Callable[[], FederatedModule]) -> None:
    fit(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: method(nn.Sequential(small(), nn.Threshold(1e9, 0.0)), nn.Linear(4, 2, bias=False)),
        lambda: method(small(), optimizer=lambda params: SGD(params, lr=1e-30)),
        lambda: method(small(), vectorize=True, optimizer=lambda params: SGD(params, lr=1e-30)),
        lambda: wrapped(Net(lr=1e-30)),
    ],
    ids=["dead units", "rate", "vectorized", "wrapped"],
)
def test_a_first_round_that_moves_no_weight_names_the_client_and_the_rate(make: Callable[[], FederatedModule]) -> None:
    with pytest.raises(NotTrainedError, match=r"weight of client 'c0' .* round 0: its gradients .* rate 0\.01|1e-30"):
        fit(make())


class Unstepped(Net):
    """Steps by itself, and forgets to."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))


def test_a_module_that_takes_no_step_by_itself_is_an_error() -> None:
    with pytest.raises(NotTrainedError, match=r"client 'c0' .* has stepped no optimizer"):
        fit(wrapped(Unstepped()))


def half() -> MixedPrecision:
    """Half precision of a scale that overflows in the first step, so that the scaler skips it."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=9999))


@pytest.mark.parametrize("fused", [True, False])
def test_steps_that_a_scaler_skips_are_no_error(fused: bool) -> None:
    module = method(small(), optimizer=lambda params: SGD(params, lr=0.1, fused=fused))
    before, seen = {**small().state_dict()}, []

    class Rounds(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(same(before, {**module.replicas["c0"].extractor.state_dict()}))

    fit(module, 20, callbacks=[Rounds()], plugins=[half()], strategy={"local_steps": 1})
    assert seen[0]
    assert not seen[-1]


def test_a_module_that_steps_by_itself_has_no_scaler() -> None:
    with refused("precision"):
        fit(wrapped(Unstepped()), plugins=[half()])


def compiled(net: Any) -> Any:
    net.compile(backend="eager")
    return net


def inside(net: Net) -> Net:
    net.net = torch.compile(net.net, backend="eager")  # type: ignore[assignment]
    return net


def test_what_is_compiled_trains_as_what_is_not() -> None:
    plain = [*weights(fit(wrapped(Net())), "c2").values()]
    plain_two = [*weights(fit(method(small())), "c2").values()]
    with pytest.warns(UserWarning, match=r"copies of \['extractor'\] are not compiled"):
        module = wrapped(compiled(Net()))
    assert all(map(torch.equal, weights(fit(module), "c2").values(), plain))
    assert all(map(torch.equal, weights(fit(wrapped(inside(Net()))), "c2").values(), plain))
    network = torch.compile(small(), backend="eager")
    assert all(map(torch.equal, weights(fit(method(network)), "c2").values(), plain_two))
    assert all(map(torch.equal, weights(fit(compiled(method(small()))), "c2").values(), plain_two))


class Lambda(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.activation = lambda x: self.layer(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x)


def with_hook() -> nn.Module:
    network, scale = small(), nn.Linear(4, 4)
    network.register_forward_hook(lambda module, inputs, output: scale(output))
    return network


def with_compiled_forward() -> nn.Module:
    network = small()
    network.forward = torch.compile(network.forward, backend="eager")  # type: ignore[method-assign]
    return network


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "script": (lambda: torch.jit.script(nn.Sequential(nn.Linear(5, 4))), "extractor is TorchScript"),
    "trace": (
        lambda: nn.Sequential(torch.jit.trace(nn.Linear(5, 4), torch.zeros(2, 5))),
        "extractor.0 is TorchScript",
    ),
    "weight_norm": (
        lambda: nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(5, 4))),
        "extractor.0.weight of Linear is computed from other weights",
    ),
    "lambda": (Lambda, "extractor.activation is a function that holds a Lambda"),
    "hook": (with_hook, "is a function that holds a Linear"),
    "forward": (with_compiled_forward, "extractor.forward is a function that holds a MLP"),
    "sync": (lambda: nn.Sequential(nn.Linear(5, 4), nn.SyncBatchNorm(4)), "extractor.1 is SyncBatchNorm"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("kind", REFUSED)
def test_a_network_whose_copies_cannot_be_trained_is_refused_by_name(kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(ValueError, match=f"^{message}" if kind != "hook" else message):
        method(make())


def test_a_module_compiled_as_a_whole_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="compiled as a whole"):
        wrapped(torch.compile(Net(), backend="eager"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))),
        lambda: nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4))),
        lambda: nn.Sequential(torch.nn.utils.parametrizations.orthogonal(nn.Linear(5, 4))),
        lambda: nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(5, 4))),
        lambda: nn.DataParallel(small()),
        lambda: nn.Sequential(torch.jit.script(nn.Linear(5, 4))).requires_grad_(False),
    ],
    ids=["weight_norm", "spectral_norm", "orthogonal", "old spectral_norm", "DataParallel", "frozen script"],
)
@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated")
def test_a_network_with_computed_weights_is_trained_by_each_client(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = fit(method(make()), 2)
    assert same(weights(module, "c0"), weights(module, "c2"))
