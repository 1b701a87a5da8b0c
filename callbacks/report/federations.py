"""Runs of a report by federation: on the same data, of the same clients and task. Others are never compared."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from fedlit.callbacks.report.run_folder import RunFolder, as_yaml, differences

_CLASS = "data.class_path"
_DATA = "data.init_args."
_CLIENTS = "model.init_args.clients"
"""Of runs of scripts, which record less of their data."""

_SHOWN = 3
"""Most arguments in a title."""

_OF_TRAINING = frozenset(
    (
        *("target", "target_labels", "target_label_draw", "pool_sources", "batch_size", "target_batch_size"),
        *("eval_batch_size", "drop_last", "num_workers", "seed", "normalise", "statistics", "augment", "flatten"),
        *("image_size", "cache_limit_mb", "download"),
    )
)
"""Arguments of data that leave samples, labels and clients as they are: methods may differ in them on the same data."""


@dataclass(frozen=True)
class FederationRuns:
    """Runs that may be compared.

    Args:
        title: Data, and whatever else sets them apart from others in the report.
        runs: At least one.
    """

    title: str
    runs: Sequence[RunFolder]


def by_federation(runs: Sequence[RunFolder]) -> list[FederationRuns]:
    """Runs of each federation, in the order of their first run."""
    groups: dict[Hashable, list[RunFolder]] = {}
    for run in runs:
        known = {key: as_yaml(value) for key, value in facts_of(run.config).items()}
        groups.setdefault((_task(run), *sorted(known.items())), []).append(run)
    titles = _titles([group[0] for group in groups.values()])
    return [FederationRuns(title, group) for title, group in zip(titles, groups.values(), strict=True)]


def _titles(firsts: Sequence[RunFolder]) -> list[str]:
    """The data of each, and in which arguments they differ from others of the same class."""
    names = [_named(run) for run in firsts]
    titles = []
    for run, name in zip(firsts, names, strict=True):
        alike = [each for each, other in zip(firsts, names, strict=True) if other == name]
        facts = differences([facts_of(each.config) | {"task": _task(each)} for each in alike])
        here = next(position for position, each in enumerate(alike) if each is run)
        words = [f"{key.removeprefix(_DATA)}={values[here]}" for key, values in facts.items() if values[here] != "-"]
        shown = ", ".join([*words[:_SHOWN], *(["..."] if len(words) > _SHOWN else [])])
        titles.append(f"{name} ({shown})" if shown else name)
    return [title if titles.count(title) == 1 else f"{title}, {number}" for number, title in enumerate(titles, 1)]


def facts_of(config: Mapping[str, object]) -> dict[str, object]:
    """What a configuration states of data and clients, by key; what is null is as if it were not there."""
    return {
        key: value
        for key, value in config.items()
        if value is not None
        and (
            key in (_CLASS, _CLIENTS)
            or (key.startswith(_DATA) and key.removeprefix(_DATA).split(".")[0] not in _OF_TRAINING)
        )
    }


def is_regression(run: RunFolder) -> bool:
    """Whether numbers are predicted: the metrics of targets show it, whatever the configuration lacks."""
    of_numbers = any(name.endswith("/r2") for name in (*run.curves, *run.final))
    return of_numbers or (run.summary is not None and run.summary.oracle_r2 is not None)


def _task(run: RunFolder) -> str:
    return "regression" if is_regression(run) else "classification"


def _named(run: RunFolder) -> str:
    path = run.config.get(_CLASS)
    return "unknown data" if path is None else str(path).rpartition(".")[2]
