"""Trust region: a limit on how far an unlabelled target moves its features.

Adam's steps do not shrink with the weight of a loss, and move features in proportion to the length of inputs, so only
the movement of the features themselves can be bounded for any optimiser and scale.
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
"""Rounds assumed for a run without a planned end."""


class TrustRegion(Component):
    """Limit how far a target that trains without labels moves its features in all steps after the warm-up.

    Args:
        size: In units of the features' spread, positive; refused in methods where it would do nothing.
        run: Of the target.
    """

    def __init__(self, size: float, run: Run) -> None:
        check_positive("trust_region", size, "it is in units of the features' spread; null is no limit")
        if not run.requires.unlabelled_target:
            refuse("trust_region", f"left out in {run.name}, whose target does not train without labels", size)
        self.size = size
        self._batch: Sequence[Any] | None = None
        self._has_limited = False

    def see(self, batch: Sequence[Any] | None) -> None:
        """Note the target's batch in a local step; ``None`` if it has none here."""
        self._batch = batch

    @contextmanager
    def limited(self, run: Run) -> Iterator[None]:
        """Shorten the step that is taken inside, if it exceeds its share."""
        if run.clock.warming_up or run.uses_target_labels or not run.federation.is_local(run.target):
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
        """Return the limit of a step in the current round, in units of the features' spread."""
        rounds = max(1, run.clock.planned_rounds() or ENDLESS)
        return step_limit(self.size, run.clock.share_over(rounds), rounds, run.clock.batches_in())

    def on_run_start(self, run: Run) -> None:
        """Forget another run."""
        self._has_limited = False

    def on_run_end(self, run: Run) -> None:
        """Warn at the target's process if no step could be limited."""
        if run.federation.is_local(run.target) and not self._has_limited:
            warnings.warn(
                f"trust_region={self.size} has done nothing: it limits steps that the target takes without labels, and "
                f"{run.target.name!r} took none in {run.name}: leave it out",
                stacklevel=2,
            )


def step_limit(trust_region: float, progress: float, rounds: int, steps: int) -> float:
    """Return the share of a trust region for one of ``steps`` steps in a round, in units of the features' spread.

    Shares fall by `annealing` over the rounds and add up to the whole; ``progress`` goes from 0 to 1.
    """
    total = math.fsum(annealing(each / rounds) for each in range(rounds))
    return trust_region * annealing(progress) / (total * steps)


def copy_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return copies of a network's trained weights, by name."""
    return {name: param.detach().clone() for name, param in network.named_parameters() if param.requires_grad}


@torch.no_grad()
def hold_back_(network: nn.Module, before: Mapping[str, Tensor], inputs: Inputs, limit: float) -> None:
    """Shorten a network's step from the weights ``before`` in proportion if it moves features of inputs over a limit.

    The distance is the norm of the features' changes over that of their deviations from their mean, in evaluation mode.
    It is exact for a network that is linear in its weights. A single sample has no spread, and no limit.
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
