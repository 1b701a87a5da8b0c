"""Metrics that callbacks and schedules monitor: errors about missing ones, and checks of ``mode``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fedlit.checks import refuse

_OF_LIGHTNING = ("conditioned on metric", "could not find the monitored key")
"""Parts of Lightning's errors on a monitor that is not logged."""

_ADVISED = (("target/score", "max"), ("source/acc", "max"), ("source/r2", "max"), ("train/loss", "min"))
"""Metrics that most runs log and may monitor, with their mode."""

_HIGHER = re.compile(r"target/score|validator/.+|(?:.+/)?(?:acc|r2)")
_LOWER = re.compile(r"(?:.+/)?(?:loss|eval_loss)")
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
    """Raise a `ValueError` if a score is monitored with ``mode="min"``, the default, or a loss with ``"max"``."""
    watching: list[object] = [*trainer.callbacks]  # type: ignore[attr-defined]
    found = [(each, getattr(each, "monitor", None)) for each in watching]
    for config in trainer.lr_scheduler_configs:
        found.append((config.scheduler, config.monitor))
        of_clients = getattr(config.scheduler, "schedules", {}).values()  # each follows the loss of its client
        found += [(each, "loss") for each in of_clients if isinstance(each, ReduceLROnPlateau)]
    for each, monitor in found:
        mode = getattr(each, "mode", None)
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
    same = [each for each in logged if each.rpartition("/")[2] in (monitor, f"own_{monitor}")]
    near = get_close_matches(monitor, logged, 1, cutoff=0.75)
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
