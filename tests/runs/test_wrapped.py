"""A LightningModule of one's own in a federation: against a loop by hand, fedlit's own methods, and itself resumed."""

from __future__ import annotations

import copy
from collections import defaultdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam

import fedlit
import processes
from fedlit import methods
from fedlit.federation import NotTrainedError
from fedlit.models import MLP
from helpers import QUIET, trainer, weights
from own_modules import MODULES, Net, Turns, build, rates_after, run
from small_federation import CLIENTS, NUM_CLASSES, TARGET, Blobs

SOURCES = [name for name in CLIENTS if name != TARGET]


class Still(Net):
    """`Net` without dropout, by which a loop by hand draws no random numbers; it keeps what it was given."""

    def __init__(self, seen: dict[int, list[Any]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.backbone[2] = nn.Identity()
        self.seen = seen

    def __deepcopy__(self, memo: Any) -> Still:
        copied = type(self)(self.seen, interval=self.interval)
        copied.load_state_dict(self.state_dict())
        return copied

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen[id(self)].append((batch_idx, batch[0].clone(), batch[1].clone()))
        return super().training_step(batch, batch_idx)


@torch.no_grad()
def average_(copies: dict[str, Any]) -> None:
    """Of sources that have 30 samples each."""
    for params in zip(*(own.parameters() for own in copies.values()), strict=True):
        mean = sum(params) / 3  # in the clients' order, as float addition is not associative
        for param in params:
            param.copy_(mean)


def unlogged(module: Net) -> Net:
    module.log = lambda *args, **kwargs: None
    return module


@pytest.mark.parametrize("interval", [pytest.param("epoch", marks=pytest.mark.slow), "step"])
def test_fedavg_of_a_wrapped_module_is_a_loop_by_hand_to_the_bit(interval: str) -> None:
    seen: dict[int, list[Any]] = defaultdict(list)
    torch.manual_seed(0)
    module = Still(seen, interval=interval)
    method = fedlit.Federated(module, CLIENTS, TARGET, NUM_CLASSES)
    trainer(3).fit(method, Blobs())
    by_client = {name: seen[id(method.replicas[name].extractor)] for name in SOURCES}
    assert [len(batches) for batches in by_client.values()] == [12] * 3  # 30 samples in batches of 8, 3 rounds
    assert [index for index, *_ in by_client["dslr"]] == [0, 1, 2, 3] * 3

    copies = {name: unlogged(copy.deepcopy(module)) for name in SOURCES}
    made = {name: own.configure_optimizers() for name, own in copies.items()}
    for round_idx in range(3):
        for name, own in copies.items():
            optimizer, schedule = made[name]["optimizer"], made[name]["lr_scheduler"]["scheduler"]
            for index, x, y in by_client[name][4 * round_idx : 4 * round_idx + 4]:
                loss = own.training_step((x, y), index)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if interval == "step":
                    schedule.step()
            if interval == "epoch":
                schedule.step()
        average_(copies)
    for name, expected in copies["amazon"].named_parameters():
        assert torch.equal(method.replicas["amazon"].get_parameter(f"extractor.{name}"), expected)
        assert torch.equal(method.replicas[TARGET].get_parameter(f"extractor.{name}"), expected)
    assert not any(param.grad is not None for param in module.parameters())  # the one given has not been trained


def test_a_module_that_steps_by_itself_is_a_loop_by_hand_to_the_bit() -> None:
    class Seen(Turns):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            taken.append((batch[0].clone(), batch[1].clone()))
            return super().training_step(batch, batch_idx)

    taken: list[Any] = []
    torch.manual_seed(0)
    module = Seen()
    module.backbone[2] = nn.Identity()
    method = fedlit.Federated(module, CLIENTS, TARGET, NUM_CLASSES)
    fitted = trainer(2)
    fitted.fit(method, Blobs())
    assert fitted.global_step == 8  # whatever number of clients step how many optimisers

    copies = {name: copy.deepcopy(module) for name in SOURCES}
    made = {name: own.configure_optimizers() for name, own in copies.items()}
    for step in range(8):
        for place, (name, own) in enumerate(copies.items()):  # in each local step, clients take turns
            (first, second), (schedule,) = made[name]
            x, y = taken[3 * step + place]
            for optimizer, part, other in ((first, own.backbone, own.head), (second, own.head, own.backbone)):
                part.requires_grad_(True)
                other.requires_grad_(False)
                loss = F.cross_entropy(own(x), y)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(part.parameters(), 0.5)
                optimizer.step()
            schedule.step()
        if step in (3, 7):
            average_(copies)
    for name, expected in copies["amazon"].named_parameters():
        assert torch.equal(method.replicas[TARGET].get_parameter(f"extractor.{name}"), expected)


SHOWN = [pytest.param(kind, marks=() if kind == "by itself" else pytest.mark.slow) for kind in MODULES]

PLAIN = {
    "FedAvg": (methods.FedAvg, {}),
    "FedProx": (methods.FedProx, {"mu": 0.5}),
    "FedDAN": (methods.FedDAN, {"num_frequencies": 20, "warmup_rounds": 1}),
    "FedCORAL": (methods.FedCORAL, {}),
}


@pytest.mark.parametrize(
    "kind", ["FedDAN", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("FedAvg", "FedProx", "FedCORAL"))]
)
def test_wrapped_and_split_in_two_are_the_same(kind: str) -> None:
    class Simple(Net):
        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=0.1, momentum=0.9)

    torch.manual_seed(0)
    net = Simple()
    net.backbone[2] = nn.Identity()
    wrapped = build(kind, copy.deepcopy(net))
    trainer(3).fit(wrapped, Blobs())
    net.backbone.out_features = 8
    method, given = PLAIN[kind]
    split = method(
        *(CLIENTS, TARGET, NUM_CLASSES, net.backbone, net.head),
        optimizer=lambda params: SGD(params, lr=0.1, momentum=0.9),
        **given,
    )
    trainer(3).fit(split, Blobs())
    for client in CLIENTS:
        ours, theirs = weights(wrapped, client), weights(split, client)
        for part, place in (("backbone", "extractor"), ("head", "classifier")):
            for name in dict(getattr(net, part).named_parameters()):
                assert torch.equal(ours[f"extractor.{part}.{name}"], theirs[f"{place}.{name}"]), (client, part, name)


