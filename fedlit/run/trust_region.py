"""How far a target without labels moves its features, whatever its optimiser and the scale of its inputs are.

A target whose only loss is an adaptation has nothing that holds its classes. Adam's steps are as long for the smallest
gradient as for the largest, whatever weight the loss has, and move features by as much as inputs are long: standardised
ones, of length sqrt(d), by far more than those of length 1. What counts is by how much features move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedlit.federation import FederatedLoader
from fedlit.federation.nested import Inputs, num_samples
from fedlit.functional import annealing
from fedlit.run.local import evaluating
from fedlit.run.method import Method
from fedlit.run.progress import share_over

ENDLESS = 1000
"""Rounds that a run without a planned end is taken to have."""


def check_trust_region(value: float | None, method: str, uses_unlabelled_target: bool) -> None:
    """Raise a `ValueError` unless a trust region is positive and does something."""
    if value is None:
        return
    if not 0 < value < math.inf:
        raise ValueError(
            f"trust_region must be positive and finite, in units of the features' spread, got {value}; null is no limit"
        )
    if not uses_unlabelled_target:
        raise ValueError(
            f"trust_region={value} would do nothing in {method}, whose target does not train without labels: leave it "
            "out"
        )


def limit_now(method: Method, trust_region: float) -> float:
    """Share of a trust region that a step in the round under way may use, in units of the features' spread."""
    loader: Any = method.trainer.train_dataloader
    steps = loader.batches_per_round if isinstance(loader, FederatedLoader) else method.trainer.num_training_batches
    rounds = max(1, method.planned_rounds() or ENDLESS)
    return step_limit(trust_region, share_over(method, rounds), rounds, int(steps))


def step_limit(trust_region: float, progress: float, rounds: int, steps: int) -> float:
    """Share of a trust region that one step may use, in units of the features' spread.

    Shares fall from round to round by `fedlit.functional.annealing`, and add up to the whole.

    Args:
        trust_region: For all rounds.
        progress: Share of the rounds that are over, from 0 to 1.
        rounds: How many rounds have a share, at least 1.
        steps: In each of them, at least 1.
    """
    total = math.fsum(annealing(each / rounds) for each in range(rounds))
    return trust_region * annealing(progress) / (total * steps)


def copy_weights(network: nn.Module) -> dict[str, Tensor]:
    """Copies of what is trained in a network, by name."""
    return {name: param.detach().clone() for name, param in network.named_parameters() if param.requires_grad}


@torch.no_grad()
def hold_back_(network: nn.Module, before: Mapping[str, Tensor], inputs: Inputs, limit: float) -> None:
    """Shorten the step that a network has taken if it moves features further than a limit.

    The distance is the root of the summed squares of the features' changes, over that of their deviations from their
    mean. The step is shortened in proportion: exactly for a network that is linear in its weights, else nearly.
    Features of a single sample have no spread, and the step is left as it is.

    Args:
        network: After the step.
        before: `copy_weights` of before it.
        inputs: Whose features are looked at, of which evaluation mode makes the same ones every time.
        limit: Greatest distance.
    """
    if num_samples(inputs) < 2:
        return
    with evaluating(network):
        old = functional_call(network, dict(before), (inputs,)).flatten(1)
        moved = torch.linalg.vector_norm(network(inputs).flatten(1) - old)
    spread = torch.linalg.vector_norm(old - old.mean(dim=0))
    if moved > limit * spread:
        share = limit * spread / moved
        for name, start in before.items():
            param = network.get_parameter(name)
            param.copy_(start + share.to(start.dtype) * (param - start))
