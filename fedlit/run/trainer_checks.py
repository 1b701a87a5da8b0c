"""Checks of a Trainer: of what does not go with rounds, and of the metrics that its callbacks monitor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fedlit.checks import refuse
from fedlit.federation import ChannelError, LabelGuardError

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


def check_trainer(trainer: Trainer) -> None:
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


_ORACLE = "oracle/"
"""Prefix of the names of numbers that read hidden labels of the target."""

_REPORTED = ("train/", "source/", "target/", "validator/", _ORACLE)
"""Prefixes of the names of numbers that clients report."""


def check_reported(trainer: Trainer) -> None:
    """Raise a `ChannelError` if a callback would wait for numbers that clients do not report."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and monitor.startswith(_REPORTED):
            raise ChannelError(
                f"{type(callback).__name__}(monitor={monitor!r}) needs numbers that clients do not report beside "
                "differential_privacy: monitor nothing, or give the strategy reports=GaussianMechanism(...), which "
                "adds noise that is accounted for, or reports='exact', which is beside all guarantees"
            )


_OF_LIGHTNING = ("conditioned on metric", "could not find the monitored key")
"""Parts of Lightning's errors on a monitor that is not logged."""

_ADVISED = (("target/score", "max"), ("source/acc", "max"), ("source/r2", "max"), ("train/loss", "min"))
"""Metrics that most runs log and may monitor, with their mode."""

_HIGHER = re.compile(r"target/score|validator/.+|(?:.+/)?(?:acc|r2|auroc)|source/[^/]+/r2/.+")
_LOWER = re.compile(r"(?:.+/)?(?:loss|eval_loss|rmse|mae)|source/[^/]+/(?:rmse|mae)/.+")
"""Metrics that are better the lower."""

_MOST = 6
"""Maximum number of proposed names."""

EXPLAINED = "says_what_to_do"
"""Attribute of an error whose message already states the way out."""


def explain_monitor(trainer: Trainer, module: LightningModule, error: BaseException) -> None:
    """Rewrite the message of Lightning's error on a monitor that is not logged, and keep its type.

    The module's ``monitor_hint`` is added; errors of other causes stay as they are.
    """
    text = str(error)
    if not isinstance(error, RuntimeError | MisconfigurationException) or not any(
        word in text for word in _OF_LIGHTNING
    ):
        return
    logged = [str(name) for name in trainer.callback_metrics]
    callbacks: list[object] = trainer.callbacks  # type: ignore[attr-defined]
    monitors = [(type(each).__name__, getattr(each, "monitor", None)) for each in callbacks]
    monitors += [(type(each.scheduler).__name__, each.monitor) for each in trainer.lr_scheduler_configs]
    for name, monitor in monitors:
        if isinstance(monitor, str) and monitor not in logged and monitor in text:
            error.args = (_explained(name, monitor, logged, str(getattr(module, "monitor_hint", ""))),)
            setattr(error, EXPLAINED, True)
            return


def check_modes(trainer: Trainer) -> None:
    """Refuse to monitor the target's labels, or a score with ``mode="min"``, the default, or a loss with ``"max"``.

    Raises:
        LabelGuardError: Of an ``oracle/`` metric.
        ValueError: Of another mode.
    """
    watching: list[object] = [*trainer.callbacks]  # type: ignore[attr-defined]
    found = [(each, getattr(each, "monitor", None)) for each in watching]
    for config in trainer.lr_scheduler_configs:
        found.append((config.scheduler, config.monitor))
        of_clients = getattr(config.scheduler, "schedules", {}).values()  # each follows the loss of its client
        found += [(each, "loss") for each in of_clients if isinstance(each, ReduceLROnPlateau)]
    for each, monitor in found:
        mode = getattr(each, "mode", None)
        if isinstance(monitor, str) and monitor.startswith(_ORACLE):
            raise LabelGuardError(
                f"{type(each).__name__}(monitor={monitor!r}) would select by the target's hidden labels, which no "
                "federation has: monitor 'target/score' (label-free, mode='max') or a metric of the sources, such as "
                "'source/acc' (mode='max'), instead"
            )
        if isinstance(monitor, str) and mode in ("min", "max") and mode != (best_mode(monitor) or mode):
            other = best_mode(monitor)
            better = "higher" if other == "max" else "lower"  # without mode it is 'min'
            rule = f"{other!r} in {type(each).__name__}(monitor={monitor!r}), which is the better the {better}"
            refuse("mode", rule, mode, "the worst round would be taken for the best")


def best_mode(metric: str) -> str | None:
    """Return ``"max"`` or ``"min"`` for a metric whose name shows which values are better, else ``None``."""
    return "max" if _HIGHER.fullmatch(metric) else "min" if _LOWER.fullmatch(metric) else None


def _explained(name: str, monitor: str, logged: Sequence[str], hint: str) -> str:
    """Compose the message: the missing monitor, what may be meant, and what is logged."""
    open_to_all = [each for each in logged if not each.startswith(_ORACLE)]
    same = [each for each in open_to_all if each.endswith((f"/{monitor}", f"/own_{monitor}"))]
    near = get_close_matches(monitor, open_to_all, 1, cutoff=0.75)
    advised = [f"{each!r} (mode={mode!r})" for each, mode in _ADVISED if each in logged]
    if same:
        advice = f"monitor one of {', '.join(map(repr, same[:_MOST]))}{', ...' if len(same) > _MOST else ''}."
    elif near:
        advice = f"did you mean {near[0]!r}?"
    else:
        advice = f"monitor {' or '.join(advised) or 'something that is logged'}."
    there = f"There are {', '.join(_shortened(logged)) or 'none so far'}"
    problem = f"{name}(monitor={monitor!r}) needs a number that this run does not log"
    return f"{problem}: {' '.join(filter(None, (advice, hint, there)))}"


def _shortened(names: Iterable[str]) -> list[str]:
    """Merge the metrics of all sources into one name."""
    return list(dict.fromkeys(re.sub(r"^source/[^/]+/", "source/NAME/", name) for name in names))
