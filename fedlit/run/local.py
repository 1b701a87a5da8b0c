"""Local clients of a process: who trains, in which random stream, on which samples, and what each holds at first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedlit.federation import Client, FederatedLoader, RosterError, RoundPlan
from fedlit.federation.labels import known_labels
from fedlit.federation.nested import Inputs, take
from fedlit.federation.streams import enter_stream, torch_streams
from fedlit.run.method import Method


def build(method: Method) -> None:
    """Build the replicas of local clients, all from the same random state."""
    federation, target = method.federation, method.target.name
    with torch.device("cpu"), torch_streams():  # Lightning's is the Trainer's device, whose draws are others
        enter_stream(federation.seed, "lazy weights")
        materialise(method)
        for client in federation.local_clients:
            enter_stream(federation.seed, "initial weights")
            method.replicas[client.name] = method.build_replica()
    if target in method.replicas:
        method.replicas[target] = method.build_target(method.replicas[target])


@torch.no_grad()
def materialise(method: Method) -> None:
    """Give layers of the networks that took no width the one that the data have.

    Where a checkpoint is evaluated, and the data do not know it, the checkpoint brings it.
    """
    extractor, classifier = method.originals
    lazy = [part for part in method.originals if any(map(is_lazy, part.state_dict(keep_vars=True).values()))]
    without_width = getattr(extractor, "out_features", 0) is None
    if without_width and extractor not in lazy:
        lazy.append(extractor)
    data, trainer = getattr(method._trainer, "datamodule", None), method._trainer
    if not lazy or trainer is None or trainer.state.fn != "fit":
        return
    if not method.federation.local_clients and not getattr(data, "elsewhere", False):
        return
    if not isinstance(shape := getattr(data, "input_shape", None), tuple):
        raise ValueError(
            f"{type(lazy[0]).__name__} was made without the width of its inputs, which only a data module with "
            "input_shape knows: give in_features"
        )
    training = [part.training for part in method.originals]
    known = next((p for part in method.originals for p in part.parameters()), torch.zeros(0))
    features = extractor.eval()(torch.zeros(1, *shape, dtype=known.dtype, device=known.device))
    if without_width:
        extractor.in_features = extractor.out_features = features.shape[1]
    if any(map(is_lazy, classifier.state_dict(keep_vars=True).values())):
        classifier.eval()(features)
    for part, mode in zip(method.originals, training, strict=True):
        part.train(mode)


def present_learners(method: Method, round_idx: int) -> tuple[Client, ...]:
    """Clients that take local steps in a round, past or to come."""
    if round_idx < method.warmup_rounds:
        learners, everybody = method.sources, False
    else:
        learners, everybody = method.learners(round_idx), method.trains_when_absent
    roster = method.federation.roster
    present = {client.name for client in roster.present(round_idx)}
    return tuple(
        client for client in learners if client.name in present or (everybody and client.name not in roster.away)
    )


def in_step(method: Method, clients: Sequence[Client], step: int | None = None) -> tuple[Client, ...]:
    """See `FederatedModule.in_step`."""
    loader, step = method.trainer.train_dataloader, method.federation.batch_idx if step is None else step
    if not isinstance(loader, FederatedLoader):
        return tuple(clients)
    learning = {client.name for client in present_learners(method, method.federation.round_idx)}
    able = (client for client in clients if client.name in learning)
    return tuple(client for client in able if step < loader.batches_of(client.name))


def samples_in_step(method: Method, clients: Sequence[Client]) -> dict[str, int]:
    """Samples that each of these clients has in its batch of this local step, wherever it is hosted.

    Raises:
        RosterError: If training data come from another loader than a `FederatedLoader`.
    """
    loader, federation = method.trainer.train_dataloader, method.federation
    if not isinstance(loader, FederatedLoader):
        raise RosterError(
            f"{type(method).__name__} has to know every client's batch size: train on a fedlit.data.DomainDataModule "
            "or a FederatedLoader"
        )
    return {
        client.name: loader.samples_in(client.name, federation.round_idx, federation.batch_idx) for client in clients
    }


def in_streams(
    method: Method, batch: Mapping[str, Sequence[Any]], purpose: str
) -> Iterator[tuple[Client, Sequence[Any]]]:
    """See `FederatedModule.in_streams`."""
    federation = method.federation
    moment = (federation.round_idx, federation.batch_idx)
    with torch_streams(method.device):
        for client in method.clients:
            if client.name in batch:
                enter_stream(federation.seed, purpose, client.name, *moment, device=method.device)
                yield client, batch[client.name]


def labelled_samples(method: Method, clients: Sequence[Client]) -> Iterator[tuple[str, Inputs, Tensor]]:
    """All labelled training samples of local clients, once and always in one order, on the device.

    Yields:
        Name of a client, and inputs and labels of a batch of its samples; in regression as losses read them.

    Raises:
        TypeError: If training data come from another loader than a `FederatedLoader`.
    """
    loader = _federated(method)
    for batch in _on_device(method, loader.in_order([client.name for client in clients])):
        for name, (inputs, labels, *_) in batch.items():
            known = known_labels(labels)
            x, y = method.task.standardised(name, (take(inputs, known), labels[known]))
            yield name, x, y


def training_inputs(method: Method, client: Client) -> Iterator[Inputs]:
    """See `FederatedModule.training_inputs`."""
    loader = _federated(method)
    for batch in _on_device(method, loader.in_order([client.name], labelled_only=False)):
        yield batch[client.name][0]


def all_inputs(method: Method, client: Client, batch_size: int = 512) -> Iterator[Inputs]:
    """Inputs of all training samples of a local client, labelled or not, once and always in one order, on the device.

    The order is a random one, as samples may be sorted by class.

    Raises:
        TypeError: If training data come from another loader than a `FederatedLoader`.
    """
    for batch in _on_device(method, _alone(method, client, batch_size, _federated(method).num_workers)):
        yield batch[client.name][0]


def shuffled_inputs(method: Method, client: Client, pass_idx: int) -> Iterator[tuple[Tensor, Inputs]]:
    """All training samples of a local client, labelled or not, in its batches, in an order of each pass.

    Yields:
        Where a batch's samples are in the order of `training_inputs`, int64, and their inputs on the device.

    Raises:
        TypeError: If training data come from another loader than a `FederatedLoader`.
    """
    loader, name = _federated(method), client.name
    once = _alone(method, client, loader.batch_size_of(name), loader.num_workers)
    once.plan(RoundPlan(sizes=once.sizes(), learners=lambda round_idx: [name], position=lambda: (pass_idx, 0)))
    for batch_idx, batch in enumerate(_on_device(method, once)):
        yield once.positions(name, pass_idx, batch_idx), batch[name][0]


def drawn_inputs(method: Method, client: Client, number: int) -> Inputs:
    """Inputs of so many training samples of a local client, labelled or not, or of all if it has fewer; on the device.

    They are drawn at random, and are the same ones whenever they are asked for.

    Raises:
        TypeError: If training data come from another loader than a `FederatedLoader`.
    """
    return next(_on_device(method, _alone(method, client, number, num_workers=0)))[client.name][0]


def first_inputs(method: Method, client: Client) -> Inputs:
    """Inputs of a local client's first training sample, as a batch of one, as the dataset gives them.

    Raises:
        TypeError: If training data come from another loader than a `FederatedLoader`.
    """
    return _federated(method).samples(client.name)[0]


def batch_positions(method: Method, client: Client) -> Tensor:
    """See `FederatedModule.batch_positions`."""
    federation = method.federation
    return _federated(method).positions(client.name, federation.round_idx, federation.batch_idx)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no gradients; afterwards every module is in the mode that it was in."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _alone(method: Method, client: Client, batch_size: int, num_workers: int) -> FederatedLoader:
    """A loader of a local client's training samples by themselves, in a random order, without labels."""
    loader = _federated(method)
    own = {client.name: loader.datasets[client.name]}
    alone = FederatedLoader(own, batch_size, num_workers=num_workers, guarded=client.name, seed=loader.seed)
    alone.check = loader.check
    return alone


def _on_device(method: Method, loader: FederatedLoader) -> Iterator[dict[str, Any]]:
    """A loader's batches as the Trainer hands them to a step."""
    trainer = method.trainer
    for batch in loader:
        yield trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))


def _federated(method: Method) -> FederatedLoader:
    loader = method.trainer.train_dataloader
    if not isinstance(loader, FederatedLoader):
        raise TypeError(
            f"{type(method).__name__} reads training samples from a FederatedLoader, got {type(loader).__name__}: give "
            "FederatedLoader({client: dataset})"
        )
    return loader
