"""Checks of a Trainer for what does not go with rounds."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.trainer.states import TrainerFn

from fedlit.checks import refuse

_AVERAGES = (
    "averages weights of local steps, and ends with clients whose models differ where the method has made them equal; "
    "its checkpoint keeps all clients' weights under no client's name"
)
_INSTEAD = (
    "leave it out, as rounds average clients' weights, and let an lr_scheduler lower the rates of the last rounds"
)

REFUSED: Mapping[str, tuple[str, str]] = {
    "WeightAveraging": (_AVERAGES, _INSTEAD),
    "StochasticWeightAveraging": (
        "has one schedule of its own in place of the clients', adds an epoch without training where there is "
        "BatchNorm, and keeps all clients' weights under no client's name in checkpoints",
        _INSTEAD,
    ),
    "LearningRateFinder": (
        "tries rates on steps without rounds, in which clients exchange nothing, by the sum of local clients' losses",
        "run short trainings with several rates, such as a sweep, and compare target/score or source/acc",
    ),
    "BatchSizeFinder": (
        "tries sizes on steps without rounds, in which clients exchange nothing",
        "give the data module's batch_size, and try whether it fits with Trainer(fast_dev_run=True)",
    ),
    "ModelPruning": (
        "masks weights of all clients together, each client's by other masks, and of networks that are not built yet",
        "prune the network that is given to the method, before the run or after it",
    ),
    "BackboneFinetuning": (
        "unfreezes an attribute 'backbone' of the module, which has a network for each client",
        "freeze the extractor (requires_grad_(False)), or give its weights another rate with param_groups",
    ),
}
"""Lightning's callbacks by name, with their effect on a federation and the way out."""

_WHILE_FITTING = ("WeightAveraging", "StochasticWeightAveraging", "ModelPruning", "BackboneFinetuning")
"""Those that do nothing in evaluation."""


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse another strategy for several processes, and callbacks that do not go by rounds.

    Raises:
        ValueError: On every process, before anything is trained.
    """
    strategy = trainer.strategy
    if trainer.world_size > 1 and not hasattr(strategy, "federation"):
        rule = f"a FederatedStrategy on {trainer.world_size} processes, each of which would train all clients"
        way_out = "give Trainer(strategy=FederatedStrategy()), or devices=1 and num_nodes=1"
        refuse("strategy", rule, strategy, way_out, shown=type(strategy).__name__)
    if getattr(trainer._accelerator_connector, "_layer_sync", None) is not None:
        rule = "False, as it takes statistics over samples of clients on several processes"
        refuse("sync_batchnorm", rule, True, "batchnorm_average sets how statistics of clients are averaged")
    for callback in list(trainer.callbacks):  # type: ignore[attr-defined]
        for name, (why, instead) in REFUSED.items():
            kind = getattr(callbacks, name, None)  # Lightning 2.5 lacks some
            if kind is None or not isinstance(callback, kind):
                continue
            if name in _WHILE_FITTING and trainer.state.fn != TrainerFn.FITTING:
                continue
            if getattr(callback, "_early_exit", False):  # a Tuner's, which would leave it in the Trainer
                trainer.callbacks.remove(callback)  # type: ignore[attr-defined]
            name = type(callback).__name__
            refuse("callbacks", f"without {name}, which {why}", callback, instead, shown=name)
