"""Declarations of a method, and options of local training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable

from fedlit.checks import check, check_one_of
from fedlit.federation import Everyone, Participation
from fedlit.federation.labels import TaskName
from fedlit.run.param_groups import check_param_groups


@dataclass(frozen=True)
class Requires:
    """Requirements of a method for a run, and its use of the target.

    Args:
        target_labels: It needs labels of the target; a run without them is refused at its start.
        unlabelled_target: The target trains on its unlabelled samples too, rather than on labelled ones alone.
        tasks: Tasks that it can be trained for.
        class_weights: Its loss is that of its task, in which classes can have weights.
        sources: Sources train; otherwise the target does alone, standardises labels by its own, and sends nothing.
        matches_distributions: It aligns the features of all clients whatever their classes; a run warns at its start if
            sources have unequal class shares.
        trains_on_information: Its loss has the certainty or diversity of the target's predictions, so that scores of
            these do not rank it. The name of an argument: if that is not ``None``.
        changes_at_end: The target's model changes when the run ends, so that only the last round's is the method's.
        adaptation_weight: Name of the argument that weighs the adaptation; the warning of a collapse mentions it.
        participation: Clients that are present in a round, unless the strategy sets another rule.
        trains_when_absent: Absent clients go on training, without messages.
        ignores_target_labels: It makes nothing of labels of the target; a run with some warns at its start.
    """

    target_labels: bool = False
    unlabelled_target: bool = False
    tasks: tuple[TaskName, ...] = ("classification", "regression")
    class_weights: bool = True
    sources: bool = True
    matches_distributions: bool = False
    trains_on_information: bool | str = False
    changes_at_end: bool = False
    adaptation_weight: str = ""
    participation: Participation = field(default_factory=Everyone)
    trains_when_absent: bool = False
    ignores_target_labels: bool = False

    @property
    def adapts(self) -> bool:
        """Whether rounds need the target's samples, so that there is none without it."""
        return self.target_labels or self.unlabelled_target


@dataclass(frozen=True)
class ReplicaSpec:
    """How a client's replica is trained, and which of its weights leave the client.

    Args:
        local: Prefixes of names in its state that never leave the client.
        apart: Why extractor and classifier can share no weight, where they are trained or sent separately.
        several_models: Its parameter groups are different models, whose gradients are clipped separately.
        own_rates: Parts that the method steps without the optimiser, each with the argument that is its rate.
        frozen_statistics: BatchNorm is in evaluation mode after a warm-up, so that it takes batches of one sample.
    """

    local: tuple[str, ...] = ()
    apart: str = ""
    several_models: bool = False
    own_rates: Mapping[str, str] = field(default_factory=dict)
    frozen_statistics: bool = False


@dataclass(frozen=True)
class LocalTraining:
    """How clients take local steps; arguments are those of `FederatedModule`."""

    optimizer: OptimizerCallable
    param_groups: list[dict[str, Any]] | None
    reset_optimizer: bool
    lr_scheduler: LRSchedulerCallable | None
    schedule_interval: Literal["round", "step"]
    vectorize: bool
    recompute: bool

    def check(self, clients: Iterable[str], own_rates: Mapping[str, str], method: str) -> None:
        """Refuse arguments that do not fit these clients and this method.

        Raises:
            TypeError: If ``optimizer`` or ``lr_scheduler`` is no function.
            ValueError: If another argument is out of range, or an entry of ``param_groups`` would do nothing.
        """
        check_one_of("schedule_interval", self.schedule_interval, ("round", "step"))
        check_param_groups(self.param_groups, list(clients), own_rates, method)
        makers: Sequence[tuple[str, Callable[..., object] | None, str]] = (
            ("optimizer", self.optimizer, "torch.optim.Adam, lr=0.001"),
            ("lr_scheduler", self.lr_scheduler, "StepLR, step_size=10"),
        )
        for name, function, example in makers:
            if function is not None or name == "optimizer":
                rule = f"a function that makes one, such as functools.partial({example})"
                check(callable(function), name, rule, function, error=TypeError)
