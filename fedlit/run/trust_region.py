"""How far a target without labels moves its features, whatever its optimiser and the scale of its inputs are.

A target whose only loss is an adaptation has nothing that holds its classes. Adam's steps are as long for the smallest
gradient as for the largest, whatever weight the loss has, and move features by as much as inputs are long: standardised
ones, of length sqrt(d), by far more than those of length 1. What counts is by how much features move.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedlit.checks import check_positive, refuse
from fedlit.federation.nested import Inputs, num_samples
from fedlit.functional import annealing
from fedlit.run.component import Component
from fedlit.run.local import evaluating

if TYPE_CHECKING:
    from fedlit.run.run import Run

ENDLESS = 1000
"""Rounds that a run without a planned end is taken to have."""


class TrustRegion(Component):
    """Limits how far a target that trains without labels moves its features in all steps after the warm-up together.

    Args:
        size: In units of the features' spread, positive.
        run: Of the target.

    Raises:
        ValueError: If ``size`` is not positive and finite, or would do nothing in the method.
    """

    def __init__(self, size: float, run: Run) -> None:
        check_positive("trust_region", size, "it is in units of the features' spread; null is no limit")
        if not run.requires.unlabelled_target:
            refuse("trust_region", f"left out in {run.name}, whose target does not train without labels", size)
        self.size = size
        self._batch: Sequence[Any] | None = None
        self._has_limited = False

    def see(self, batch: Sequence[Any] | None) -> None:
        """Note the target's batch in a local step; ``None`` where it has none, or is hosted elsewhere."""
        self._batch = batch

    @contextmanager
    def limited(self, run: Run) -> Iterator[None]:
        """Shorten the step that is taken inside, if it moves the target's features by more than its share."""
        if run.clock.warming_up or run.target.labelled or not run.federation.is_local(run.target):
            yield
            return
        extractor = cast(nn.Module, run.replicas[run.target].extractor)
        before = copy_weights(extractor)
        yield
        if self._batch is not None:
            with run.trainer.precision_plugin.forward_context():
                hold_back_(extractor, before, self._batch[0], self._limit(run))
            self._has_limited |= any(param.grad is not None for param in extractor.parameters())

    def _limit(self, run: Run) -> float:
        """Share of a step in the round under way, in units of the features' spread."""
        loader = run.samples.loader
        steps = run.trainer.num_training_batches if loader is None else loader.batches_per_round
        rounds = max(1, run.clock.planned_rounds() or ENDLESS)
        return step_limit(self.size, run.clock.share_over(rounds), rounds, int(steps))

    def on_run_start(self, run: Run) -> None:
        """Forget another run."""
        self._has_limited = False

    def on_run_end(self, run: Run) -> None:
        """Warn at the target's process if no step was one that could be limited."""
        if run.federation.is_local(run.target) and not self._has_limited:
            warnings.warn(
                f"trust_region={self.size} has done nothing: it limits steps that the target takes without labels, and "
                f"{run.target.name!r} took none in {run.name}: leave it out",
                stacklevel=2,
            )


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
