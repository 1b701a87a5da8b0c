"""Local steps of one client after the other: bit for bit those taken together, with one client's graph at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from fedlit import Client, FederatedModule
from fedlit.federation import FederationError, Fraction, NotTrainedError, Schedule
from fedlit.methods import KD3A, Ditto, FedAvg, FedDA, FedDAN, FedGP, FedProx, FedRep
from fedlit.models import MLP
from fedlit.run import param_groups, turns
from fedlit.wrapped import Federated
from helpers import Snapshots, layers, loader, same, trainer, unequal, weights

LABELLED = ["c0", "c1", Client("c2", role="target", labelled=True)]
UNLABELLED = ["c0", "c1", "c2"]
ADAM: dict[str, Any] = {"optimizer": partial(Adam, lr=0.02)}


@pytest.fixture
def in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients with networks of any size take turns."""
    monkeypatch.setattr(turns, "LARGE", 0)


def network(dropout: float = 0.2) -> Any:
    torch.manual_seed(0)
    return layers(6, nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(dropout))


def fitted(make: Callable[[], FederatedModule], **kwargs: Any) -> tuple[FederatedModule, Snapshots, pl.Trainer]:
    """A run of rounds of unequal length, as the third client has fewer samples."""
    module, snapshots = make(), Snapshots()
    run = trainer(3, [snapshots], **({"gradient_clip_val": 0.5} | kwargs))
    run.fit(module, loader(unequal(20, 18, 6), 4))
    return module, snapshots, run


def loops(run: pl.Trainer) -> Any:
    return run._checkpoint_connector.dump_checkpoint(weights_only=False)["loops"]


