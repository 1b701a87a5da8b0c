"""Copies of networks that share memory until they are written to."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD

from fedlit import Client
from fedlit.federation import Fraction
from fedlit.methods import Ditto, FedAvg
from fedlit.models import MLP
from fedlit.models.copies import copied, lazily_copied, memory_of, share_
from helpers import build, digits, layers, loader, same, trainer, unequal, weights

ALONE = {"SparseAdam": "takes sparse gradients", "LBFGS": "takes a closure", "Muon": "takes matrices"}
OPTIMIZERS = [
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and kind.__module__.startswith("torch.optim.") and name != "Optimizer"
]
WAYS = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return MLP(6, [5], batch_norm=True), nn.Linear(5, 3)


def memories(*modules: nn.Module) -> list[Any]:
    return [memory_of(param) for module in modules for param in module.parameters()]


def test_parameters_of_copies_have_one_memory_until_one_is_written_to() -> None:
    originals = networks()
    first, second = copied(originals), copied(originals)
    assert memories(*first) == memories(*second) == memories(*originals)
    assert None not in memories(*first)
    before = copy.deepcopy(originals)
    with torch.no_grad():
        first[1].weight.add_(1.0)
    for each, there in zip((*originals, *second), (*before, *before), strict=True):
        assert same(each.state_dict(), there.state_dict())
    assert torch.equal(first[1].weight, before[1].weight + 1.0)  # type: ignore[operator]
    assert memories(first[0]) == memories(originals[0])


def test_tied_parameters_stay_tied_and_buffers_have_memory_of_their_own() -> None:
    extractor, classifier = networks()
    extractor.register_parameter("tied", classifier.weight)  # type: ignore[arg-type]
    classifier.requires_grad_(False)
    (other, head) = copied((extractor, classifier))
    assert other.tied is head.weight
    assert not head.weight.requires_grad
    buffers = dict(other.named_buffers())
    for name, buffer in extractor.named_buffers():
        assert torch.equal(buffer, buffers[name])
        assert buffer.data_ptr() != buffers[name].data_ptr()


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", [each for each in OPTIMIZERS if each not in ALONE])
def test_no_optimizer_writes_to_the_memory_of_others(name: str, way: dict[str, Any]) -> None:
    """Torch's optimisers write by kernels of their own."""
    kind = getattr(torch.optim, name)
    originals = networks()
    trained, reference, bystander = copied(originals), copy.deepcopy(originals), copied(originals)
    before = copy.deepcopy(originals)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for extractor, head in (trained, reference):
        try:
            optimizer = kind([*extractor.parameters(), *head.parameters()], lr=0.1, **way)
        except (RuntimeError, TypeError) as error:  # it has no such way
            pytest.skip(str(error))
        for _ in range(3):
            optimizer.zero_grad()
            head(extractor(x)).square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(trained, reference, strict=True):
        assert same(ours.state_dict(), theirs.state_dict())
    for each in (originals, bystander):
        assert all(
            same(dict(a.named_parameters()), dict(b.named_parameters())) for a, b in zip(each, before, strict=True)
        )


def test_memory_that_torch_has_not_allocated_is_not_shared(tmp_path: Path) -> None:
    """Writing to such memory, shared lazily, would end the process."""
    torch.save(torch.ones(2000), tmp_path / "x.pt")
    for given in (torch.load(tmp_path / "x.pt"), torch.from_numpy(np.ones(3)), torch.ones(4, 4)[1], torch.ones(0)):
        assert lazily_copied(given) is None
        own = nn.Parameter(torch.zeros_like(given))
        assert not share_(own, given)
        assert not own.any()
    own, other = nn.Parameter(torch.zeros(3)), torch.ones(3)
    assert not share_(own, other.double())
    assert not share_(own, torch.ones(4))
    assert not share_(torch.zeros(3), other)  # no parameter
    assert share_(own, other)
    assert torch.equal(own, other)
    other[0] = 5.0
    assert torch.equal(own, torch.ones(3))


