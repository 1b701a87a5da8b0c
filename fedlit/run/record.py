"""Record of the run's plan and of losses and gradient norms in the current round."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedlit.federation import Channel, RosterError
from fedlit.federation.metrics import METRICS
from fedlit.run.component import Component

if TYPE_CHECKING:
    from fedlit.run.run import Run


TENFOLD = 10
"""Ratio of a client's numbers of samples in two runs beyond which it is named."""


class RoundRecord(Component):
    """Losses of local clients in the steps of a round so far, and norms of their gradients.

    Attributes:
        plan: Plan of the run, equal on all processes; ``None`` before.
        steps: By step, names of the clients that trained, and their losses.
        norms: By client, gradient norms before clipping.
        graphs: Clients with a loss in the round that depends on trained weights.
        trains: Whether a loss of the last step does.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.plan: dict[str, Any] | None = None
        self._planned = False  # whether the plan is that of a checkpoint
        self.steps: list[tuple[list[str], Tensor]] = []
        self.norms: dict[str, list[Tensor]] = {}
        self.graphs: set[str] = set()
        self.trains = False
        self._resumed: list[tuple[list[str], Tensor]] = []

    def plan_(self, plan: dict[str, Any]) -> None:
        """Note the plan of a run; a `RosterError` if it continues a checkpoint of other data or rounds.

        A client whose number of samples is ten times that of an earlier run of this process, or a tenth, is named.
        """
        saved, self.plan = self.plan, plan
        before = {} if saved is None else saved
        changed = {key: (before[key], new) for key, new in plan.items() if before.get(key, new) != new}
        if self._planned and changed:
            detail = ", ".join(f"{name} was {before} and is {now}" for name, (before, now) in changed.items())
            raise RosterError(
                f"the checkpoint cannot go on with other data or rounds: {detail}. Give the same seed, data, strategy"
            )
        for name, samples in before.get("samples", {}).items():
            now = plan["samples"].get(name, samples)
            if max(samples, now) > TENFOLD * min(samples, now):
                warnings.warn(
                    f"client {name!r} has {now} training samples, and had {samples} in the run before this one: it "
                    "counts in means by them, unless weighting is 'uniform'",
                    stacklevel=2,
                )
        self._planned = False

    def check_plan(self, servers: dict[str, Any] | None) -> None:
        """Raise a `RosterError` if a site returns with other data or rounds than the run has."""
        if servers != self.plan:
            raise RosterError(
                f"this site comes back with other data or rounds than it left: {self.plan}, and the run has {servers}"
            )

    @property
    def resumes(self) -> bool:
        """Whether the run that is planned next continues a checkpoint."""
        return self._planned

    def of_checkpoint(self, name: str) -> Any:
        """Return an entry of the resumed checkpoint's plan; ``None`` without one."""
        return (self.plan or {}).get(name) if self._planned else None

    def start_run_(self) -> None:
        """Forget another run; continue in the round of a checkpoint if there was one."""
        self.steps, self._resumed = self._resumed, []
        self.norms.clear()

    def start_round_(self) -> None:
        """Forget the round before."""
        self.steps.clear()
        self.norms.clear()
        self.graphs.clear()

    def add_(self, losses: Mapping[str, Tensor], goes_on: bool = False) -> Tensor:
        """Note the losses of a step, none too, after which no schedule advances; return their sum so far, a scalar.

        ``goes_on`` is with those of other clients, which were noted before.
        """
        self.graphs.update(name for name, loss in losses.items() if loss.requires_grad)
        stacked = torch.stack(list(losses.values())) if losses else torch.zeros(0)
        self.trains = stacked.requires_grad or (goes_on and self.trains)
        names, before = self.steps.pop() if goes_on else ([], torch.zeros(0))
        if not names or not losses:
            self.steps.append(([*names, *losses], before if names else stacked.detach()))
            return before.sum() if names else stacked.sum()
        self.steps.append(([*names, *losses], torch.cat([before, stacked.detach()])))
        return before.sum() + stacked.sum()

    def add_norms_(self, norms: Mapping[str, Tensor]) -> None:
        """Note norms of gradients."""
        for name, norm in norms.items():
            self.norms.setdefault(name, []).append(norm)

    def losses(self) -> dict[str, list[float]]:
        """Return losses by client, in the order of its steps."""
        found: dict[str, list[float]] = {}
        for names, values in self.steps:
            for name, value in zip(names, values.tolist(), strict=True):
                found.setdefault(name, []).append(value)
        return found

    def mean_losses(self) -> dict[str, float]:
        """Return each local client's training loss in the round, the mean over its steps."""
        return {name: math.fsum(values) / len(values) for name, values in self.losses().items()}

    # ---------------------------------------------------------------- a component

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The numbers that clients report."""
        return (METRICS,)

    def client_state(self, client: str) -> dict[str, Any]:
        """Return a client's losses in a round that a checkpoint is written within."""
        steps = self.steps if self._run.clock.step else []
        return {"losses": [float(values[names.index(client)]) for names, values in steps if client in names]}

    def public_state(self) -> dict[str, Any]:
        """Return the plan."""
        return {"plan": self.plan}

    def load_state(self, clients: Mapping[str, Mapping[str, Any]], public: Mapping[str, Any], resumes: bool) -> None:
        """Restore the plan, which the resumed run must have, and losses for the run that starts next."""
        if not resumes:
            return
        self.plan = public["plan"]
        self._planned = self.plan is not None
        for name, state in clients.items():
            self._resumed += [([name], torch.tensor([value])) for value in state["losses"]]