RUNS = {
    "momentum": (FedAvg, LABELLED, {}, {}),
    "Adam, by step": (FedAvg, LABELLED, {**ADAM, "lr_scheduler": lambda o: StepLR(o, 2, 0.5),
                                          "schedule_interval": "step"}, {}),
    "plateau": (FedProx, LABELLED, {"lr_scheduler": lambda o: ReduceLROnPlateau(o, patience=0),
                                     "schedule_interval": "step"}, {}),
    "reset": (FedAvg, LABELLED, {**ADAM, "reset_optimizer": True}, {}),
    "accumulated": (FedAvg, LABELLED, {}, {"accumulate_grad_batches": 2}),
    "accumulated, Adam": (FedProx, LABELLED, {**ADAM, "reset_optimizer": True}, {"accumulate_grad_batches": 4}),
    "accumulated, bf16": (FedAvg, LABELLED, {}, {"accumulate_grad_batches": 3, "precision": "bf16-mixed"}),
    "accumulated, some": (FedAvg, LABELLED, ADAM, {"accumulate_grad_batches": 2,
                                                   "strategy": {"participation": Fraction(0.5)}}),
    "accumulated, distilled": (KD3A, UNLABELLED, {"warmup_rounds": 1}, {"accumulate_grad_batches": 2}),
    "by value": (FedAvg, LABELLED, {}, {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01}),
    "unlabelled": (FedAvg, UNLABELLED, {}, {}),
    "some": (FedAvg, LABELLED, {}, {"strategy": {"participation": Fraction(0.5)}}),
    "local steps": (FedAvg, LABELLED, {}, {"strategy": {"local_steps": 3}}),
    "two models": (Ditto, LABELLED, {}, {}),
    "parts": (FedRep, LABELLED, {}, {}),
    "gradients": (partial(FedDA, beta="auto"), LABELLED, {"warmup_rounds": 1}, {}),
    "steps": (partial(FedGP, beta="auto", estimate_from="steps", align_magnitudes=True), LABELLED, {}, {}),
    "distilled": (KD3A, UNLABELLED, {"warmup_rounds": 1}, {}),
    "trust region": (KD3A, UNLABELLED, {**ADAM, "warmup_rounds": 1, "trust_region": 0.1}, {}),
    "bf16": (FedAvg, LABELLED, {}, {"precision": "bf16-mixed"}),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_steps_in_turns_are_those_taken_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, clients, arguments, options = RUNS[name]

    def make() -> FederatedModule:
        return method(clients, "c2", 2, network(), **arguments)

    together, ours, first = fitted(make, **options)
    monkeypatch.setattr(turns, "LARGE", 0)
    apart, theirs, second = fitted(make, **options)
    assert [each.client for each in (together.run.turns, apart.run.turns)] == [None, None]
    for before, after in zip(ours.rounds, theirs.rounds, strict=True):
        assert all(same(before[client], after[client]) for client in before)
    assert ours.metrics == theirs.metrics
    assert loops(first) == loops(second)
    assert first.global_step == second.global_step


class Watched(nn.Module):
    """Fails if another client has a graph or gradients when it is called."""

    kept: ClassVar[WeakSet[Any]] = WeakSet()
    others: ClassVar[list[nn.Module]] = []
    keeps_gradients = False
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out_features = nn.Linear(5, 6), 6

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not any(self is part for each in Watched.others for part in each.modules()):
            return self.linear(x)  # type: ignore[no-any-return]
        assert not Watched.kept
        assert self.keeps_gradients or all(
            param.grad is None for other in Watched.others for param in other.parameters()
        )
        return _Kept.apply(self.linear(x))  # type: ignore[no-any-return]


class _Kept(torch.autograd.Function):
    """Something that autograd keeps until the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = _Thing()
        Watched.kept.add(ctx.kept)
        Watched.calls += 1
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.kept = None
        return gradient


class _Thing:
    pass


class Observed(FedAvg):
    """Watches its extractors from the first step on, after data were checked."""

    def on_train_start(self) -> None:
        Watched.others[:] = [each for _, each in self.replicas.named_children()]
        Watched.calls = 0


def watched() -> FedAvg:
    Watched.others.clear()
    return Observed(LABELLED, "c2", 2, Watched())


def test_one_client_s_graph_and_gradients_are_there_at_a_time(in_turns: None) -> None:
    fitted(watched)
    assert Watched.calls == 3 * (5 + 5 + 2)  # steps of three rounds


def test_accumulated_gradients_stay_and_graphs_go(in_turns: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watched, "keeps_gradients", True)
    fitted(watched, accumulate_grad_batches=3)
    assert Watched.calls == 3 * (5 + 5 + 2)


def test_a_training_step_without_a_batch_idx_accumulates(in_turns: None) -> None:
    class Short(FedAvg):
        @turns.independent
        def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
            return super().training_step(batch, 0)

    options = {"accumulate_grad_batches": 2}
    one, other = (fitted(lambda m=method: m(LABELLED, "c2", 2, network()), **options)[0] for method in (Short, FedAvg))
    assert same(weights(one, "c2"), weights(other, "c2"))


def test_small_networks_take_the_step_together() -> None:
    with pytest.raises(AssertionError):
        fitted(watched)


def test_networks_are_large_from_a_million_numbers_on(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FedAvg(LABELLED, "c2", 2, MLP(5, [4]))
    seen: list[list[str | None]] = []

    def noted(self: turns.Turns, optimizer: Any, of: Any = turns.Turns.of) -> list[str | None]:
        seen.append(of(self, optimizer))
        return seen[-1]

    monkeypatch.setattr(turns.Turns, "of", noted)
    numbers = sum(param.numel() for param in [*module.originals[0].parameters(), *module.originals[1].parameters()])
    for large, expected in ((numbers, ["c0", "c1", "c2"]), (numbers + 1, [None])):
        monkeypatch.setattr(turns, "LARGE", large)
        trainer(1).fit(FedAvg(LABELLED, "c2", 2, MLP(5, [4])), loader(unequal(), 64))
        assert seen.pop() == expected


class Exchanging(FedAvg):
    """Reads the batches of all local clients in one call."""

    def losses(self, batch: Any) -> dict[str, Tensor]:
        assert len(batch) == 3
        return super().losses(batch)


class Stepping(FedAvg):
    """The same in a step of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert len(batch) == 3
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("method", [Exchanging, Stepping, FedDAN])
def test_methods_that_see_all_clients_in_a_step_go_on_to(method: type[FederatedModule], in_turns: None) -> None:
    trainer(1).fit(method(LABELLED, "c2", 2, MLP(5, [4])), loader(unequal(), 64))


class Own(pl.LightningModule):
    """A classifier of one's own, which has nothing to learn from in some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.2), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return F.cross_entropy(self(batch[0]), batch[1]) if batch[0].sum() > -5 else None

    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=0.02)
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, 0.5)}


@pytest.mark.filterwarnings("ignore:Own.training_step has given None")
def test_modules_of_one_s_own_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> FederatedModule:
        torch.manual_seed(0)
        return Federated(Own(), LABELLED, "c2", 2)

    together, _, _ = fitted(make, gradient_clip_val=None)
    monkeypatch.setattr(turns, "LARGE", 0)
    apart, _, _ = fitted(make, gradient_clip_val=None)
    assert all(same(weights(together, name), weights(apart, name)) for name in ("c0", "c1", "c2"))


class Constant(FedAvg):
    """Has nothing to train at some clients."""

    constant: tuple[str, ...] = ()

    def loss(self, client: Client, batch: Any) -> Tensor:
        loss = super().loss(client, batch)
        return loss.detach() if client.name in self.constant and self.run.clock.step % 2 else loss


@pytest.mark.parametrize("constant", [("c0",), ("c2",), ("c0", "c1")])
def test_a_client_without_a_graph_takes_its_turn(constant: tuple[str, ...], in_turns: None) -> None:
    module = Constant(LABELLED, "c2", 2, MLP(5, [4]))
    module.constant = constant
    run = trainer(1)
    run.fit(module, loader(unequal()))
    assert float(run.callback_metrics["train/loss"]) > 0


def test_if_no_client_has_one_it_is_an_error_as_without_turns(in_turns: None) -> None:
    module = Constant(LABELLED, "c2", 2, MLP(5, [4]))
    module.constant = ("c0", "c1", "c2")
    with pytest.raises(NotTrainedError, match="depend on no weight that is trained"):
        trainer(1).fit(module, loader(unequal()))


def test_an_error_in_a_turn_leaves_the_optimiser_whole(in_turns: None) -> None:
    class Broken(FedAvg):
        def loss(self, client: Client, batch: Any) -> Tensor:
            if client.name == "c1":
                raise ValueError("no loss")
            return super().loss(client, batch)

    module = Broken(LABELLED, "c2", 2, MLP(5, [4]), optimizer=partial(SGD, lr=0.1))
    run = trainer(1)
    with pytest.raises(ValueError, match="no loss"):
        run.fit(module, loader(unequal(), 64))
    assert [group["client"] for group in run.optimizers[0].param_groups] == ["c0", "c1", "c2"]
    assert module.run.turns.client is None


class Failing(FedAvg):
    """Fails once at one client."""

    at = ""

    def loss(self, client: Client, batch: Any) -> Tensor:
        if client.name == self.at and self.run.clock.round_idx and self.run.clock.step == 1:
            raise MemoryError
        return super().loss(client, batch)


@pytest.mark.parametrize("at", ["c0", "c1", "c2"])
def test_a_step_that_only_some_have_taken_is_not_saved(at: str, in_turns: None, tmp_path: Path) -> None:
    module = Failing(LABELLED, "c2", 2, MLP(5, [4]))
    module.at = at
    run = trainer(2, [OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
    with pytest.raises(MemoryError if at == "c0" else FederationError, match="" if at == "c0" else r"\['c0'"):
        run.fit(module, loader(unequal(8, 8, 8), 4))
    assert [file.name for file in tmp_path.iterdir()] == (["on_exception.ckpt"] if at == "c0" else [])
    module.at = ""
    run.fit(module, loader(unequal(8, 8, 8), 4))
    run.save_checkpoint(tmp_path / "later.ckpt")


class Sum(pl.Callback):
    """The loss that Lightning hands on after each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


def test_the_loss_of_a_step_is_the_sum_over_all_clients_in_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for large in (turns.LARGE, 0):
        monkeypatch.setattr(turns, "LARGE", large)
        seen = Sum()
        module = FedAvg(LABELLED, "c2", 2, MLP(5, [4]).double(), nn.Linear(4, 2).double())
        torch.manual_seed(0)
        for part in module.originals:
            part.load_state_dict({name: torch.randn_like(each) for name, each in part.state_dict().items()})
        trainer(1, [seen]).fit(module, loader(unequal(20, 18, 6, dtype=torch.float64), 4))
        found.append((seen.seen, [(names, values.tolist(), values.dtype) for names, values in module.run.record.steps]))
    assert found[0][0] == pytest.approx(found[1][0])
    assert found[0][1] == found[1][1]
    assert len(found[0][0]) == 5


class Counting(SGD):
    """An optimiser of one's own, which looks at all groups at once."""

    def step(self, closure: Any = None) -> Any:
        assert len(self.param_groups) == 3
        return super().step(closure)


class Clipping(FedAvg):
    """Clips the gradients of all together."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        assert len(optimizer.param_groups) == 3


class Looking(pl.Callback):
    """Sees the gradients of all."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert len(optimizer.param_groups) == 3


@pytest.mark.parametrize(
    ("method", "arguments", "callbacks"),
    [(FedAvg, {"optimizer": partial(Counting, lr=0.1)}, []), (Clipping, {}, []), (FedAvg, {}, [Looking()])],
)
def test_what_looks_at_all_gradients_sees_those_of_all(
    method: Any, arguments: dict[str, Any], callbacks: list[Any], in_turns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "MANY", 1)
    run = trainer(1, callbacks, gradient_clip_val=1.0, strategy={"participation": Fraction(1.0)})
    run.fit(method(LABELLED, "c2", 2, MLP(5, [4]), **arguments), loader(unequal(), 64))


def without_decay_of_biases(groups: Any) -> Any:
    made = [
        {**group, "params": [param for param in group["params"] if (param.ndim > 1) == wide], "weight_decay": decay}
        for group in groups
        for wide, decay in ((True, 0.1), (False, 0.0))
    ]
    return Adam(made, lr=0.1)


def rate_by_client(groups: Any) -> Any:
    return SGD([{**group, "lr": 0.5 if group["client"] == "c0" else 0.1} for group in groups], lr=0.1)


@pytest.mark.parametrize(("maker", "number"), [(without_decay_of_biases, 6), (rate_by_client, 3)])
def test_makers_that_look_into_groups_get_them_as_they_are(
    maker: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(param_groups, "MANY", 2)
    module = FedAvg(LABELLED, "c2", 2, MLP(5, [4]), optimizer=maker)
    run = trainer(1)
    run.fit(module, loader(unequal(), 64))
    assert len(run.optimizers[0].param_groups) == number


def test_a_step_is_of_the_clients_that_train_in_the_round_and_others_keep_no_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "MANY", 3)
    seen: list[tuple[set[str], set[str]]] = []

    class Noted(FedAvg):
        def on_step_taken(self, optimizer: Any) -> None:
            params = {name: list(replica.parameters()) for name, replica in self.replicas.named_children()}
            with_gradient = {name for name, own in params.items() if any(param.grad is not None for param in own)}
            seen.append(({group["client"] for group in optimizer.param_groups}, with_gradient))

    names = [f"c{index}" for index in range(6)]
    data = unequal(*[8] * 6)
    present = [["c0", "c1"], ["c2", "c1"], ["c5"], ["c3", "c4", "c0"]]
    module = Noted(names, "c5", 2, MLP(5, [4]), optimizer=partial(Adam, lr=0.1))
    run = trainer(4, strategy={"participation": Schedule([[*names, "c5"] for names in present])})
    run.fit(module, loader(data, 8))
    trained = [set(names) - {"c5"} for names in present]  # the target has no labels
    assert [there for there, _ in seen if len(there) < 6] == [names for names in trained if names]
    assert [found for _, found in seen] == trained
    assert [group["client"] for group in run.optimizers[0].param_groups] == names


@pytest.mark.parametrize("kind", [partial(SGD, lr=0.1, momentum=0.9), Adam, Adagrad])
def test_many_groups_are_made_as_one_by_one(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        linear = [nn.Linear(3, 2) for _ in range(5)]
        groups = [{"params": list(layer.parameters()), "client": str(at)} for at, layer in enumerate(linear)]
        return param_groups.over(kind, groups), linear

    (one, first), _ = made(), monkeypatch.setattr(param_groups, "MANY", 2)
    other, second = made()
    for optimizer, own in ((one, first), (other, second)):
        assert [group["client"] for group in optimizer.param_groups] == list("01234")
        for layer in own[:3]:
            layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(first, second, strict=True))
    states = [optimizer.state_dict() for optimizer in (one, other)]
    assert states[0].keys() == states[1].keys()
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert str(states[0]["state"]) == str(states[1]["state"])
    other.param_groups[0]["lr"] = 7.0
    assert other.param_groups[1]["lr"] != 7.0
