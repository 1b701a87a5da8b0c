"""SplitDANN against central domain-adversarial training, masked sums against plain ones, and an oracle's accuracy."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD

from fedlit import FederatedModule, FederatedStrategy
from fedlit.callbacks import OracleAccuracy
from fedlit.data import Domain
from fedlit.federation import Fraction
from fedlit.federation.errors import ChannelError
from fedlit.methods import FedAvg
from fedlit.models import MLP
from fedlit.privacy import FixedPoint, PairwiseMasking, Plain
from fedlit.run.run import Run
from fedlit_extension.adversarial import SplitDANN
from fedlit_extension.data import ANGLES, Moons

SOURCES = [name for name in ANGLES if name != "turned"]


class Offset(Moons):
    """Two features that tell the classes apart, of which the target's first is offset."""

    def load(self, domain: str) -> Domain:
        generator = torch.Generator().manual_seed(list(ANGLES).index(domain))
        labels = torch.arange(200) % 2
        x = 2.0 * labels[:, None] - 1 + torch.tensor([0.5, 0.6]) * torch.randn(200, 2, generator=generator)
        return Domain(x + torch.tensor([2.5, 0.0]) * (domain == "turned"), labels)


class Start(L.Callback):
    """Keeps the target's network as it was before the first step."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.network = copy.deepcopy(pl_module.replicas["turned"])


def run(
    method: type[FederatedModule] = SplitDANN, rounds: int = 1, batch_size: int = 1000, lr: float = 0.1,
    choices: dict[str, Any] | None = None, problem: type[Moons] = Moons, clients: Any = None, **kwargs: Any,
) -> tuple[Any, Any, float]:  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data, start = problem(target="turned", clients=clients, seed=0, batch_size=batch_size), Start()
    module = method(
        data.clients, data.target, 2, MLP(2, [16]), optimizer=lambda p: SGD(p, lr=lr), weighting="uniform", **kwargs
    )
    trainer = L.Trainer(
        max_epochs=rounds, accelerator="cpu", strategy=FederatedStrategy(**(choices or {})),
        callbacks=[start, OracleAccuracy()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, data)
    return module, start.network, trainer.test(module, data, verbose=False)[0]["oracle/target/acc"]


class Reverse(torch.autograd.Function):
    """The gradient reversal layer, as the paper has it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return -ctx.weight * gradients[0], None


def test_a_step_is_one_of_centralised_training_on_pooled_batches() -> None:
    """Shared weights move by the mean of clients' gradients, critic and judge by that of the domain loss."""
    module, network, _ = run(adversarial_weight=0.7)
    data = Moons(target="turned", seed=0)
    x = {name: data.dataset(name, "train").x for name in ANGLES}
    features = network.extractor(torch.cat(list(x.values())))
    parts = dict(zip(x, features.split([len(v) for v in x.values()]), strict=True))
    task = sum(F.cross_entropy(network.classifier(parts[n]), data.dataset(n, "train").y) for n in SOURCES)
    logits = network.judge(network.critic(Reverse.apply(features, 0.7))).squeeze(1)
    labels = torch.cat([torch.full((len(v),), float(n != "turned")) for n, v in x.items()])
    weights = torch.cat([torch.full((len(v),), (0.5 if n != "turned" else 1.0) / len(v)) for n, v in x.items()])
    (task + F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")).backward()
    for client in ANGLES:
        after = dict(module.replicas[client].named_parameters())
        assert ("judge.1.weight" in after) == (client == "turned")
        for name, weight in after.items():
            before = dict(network.named_parameters())[name]
            assert before.grad.abs().max() > 1e-4
            share = 1 if name.startswith(("critic", "judge")) else 1 / 3
            torch.testing.assert_close(weight, before - 0.1 * share * before.grad, atol=1e-6, rtol=1e-5)


def test_masked_sums_are_those_on_the_grid_and_near_the_plain_ones() -> None:
    backends = PairwiseMasking(), Plain(codec=FixedPoint()), Plain()
    masked, grid, plain = (
        run(rounds=2, batch_size=40, choices={"privacy": backend})[0].replicas["turned"].state_dict()
        for backend in backends
    )
    for name, weight in plain.items():
        assert torch.equal(masked[name], grid[name])
        torch.testing.assert_close(masked[name], weight, atol=2e-5, rtol=0)  # some sums within 3 * 2^-21 each


def test_the_critic_is_the_same_everywhere_within_a_round() -> None:
    """All descend along the summed gradient: a round without averaging would leave it equal."""

    class Apart(SplitDANN):
        def on_round_end(self, run: Run) -> None:
            pass

    module, *_ = run(Apart, batch_size=40)
    critics = [module.replicas[name].critic.weight for name in ANGLES]
    extractors = [next(module.replicas[name].extractor.parameters()) for name in ANGLES]
    assert torch.equal(critics[0], critics[1])
    assert torch.equal(critics[0], critics[2])
    assert not torch.equal(extractors[0], extractors[2])


def test_a_step_takes_as_many_calls_for_two_sources_as_for_one() -> None:
    """Each source is told something else in one exchange: what grows with them are messages."""
    calls, verdicts = [], []
    for clients in (["tilted", "turned"], [*ANGLES]):
        module, *_ = run(batch_size=40, clients=clients)
        averaged, *_ = run(FedAvg, batch_size=40, clients=clients)
        assert module.trainer.global_step == averaged.trainer.global_step == 4
        calls.append(module.federation.state_dict()["calls"] - averaged.federation.state_dict()["calls"])
        verdicts.append(module.federation.ledger.messages_by_channel()["verdicts"])
    # two exchanges and a sum (vectors and total) in each of 4 steps, and what failed in the last
    assert calls == [4 * (2 + 2) + 1] * 2
    assert verdicts == [4, 8]


def test_the_targets_accuracy_rises_against_no_adaptation_oracle() -> None:
    """Measured on labels that training never sees: 0.68 becomes 0.95."""
    sources_only = run(FedAvg, 60, 32, problem=Offset)[2]
    nothing_reversed = run(rounds=60, batch_size=32, problem=Offset, adversarial_weight=0.0)[2]
    adapted = run(rounds=60, batch_size=32, problem=Offset, adversarial_weight=1.0)[2]
    assert adapted > max(sources_only, nothing_reversed) + 0.1


@pytest.mark.parametrize("choices", [{"participation": Fraction(0.5)}, {"heard": {"verdicts": Fraction(0.5)}}])
def test_some_are_away(choices: dict[str, Any]) -> None:
    assert run(rounds=3, batch_size=40, choices=choices)[2] > 0.5


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="adversarial_weight must be at least 0, got -1"):
        run(adversarial_weight=-1)


def test_what_goes_one_by_one_cannot_be_hidden_in_a_sum() -> None:
    with pytest.raises(ChannelError, match="verdicts"):
        run(choices={"privacy": {"verdicts": PairwiseMasking()}})
