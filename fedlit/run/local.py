"""Networks of local clients: how they are built, and evaluated without training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedlit.checks import refuse
from fedlit.federation.streams import enter_stream, torch_streams
from fedlit.models.copies import share_equal_
from fedlit.models.replica import is_width_open

if TYPE_CHECKING:
    from fedlit.run.run import Run


def build(run: Run) -> None:
    """Build the replicas of local clients, all from the same random state."""
    federation, target = run.federation, run.target.name
    with torch.device("cpu"), torch_streams():  # Lightning's is the Trainer's device, whose draws are others
        enter_stream(federation.seed, "lazy weights")
        materialise(run)
        parts = zip(("extractor", "classifier"), run.originals, strict=True)
        first = {name: param for part, network in parts for name, param in network.named_parameters(prefix=part)}
        for client in federation.local_clients:
            enter_stream(federation.seed, "initial weights")
            run.replicas[client.name] = replica = run.module.build_replica()
            share_equal_(replica, first)  # of copies that a method has made by itself
            if run.offload is not None and client.name != target:
                run.offload.keep_weights_(client.name, run.replicas[client.name])
    if target in run.replicas:
        run.replicas[target] = run.module.build_target(run.replicas[target])


def initial_networks(run: Run, client: str | None) -> list[nn.Module]:
    """Return initial networks, of one client or of a source and the target, whoever hosts them."""
    made: list[nn.Module] = []
    with torch_streams():
        for is_target in (False, True):
            if client is None or is_target == (client == run.target.name):
                enter_stream(run.federation.seed, "initial weights")
                replica = run.module.build_replica()
                made.append(run.module.build_target(replica) if is_target else replica)
    return made


@torch.no_grad()
def materialise(run: Run) -> None:
    """Run lazy layers once on inputs of the data's shape, so that they take its width.

    In evaluation of data that do not state it, the checkpoint brings the width of lazy layers.
    """
    extractor, classifier = run.originals
    lazy = [part for part in run.originals if any(map(is_lazy, part.state_dict(keep_vars=True).values()))]
    without_width = is_width_open(extractor)
    if without_width and extractor not in lazy:
        lazy.append(extractor)
    if not lazy or not run.is_attached:
        return
    data = run.trainer.datamodule  # type: ignore[attr-defined]
    if not run.federation.local_clients and not getattr(data, "elsewhere", False):
        return
    try:
        shape = getattr(data, "input_shape", None)
    except RuntimeError:  # of tables, whose features a checkpoint may bring
        if run.is_fitting:
            raise
        shape = None
    if not isinstance(shape, tuple):
        if not run.is_fitting:
            return
        refuse(
            "in_features",
            f"given to {type(lazy[0]).__name__}, as only a data module with input_shape knows the width of its inputs",
            None,
            "give in_features",
        )
    training = [part.training for part in run.originals]
    known = next((p for part in run.originals for p in part.parameters()), torch.zeros(0))
    features = extractor.eval()(torch.zeros(1, *shape, dtype=known.dtype, device=known.device))
    if without_width:
        extractor.in_features = extractor.out_features = features.shape[1]
    if any(map(is_lazy, classifier.state_dict(keep_vars=True).values())):
        classifier.eval()(features)
    for part, mode in zip(run.originals, training, strict=True):
        part.train(mode)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients; restore every module's mode afterwards."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