straight_run = cache(partial(run, rounds=3))


@pytest.mark.parametrize("kind", SHOWN)
def test_resumed_is_straight(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    straight = straight_run(kind)
    run(kind, 2, save=path)
    resumed = run(kind, 3, resume=path)
    assert resumed["weights"] == straight["weights"]
    assert resumed["rates"] == straight["rates"]
    for ours, theirs in zip(resumed["logged"], straight["logged"][2:], strict=True):
        assert ours == {name: theirs[name] for name in ours}  # before an evaluation, there is none of the one before
        assert any(name.endswith("/loss") for name in ours)


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", SHOWN)
def test_one_process_and_several_are_the_same(kind: str) -> None:
    alone = straight_run(kind)
    several = processes.results(run, kind, 3, 3, ranks=3)
    assert {name: each for one in several for name, each in one["weights"].items()} == alone["weights"]
    for one in several:
        assert one["logged"] == alone["logged"]
        assert one["steps"] == alone["steps"]
        if kind == "by itself":
            assert one["logged"][-1]["source/dslr/epoch"] == len(one["logged"]) - 2  # it is logged after this is read


@pytest.mark.multiprocess
def test_a_schedule_of_steps_advances_by_a_client_s_own_wherever_it_is_hosted() -> None:
    alone = rates_after(1, 1)
    assert alone == {name: 0.01 * 0.5 ** (steps // 2) for name, steps in zip(SOURCES, (4, 3, 2), strict=True)} | {
        TARGET: 0.01
    }
    several = processes.results(rates_after, 1, 3, ranks=3)
    assert {name: rate for one in several for name, rate in one.items()} == alone


def test_what_a_module_logs_is_told_by_client_as_the_mean_over_a_round() -> None:
    logged = straight_run("FedAvg")["logged"][0]
    for name in SOURCES:
        assert logged[f"source/{name}/size"] == pytest.approx((8 + 8 + 8 + 6) / 4)
        assert logged[f"source/{name}/batch_loss"] == pytest.approx(logged[f"source/{name}/loss"])
        assert 0 <= logged[f"source/{name}/hits"] * 30 <= 30
        assert logged[f"source/{name}/hits"] * 30 == pytest.approx(round(logged[f"source/{name}/hits"] * 30), abs=1e-4)
    assert not any(name.startswith("target/") for name in logged)


def net(**members: Any) -> Net:
    """`Net`, some of whose methods are others."""
    return type("Mine", (Net,), members)()


def with_parent(name: str, function: Any) -> Any:
    """A method that a function makes of what the parent's gives."""
    return lambda self, *args: function(self, getattr(Net, name)(self, *args), *args)


def test_names_that_fedlit_logs_under_are_not_written_over() -> None:
    def training_step(self: Net, batch: Any, batch_idx: int) -> Tensor:
        self.log("loss", 7.0)
        return Net.training_step(self, batch, batch_idx)

    fitted = trainer(1)
    fitted.fit(build("FedAvg", net(training_step=training_step)), Blobs())
    assert fitted.callback_metrics["source/dslr/own_loss"] == 7
    assert fitted.callback_metrics["source/dslr/loss"] < 7


@pytest.mark.parametrize("kind", ["FedDAN", "FedCORAL"])
def test_a_target_without_labels_takes_no_training_step_and_moves_all_the_same(kind: str) -> None:
    def training_step(self: Net, batch: Any, batch_idx: int) -> Tensor:
        assert isinstance(batch[1], Tensor)  # and not the guard of the target's labels
        return Net.training_step(self, batch, batch_idx)

    given = {"average": "classifier", **({"warmup_rounds": 0} if kind == "FedDAN" else {})}
    method = build(kind, net(training_step=training_step), **given)
    before = copy.deepcopy(method.originals[0].state_dict())
    trainer(1, strategy={"local_steps": 1}).fit(method, Blobs())
    assert not torch.equal(method.replicas[TARGET].extractor.backbone[0].weight, before["backbone.0.weight"])


def test_hooks_of_a_round_are_each_copys_own() -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("called", torch.zeros(4))

        def on_train_start(self) -> None:
            self.called[0] += 1

        def on_train_epoch_start(self) -> None:
            self.called[1] += self.current_epoch + 1

        def on_train_epoch_end(self) -> None:
            self.called[2] += 1

        def on_train_end(self) -> None:
            self.called[3] += 1

    method = build("FedAvg", Counting())
    trainer(2).fit(method, Blobs())
    for client in CLIENTS:
        assert method.replicas[client].extractor.called.tolist() == [1, 3, 2, 1]


def test_one_logit_of_two_classes_will_do() -> None:
    def training_step(self: Net, batch: Any, batch_idx: int) -> Tensor:
        return F.binary_cross_entropy_with_logits(self(batch[0]), (batch[1] % 2).float())

    binary = net(forward=with_parent("forward", lambda self, logits, x: logits[:, 0]), training_step=training_step)
    method, data = fedlit.Federated(binary, CLIENTS, TARGET, 2), Blobs()
    for part in data.parts.values():
        for dataset in part.values():
            dataset.tensors[1].remainder_(2)
    trainer(2).fit(method, data)
    x = data.parts["test"][TARGET].tensors[0]
    with torch.no_grad():
        logit = method.replicas[TARGET].extractor.eval()(x)
        torch.testing.assert_close(method(x).softmax(dim=1)[:, 1], logit.sigmoid())


def plateau(module: Net, monitor: str = "train_loss") -> Any:
    optimizer = SGD(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": monitor}


def test_under_lightnings_own_strategy_it_trains_too() -> None:
    ours, theirs = build("FedAvg"), build("FedAvg")
    trainer(2).fit(ours, Blobs())
    pl.Trainer(**QUIET, max_epochs=2, devices=1).fit(theirs, Blobs())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def every_second(module: Net) -> Any:
    optimizer = SGD(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "frequency": 2}}


ELSEWHERE = nn.Linear(2, 2)

HOOKS = {
    **dict.fromkeys(("optimizer_step", "configure_gradient_clipping", "on_train_batch_end"), "do it in training_step"),
    "on_after_batch_transfer": "change samples in the dataset",
    "setup": "build the network in __init__",
    "on_save_checkpoint": "keep the state in buffers",
    "configure_callbacks": "give the callbacks to the Trainer",
}
OPTIMIZERS: list[tuple[Any, str]] = [
    (lambda module: None, "^configure_optimizers must"),
    (lambda module: torch.optim.LBFGS(module.parameters()), "LBFGS"),
    (lambda module: SGD(ELSEWHERE.parameters(), lr=0.1), "of the module's parameters"),
    (lambda module: [SGD(module.parameters(), lr=0.1), Adam(module.head.parameters())], "set automatic_opt"),
    (partial(plateau, monitor="val_loss"), "train_loss.*, got 'val_loss'"),
    (every_second, "frequency=1, got 2"),
]
ARGUMENTS: dict[str, Any] = {
    "optimizer": lambda params: SGD(params, lr=0.1),
    "lr_scheduler": lambda optimizer: None,
    "param_groups": [{"part": "extractor", "lr": 0.1}],
    "class_weights": "balanced",
    "vectorize": True,
    "recompute": True,
    "refine": True,
}
NO_LOSSES: list[Any] = [None, 3.0, torch.zeros(2)]
FORMS: list[Any] = [lambda x: {"logits": x}, lambda x: x[:, :3], lambda x: x[:, :, None]]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        *((lambda hook=hook: net(**{hook: lambda self, *_: None}), f"Mine overrides {hook}.*{way}")
          for hook, way in HOOKS.items()),
        *((lambda given=given: net(configure_optimizers=lambda self: given(self)), said)
          for given, said in OPTIMIZERS),
        *((lambda form=form: net(forward=with_parent("forward", lambda self, logits, x: form(logits)),
                                 training_step=lambda self, batch, _: self.backbone(batch[0]).square().mean()),
           r"Mine\.forward gives") for form in FORMS),
        *((lambda loss=loss: net(training_step=lambda self, batch, _: loss), r"Mine\.training_step must give the loss")
          for loss in NO_LOSSES),
        (lambda: MLP(5, [8]), "must be a LightningModule"),
        (lambda: pl.LightningModule(), "has no training_step"),
        (lambda: "Net", "got str"),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_wrapped_are_named(make: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError, NotTrainedError), match=said):
        trainer(1).fit(fedlit.Federated(make(), CLIENTS, TARGET, NUM_CLASSES), Blobs())


@pytest.mark.parametrize(
    ("kind", "module", "arguments", "said"),
    [
        *(("FedAvg", Net, {name: value}, f"takes no {name}") for name, value in ARGUMENTS.items()),
        ("FedProx", Turns, {}, "cannot add to its loss"),
        ("FedCORAL", Net, {"features": "bone"}, "features='bone' is no part of Net"),
        ("FedCORAL", Net, {"width": None}, "how many features"),
        ("FedCORAL", Net, {"width": 7}, r"features='backbone' gave \(8, 8\)"),
    ],
)
def test_arguments_that_do_not_go_with_a_module_are_refused(
    kind: str, module: Any, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        trainer(1).fit(build(kind, module(), **arguments), Blobs())


def test_the_strategy_points_to_the_wrapper() -> None:
    with pytest.raises(TypeError, match=r"got Net: .*fedlit\.Federated"):
        trainer(1).fit(Net(), Blobs())