def test_a_network_that_was_loaded_whole_is_trained_as_any_other(tmp_path: Path) -> None:
    data = digits()
    plain = build(FedAvg, data, extractor=MLP(64, [16]))
    torch.save(plain.originals[0], tmp_path / "network.pt")
    loaded = build(FedAvg, data, extractor=torch.load(tmp_path / "network.pt", weights_only=False))
    for module in (plain, loaded):
        trainer(2).fit(module, data)
    assert all(same(weights(plain, client), weights(loaded, client)) for client in ("clean", "blended", "fonts"))


NAMES = [f"c{number}" for number in range(8)]
FEW = {"participation": Fraction(0.4)}


def federation(method: Any = FedAvg, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    steps = partial(SGD, lr=0.1)
    clients = [*NAMES[:-1], Client("c7", role="target", labelled=True)]
    return method(clients, "c7", 4, layers(8, nn.Linear(5, 8), nn.Tanh()), optimizer=steps, **kwargs)


def different(module: Any) -> int:
    """How many memories the clients' first weights have."""
    return len({memory_of(module.replicas[name].extractor[0].weight) for name in NAMES})


def test_clients_share_what_they_received_and_absent_ones_what_they_began_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = dict.fromkeys(NAMES, 8)
    module, resumed = federation(), federation()
    run = trainer(2, strategy=FEW)
    run.fit(module, loader(unequal(*data.values()), 4))
    assert different(module) <= 3  # the first weights, and two means
    run.save_checkpoint(tmp_path / "run.ckpt")
    assert different(module) <= 3  # writing a file gives nobody memory of its own
    trainer(4, strategy=FEW).fit(resumed, loader(unequal(*data.values()), 4), ckpt_path=tmp_path / "run.ckpt")
    assert different(resumed) <= 5

    with monkeypatch.context() as without:
        without.delattr(torch, "_lazy_clone")
        straight = federation()
        trainer(4, strategy=FEW).fit(straight, loader(unequal(*data.values()), 4))
        assert different(straight) == len(NAMES)
    assert all(same(weights(resumed, name), weights(straight, name)) for name in NAMES)


def test_a_file_has_weights_that_clients_share_once(tmp_path: Path) -> None:
    module = federation(Ditto)  # personal networks are each client's own
    run = trainer(1, callbacks=[ModelCheckpoint(tmp_path)], enable_checkpointing=True)
    run.fit(module, loader(unequal(*[8] * len(NAMES)), 4))
    (file,) = tmp_path.glob("*.ckpt")
    found = {name: state["weights"] for name, state in torch.load(file, weights_only=False)["clients"].items()}
    memories: dict[str, set[int]] = {"extractor": set(), "classifier": set(), "personal": set()}
    for name in NAMES:
        own = {key: each for key, each in module.replicas[name].state_dict().items() if isinstance(each, Tensor)}
        assert same(found[name], own)
        for key, each in found[name].items():
            memories.setdefault(key.partition(".")[0], set()).add(each.untyped_storage().data_ptr())
    assert (len(memories["extractor"]), len(memories["classifier"])) == (2, 2)
    assert len(memories["personal"]) == 4 * len(NAMES)


def test_memory_is_that_of_clients_who_take_part() -> None:
    """In a fresh process: of 60 clients of 4 MiB, 5 at a time."""
    script = """
import resource, torch, warnings, logging
warnings.simplefilter("ignore")
from fedlit import FederatedStrategy
from fedlit.data import FederatedLoader
from fedlit.federation import Fraction
from fedlit.methods import FedAvg
import lightning.pytorch as pl
names = [f"c{number}" for number in range(60)]
data = torch.utils.data.TensorDataset(torch.randn(8, 64), torch.arange(8) % 4)
network = torch.nn.Sequential(torch.nn.Linear(64, 16000), torch.nn.ReLU(), torch.nn.Linear(16000, 4))
network.out_features = 4
steps = __import__("functools").partial(torch.optim.SGD, lr=0.01)
module = FedAvg(names, "c59", 4, network, optimizer=steps)
quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
run = pl.Trainer(max_epochs=3, accelerator="cpu", strategy=FederatedStrategy(participation=Fraction(5 / 59)), **quiet)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run.fit(module, FederatedLoader(dict.fromkeys(names, data), 8, seed=0))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 150  # MiB; 60 copies take 250
