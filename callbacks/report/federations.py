"""Runs of a report by federation, that is with the same data, clients and task: others are never compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fedlit.callbacks.report.run_folder import RunFolder, as_yaml, differences
from fedlit.callbacks.shared import grouped

_CLASS = "data.class_path"
_DATA = "data.init_args."
_CLIENTS = "model.init_args.clients"
"""In runs of scripts, which record less of their data."""

_IN_TITLE = 3
"""Maximum number of arguments in a title."""

_IN_LABEL = 3
"""Maximum number of keys in a label; runs that differ in more are labelled by their folders."""

_OF_TRAINING = frozenset(
    (
        *("target", "target_labels", "target_label_draw", "pool_sources", "batch_size", "target_batch_size"),
        *("eval_batch_size", "drop_last", "num_workers", "seed", "normalise", "statistics", "augment", "flatten"),
        *("image_size", "cache_limit_mb", "download"),
    )
)
"""Arguments of data that leave samples, labels and clients as they are: methods may differ in them on the same data."""

_SAME_METHOD = re.compile(
    r"seed_everything$|seeds|targets|compare|select|jobs|fresh|seat|config$|ckpt_path|data\.init_args\.target$|model\.init_args\.teacher$"
    r"|trainer\.(default_root_dir|logger|enable_progress_bar)"
)
"""Keys in which repetitions of one method differ."""


@dataclass(frozen=True)
class FederationRuns:
    """Runs that may be compared."""

    title: str  # the data, and what distinguishes this federation from others in the report
    runs: Sequence[RunFolder]  # at least one, with labels
    number: int | None = None  # from 1 in a report on several federations; ``None`` for the only one

    @property
    def suffix(self) -> str:
        """Of headings."""
        return "" if self.number is None else f": {self.title}"

    @property
    def prefix(self) -> str:
        """Of file names."""
        return "" if self.number is None else f"federation-{self.number}_"

    @property
    def targets(self) -> list[str]:
        """In the order of the runs."""
        return list(dict.fromkeys(run.target for run in self.runs))


def by_title(runs: Iterable[RunFolder]) -> dict[str, list[RunFolder]]:
    """Runs by their names in tables."""
    return grouped(runs, lambda run: run.title)


def by_federation(runs: Sequence[RunFolder]) -> list[FederationRuns]:
    """Runs of each federation, labelled, in the order of their first run."""
    groups = grouped(
        runs, lambda run: (_task(run), *sorted((key, as_yaml(each)) for key, each in facts_of(run.config).items()))
    )
    titles = _titles([group[0] for group in groups.values()])
    return [
        FederationRuns(title, labelled(group), number if len(groups) > 1 else None)
        for number, (title, group) in enumerate(zip(titles, groups.values(), strict=True), 1)
    ]


def _titles(firsts: Sequence[RunFolder]) -> list[str]:
    """The data of each, and in which arguments they differ from others of the same class."""
    names = [str(run.config.get(_CLASS, "unknown data")).rpartition(".")[2] for run in firsts]
    titles = []
    for run, name in zip(firsts, names, strict=True):
        alike = [each for each, other in zip(firsts, names, strict=True) if other == name]
        facts = differences([facts_of(each.config) | {"task": _task(each)} for each in alike])
        here = next(position for position, each in enumerate(alike) if each is run)
        texts = [f"{key.removeprefix(_DATA)}={values[here]}" for key, values in facts.items() if values[here] != "-"]
        shown = ", ".join([*texts[:_IN_TITLE], *(["..."] if len(texts) > _IN_TITLE else [])])
        titles.append(f"{name} ({shown})" if shown else name)
    return [title if titles.count(title) == 1 else f"{title}, {number}" for number, title in enumerate(titles, 1)]


def facts_of(config: Mapping[str, object]) -> dict[str, object]:
    """What a configuration states of data and clients, by key; a null value counts as missing."""
    return {
        key: value
        for key, value in config.items()
        if value is not None
        and (
            key in (_CLASS, _CLIENTS)
            or (key.startswith(_DATA) and key.removeprefix(_DATA).split(".")[0] not in _OF_TRAINING)
        )
    }


def _task(run: RunFolder) -> str:
    return "regression" if run.is_regression else "classification"


def labelled(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """The runs with labels that distinguish the settings of one method.

    Where a method's runs differ in more than target and seed, as in a sweep, its name is followed by what differs, or,
    where that is much, by the first folder of the setting. Runs that are equal in target and seed, too, are labelled by
    their folders, or else they would count as repetitions.
    """
    labels: dict[str, str] = {}
    for method in dict.fromkeys(run.method for run in runs):
        same = [run for run in runs if run.method == method]
        facts = differences(
            [
                {k: v for k, v in run.config.items() if not _SAME_METHOD.match(k)} or {"rounds": run.num_rounds}
                for run in same
            ]
        )
        much = len(facts) > _IN_LABEL
        settings: list[tuple[str, ...]] = [
            tuple(f"{key.rsplit('.', 1)[-1]}={values[place]}" for key, values in facts.items())
            for place in range(len(same))
        ]
        if much:
            first = {setting: run.name for setting, run in reversed([*zip(settings, same, strict=True)])}
            settings = [(f"as {first[setting]}",) for setting in settings]
        times = Counter((setting, run.target, run.seed) for setting, run in zip(settings, same, strict=True))
        repeated = {setting for (setting, *_), number in times.items() if number > 1}
        for setting, run in zip(settings, same, strict=True):
            shown = setting
            if setting in repeated:
                shown = (f"as {run.name}",) if much else (*setting, run.name)
            labels[run.name] = f"{method} ({', '.join(shown)})" if shown else method
    return [replace(run, label=labels[run.name]) for run in runs]
