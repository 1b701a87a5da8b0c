"""Weights that are loaded are loaded: nothing is taken for everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import processes
from fedlit import FederatedModule
from fedlit.federation import RosterError
from fedlit.methods import FedAvg, KNNPer, SourceOnly
from fedlit.models import MLP
from helpers import build, digits, fingerprint, same, trainer, weights

NAMES = ["clean", "blended", "fonts"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[FederatedModule, Path]:
    """A module after a round, and its checkpoint."""
    torch.manual_seed(0)
    data, run = digits(), trainer(1, strategy={"local_steps": 2})
    module, path = build(FedAvg, data), tmp_path_factory.mktemp("run") / "a.ckpt"
    run.fit(module, data)
    run.save_checkpoint(path)
    return module, path


def fresh(method: type[FederatedModule] = FedAvg, **kwargs: Any) -> FederatedModule:
    return build(method, digits(), **kwargs)


def test_a_state_dict_is_loaded_before_replicas_were_built(trained: tuple[FederatedModule, Path]) -> None:
    module = fresh()
    found = module.load_state_dict(trained[0].state_dict())
    assert not found.missing_keys
    assert not found.unexpected_keys
    assert all(same(weights(module, name), weights(trained[0], name)) for name in NAMES)
    run = trainer(1)
    expected = trainer(1).predict(trained[0], digits())[0]["fonts"]  # type: ignore[index, call-overload]
    assert torch.equal(run.predict(module, digits())[0]["fonts"], expected)  # type: ignore[index, call-overload]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("built", [True, False])
def test_the_state_dict_of_a_checkpoint_file_which_has_no_client_is_refused(
    trained: tuple[FederatedModule, Path], strict: bool, built: bool
) -> None:
    checkpoint, module = torch.load(trained[1], weights_only=True), fresh()
    assert not checkpoint["state_dict"]
    if built:
        module.configure_model()
    with pytest.raises(RosterError, match=r"no weights of clients .*FedAvg\.load_from_ch"):
        module.load_state_dict(checkpoint["state_dict"], strict=strict)
    with pytest.raises(ValueError, match="got a whole checkpoint"):
        module.load_state_dict(checkpoint, strict=strict)
    with pytest.raises(ValueError, match=r"got checkpoint\['clients'\]"):
        module.load_state_dict(checkpoint["clients"], strict=strict)


def test_load_from_checkpoint_gives_the_weights(trained: tuple[FederatedModule, Path]) -> None:
    for strict in (True, False):
        module = FedAvg.load_from_checkpoint(
            trained[1], clients=digits().clients, extractor=MLP(64, [16]), strict=strict
        )
        assert all(same(weights(module, name), weights(trained[0], name)) for name in NAMES)


def test_a_state_dict_before_a_run_has_the_weights_that_the_run_starts_from() -> None:
    module, seen = fresh(), {}

    class Look(SourceOnly):
        def on_train_start(self) -> None:
            super().on_train_start()
            seen.update({name: tensor.clone() for name, tensor in super().state_dict().items()})

    before = module.state_dict()
    assert {key.split(".")[1] for key in before} == {*NAMES}
    trainer(1).fit(fresh(Look), digits())
    assert same(before, seen)


def test_a_missing_client_is_named(trained: tuple[FederatedModule, Path]) -> None:
    state = {key: each for key, each in trained[0].state_dict().items() if not key.startswith("replicas.fonts.")}
    with pytest.raises(RosterError, match=r"of \['clean', 'blended'\], and none of \['fonts'\]"):
        fresh().load_state_dict(state)
    module = fresh()
    first = weights(fresh_and_built(), "fonts")
    assert [key for key in module.load_state_dict(state, strict=False).missing_keys if "fonts" not in key] == []
    assert same(weights(module, "clean"), weights(trained[0], "clean"))
    assert same(weights(module, "fonts"), first)


def fresh_and_built() -> FederatedModule:
    module = fresh()
    module.configure_model()
    return module


def test_an_unknown_client_is_named(trained: tuple[FederatedModule, Path]) -> None:
    state = dict(trained[0].state_dict())
    state |= {key.replace("clean", "webcam"): each for key, each in state.items() if "clean" in key}
    with pytest.raises(RosterError, match=r"weights of \['webcam'\], which are not"):
        fresh().load_state_dict(state)
    assert fresh().load_state_dict(state, strict=False).unexpected_keys


@pytest.mark.parametrize("assign", [True, False])
def test_a_state_dict_is_loaded_as_torch_loads_it(trained: tuple[FederatedModule, Path], assign: bool) -> None:
    """Client by client, with the versions of layers; what differs is named with its client."""
    state = trained[0].state_dict()
    ours, theirs = fresh_and_built(), fresh_and_built()
    found, expected = ours.load_state_dict(state, assign=assign), nn.Module.load_state_dict(theirs, state, True, assign)
    assert found == expected
    assert same(ours.state_dict(), theirs.state_dict())
    of_fonts = next(key for key in state if key.startswith("replicas.fonts."))
    lacking = {key: each for key, each in state.items() if key != of_fonts} | {"replicas.clean.more": torch.ones(1)}
    with pytest.raises(RuntimeError, match=rf"lacks \['{of_fonts}'\], and has besides \['replicas.clean.more'\]"):
        ours.load_state_dict(lacking)
    found = ours.load_state_dict(lacking, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == ([of_fonts], ["replicas.clean.more"])
    with pytest.raises(RuntimeError, match=r"(?s)client 'fonts': .*size mismatch"):
        ours.load_state_dict(state | {of_fonts: torch.ones(1)})
    seen: list[Any] = []

    class Versioned(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
            seen.append((prefix, local_metadata.get("version")))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    module = fresh(classifier=Versioned(16, 10))
    module.load_state_dict(module.state_dict())
    assert seen == [("classifier.", 3)] * 3


def goes_on(path: str, devices: int) -> dict[str, str]:
    """Fingerprints of local clients' weights after a round that starts from a state dict of all clients."""
    module = fresh()
    module.load_state_dict(torch.load(path, weights_only=True))
    run = trainer(1, devices=devices)
    run.fit(module, digits())
    run.save_checkpoint(f"{path}.ckpt")
    assert [*dict(module.replicas.named_children())] == [client.name for client in module.federation.local_clients]
    return {client.name: fingerprint(weights(module, client.name)) for client in module.federation.local_clients}


@pytest.mark.multiprocess
def test_processes_start_from_the_state_dict_of_one(trained: tuple[FederatedModule, Path], tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    torch.save(trained[0].state_dict(), path)
    alone = goes_on(path, 1)
    shared = processes.results(goes_on, path, 3, ranks=3)
    assert {name: digest for each in shared for name, digest in each.items()} == alone
    assert [*map(len, shared)] == [1, 1, 1]


def test_what_a_replica_remembers_beside_weights_is_loaded() -> None:
    data, run = digits(target_labels=30), trainer(1)
    first = build(KNNPer, data)
    run.fit(first, data)
    second = build(KNNPer, digits(target_labels=30))
    second.load_state_dict(first.state_dict())
    inputs: Tensor = next(iter(data.test_dataloader()))["fonts"][0]  # type: ignore[union-attr]
    for module in (first, second):
        module.eval()
    with torch.no_grad():
        torch.testing.assert_close(second(inputs), first(inputs))
