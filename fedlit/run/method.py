"""What rounds and evaluation ask of the module that they train: `FederatedModule` is one, and documents each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from fedlit.federation import Client, Federation
from fedlit.run.record import RoundRecord
from fedlit.run.replicas import Replicas, SharedWeights
from fedlit.run.tasks import Classification, Regression


class Method(Protocol):
    """A method, as far as its training is concerned."""

    uses_unlabelled_target: ClassVar[bool]
    needs_target_labels: ClassVar[bool]
    trains_when_absent: ClassVar[bool]
    statistics_stand_still: ClassVar[bool]
    matches_distributions: ClassVar[bool]
    trains_sources: ClassVar[bool]
    adaptation_weight: ClassVar[str]
    automatic_optimization: bool
    clients: tuple[Client, ...]
    target: Client
    originals: tuple[nn.Module, nn.Module]
    task: Classification | Regression
    scale_labels: bool
    local_norm: bool
    optimizer: OptimizerCallable
    param_groups: list[dict[str, Any]] | None
    reset_optimizer: bool
    trust_region: float | None
    held_back: bool
    warmup: int | float
    warmup_rounds: int
    refine: bool | Literal["network"]
    vectorize: bool
    target_temperature: float
    shared: SharedWeights
    record: RoundRecord
    _trainer: pl.Trainer | None

    @property
    def replicas(self) -> Replicas[nn.Module]: ...

    @property
    def federation(self) -> Federation: ...

    @property
    def sources(self) -> tuple[Client, ...]: ...

    @property
    def own_labels(self) -> bool: ...

    @property
    def warming_up(self) -> bool: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def trainer(self) -> pl.Trainer: ...

    def build_replica(self) -> nn.Module: ...

    def build_target(self, replica: Any) -> nn.Module: ...

    def planned_rounds(self) -> int | None: ...

    def learners(self, round_idx: int) -> tuple[Client, ...]: ...

    def on_round_start(self, round_idx: int) -> None: ...

    def on_round_end(self, round_idx: int) -> None: ...

    def close_run(self, round_idx: int) -> None: ...

    def public_state(self) -> Any: ...

    def welcome_(self, state: Any, back: Collection[str]) -> None: ...

    def average_warmup_(self) -> None: ...

    def load_shared_(self, received: Mapping[str, Mapping[str, Tensor]]) -> None: ...

    def prepare_predictions(self) -> None: ...

    def can_predict(self, client: Client) -> bool: ...

    def log_everywhere(self, metrics: Mapping[str, float]) -> None: ...


def metric_names(method: Method, reported: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Numbers of clients by the names under which they are logged: ``source/NAME/...`` and ``target/...``."""
    return {
        f"{'target' if client == method.target.name else f'source/{client}'}/{name}": value
        for client, row in reported.items()
        for name, value in row.items()
    }
