"""What each of the four promises, against something that was worked out apart from it."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD

from fedlit import FederatedModule, FederatedStrategy
from fedlit.methods import FedAvg, FedRFTCA
from fedlit.models import MLP
from fedlit.privacy import InputError, Plain, RangeError
from fedlit_extension.data import ANGLES, Moons
from fedlit_extension.methods import FedEntropy
from fedlit_extension.privacy import Int16
from fedlit_extension.validators import Confidence


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def run(
    method: type[FederatedModule], rounds: int = 3, data: Any = None, callbacks: Any = (), privacy: Any = None,
    **kwargs: Any
) -> tuple[FederatedModule, L.Trainer]:  # fmt: skip
    torch.manual_seed(0)
    data = data or Moons(target="turned", seed=0)
    module = method(
        data.clients,
        data.target,
        data.num_classes,
        MLP(2, [16]),
        optimizer=lambda params: SGD(params, lr=0.1),
        **kwargs,
    )
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        strategy=FederatedStrategy(privacy=privacy),
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, data)
    return module, trainer


def entropy(module: FederatedModule) -> float:
    x = Moons(target="turned", seed=0).dataset("turned", "train").x
    with torch.no_grad():
        return float(torch.distributions.Categorical(logits=module(x)).entropy().mean())


def test_one_step_of_the_target_is_one_on_its_entropy() -> None:
    """With one batch and one round, by hand: weights of two sources and the target, averaged by samples."""
    data = Moons(target="turned", seed=0, batch_size=1000)
    module, _ = run(FedEntropy, 1, data, entropy_weight=0.5)
    total = sum(len(data.dataset(name, "train")) for name in ANGLES)
    mean: dict[str, torch.Tensor] = {}
    for name in ANGLES:
        torch.manual_seed(0)
        extractor = MLP(2, [16])
        classifier = torch.nn.Linear(16, 2)
        network = torch.nn.Sequential(extractor, classifier)
        samples = data.dataset(name, "train")
        logits = network(samples.x)
        loss = (
            0.5 * torch.distributions.Categorical(logits=logits).entropy().mean()
            if name == "turned"
            else F.cross_entropy(logits, samples.y)
        )
        loss.backward()
        for key, weight in zip(module.replicas["turned"].state_dict(), network.parameters(), strict=True):
            mean[key] = mean.get(key, 0) + len(samples) / total * (weight - 0.1 * weight.grad).detach()
    for client in ANGLES:
        torch.testing.assert_close(dict(module.replicas[client].state_dict()), mean, atol=1e-6, rtol=1e-5)


def test_more_weight_lowers_the_entropy_more() -> None:
    found = [entropy(run(FedEntropy, 10, entropy_weight=weight)[0]) for weight in (0.0, 0.1, 1.0)]
    assert found[0] > found[1] > found[2]


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="entropy_weight must be at least 0, got -1"):
        run(FedEntropy, entropy_weight=-1)


def test_sums_are_within_the_declared_error_and_as_many_bytes_as_declared() -> None:
    backend, generator = Int16(), torch.Generator().manual_seed(0)
    payloads = {f"client {i}": {"w": 2 * torch.rand(50, 3, generator=generator) - 1} for i in range(40)}
    plain, ours = Plain().sum(payloads)["w"], backend.sum(payloads)["w"]
    assert 0 < float((plain - ours).abs().max()) <= backend.error_bound(40)
    message = backend.client("client 0").protect(torch.rand(1000))
    assert message.numpy().nbytes / 1000 == backend.describe().bytes_per_number


def test_the_largest_numbers_of_many_clients_do_not_wrap_around() -> None:
    payloads = {f"client {i}": {"w": torch.full((2,), 7.9)} for i in range(100)}
    assert float(Int16().sum(payloads)["w"][0]) == pytest.approx(790, abs=Int16().error_bound(100))


@pytest.mark.parametrize(("number", "error"), [(8.5, RangeError), (math.nan, InputError)])
def test_what_does_not_fit_is_refused(number: float, error: type[Exception]) -> None:
    with pytest.raises(error):
        Int16().sum({"a": {"w": torch.tensor([number])}, "b": {"w": torch.tensor([0.0])}})


def test_training_through_it_is_like_training_in_the_clear_with_half_the_bytes_up() -> None:
    plain, ours = run(FedAvg)[0], run(FedAvg, privacy=Int16())[0]

    def up(module: FederatedModule) -> int:
        return sum(e.num_bytes for e in module.federation.ledger if e.channel == "weights" and e.receiver == "server")

    assert up(ours) < 0.7 * up(plain)  # of so small a network headers are a part
    for name, weight in plain.replicas["turned"].state_dict().items():
        torch.testing.assert_close(ours.replicas["turned"].state_dict()[name], weight, atol=0.01, rtol=0)


def test_domains_are_one_shape_turned() -> None:
    data = Moons(noise=0.0)
    for name, degrees in ANGLES.items():
        domain, angle = data.load(name), -math.radians(degrees)
        x, y = domain.x.T
        back = torch.stack([x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)])
        outer, inner = back[:, domain.y == 0], back[:, domain.y == 1]
        torch.testing.assert_close(outer.norm(dim=0), torch.ones(100))
        assert bool((outer[1] >= -1e-6).all())
        torch.testing.assert_close((torch.tensor([[1.0], [0.5]]) - inner).norm(dim=0), torch.ones(100))


def test_the_points_do_not_depend_on_the_seed_and_the_split_does() -> None:
    one, two = Moons(seed=1), Moons(seed=2)
    assert torch.equal(one.load("tilted").x, two.load("tilted").x)
    assert not torch.equal(one.split("tilted").train, two.split("tilted").train)


def test_confidence_is_that_of_the_target_on_its_validation_samples() -> None:
    data = Moons(target="turned", seed=0, eval_batch_size=7)
    module, trainer = run(FedAvg, data=data, callbacks=[Confidence()])
    with torch.no_grad():
        expected = module(data.dataset("turned", "val").x).softmax(dim=1).amax(dim=1).mean()
    assert float(trainer.callback_metrics["validator/confidence"]) == pytest.approx(float(expected), abs=1e-6)


def test_confidence_waits_for_a_method_that_has_nothing_to_predict_with() -> None:
    """The target of FedRF-TCA has a classifier when the run has ended."""
    _, trainer = run(FedRFTCA, callbacks=[Confidence()], num_frequencies=8, num_components=2, classifier_period=50)
    assert 0.5 <= float(trainer.callback_metrics["validator/confidence"]) <= 1
