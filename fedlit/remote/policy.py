"""A site's policy: what it takes part in, in a file at the site that no experiment can change."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc import locate
from typing import TYPE_CHECKING, Any

import yaml

from fedlit.checks import ArgumentError, check, check_at_least, check_one_of
from fedlit.federation.channel import Summed

if TYPE_CHECKING:
    from fedlit.run.run import Run

EXPORTS = ("model", "predictions", "loggers")
"""What a run may write beside its folder: the target's model in a format without fedlit (``export`` of `RunRecord`),
predictions (`TargetPredictions` in its configuration), and numbers to loggers other than CSV files."""

REFUSED = 77
"""Exit code of a process that has refused by its policy."""


class PolicyError(ArgumentError):
    """An experiment asks for what a site's policy does not have, or the policy is none."""

    says_what_to_do = True
    public = "the policy of this site refuses the experiment: its own output says why"


@dataclass(frozen=True)
class Chosen:
    """A class that a configuration names, with arguments that are not their defaults; ``None`` if unknown."""

    cls: type
    arguments: Mapping[str, Any] | None = None

    def is_named(self, name: str) -> bool:
        """Whether this is the class of fedlit of a name, or the class at a path with dots."""
        if "." in name:
            return locate(name) is self.cls
        return name == self.cls.__name__ and self.cls.__module__.startswith("fedlit.")

    def fits(self, entry: str | Mapping[str, Any]) -> bool:
        """Whether an entry of a policy allows it: a name with default arguments, or a mapping with others."""
        name, arguments = (entry, {}) if isinstance(entry, str) else (entry["class_path"], entry.get("init_args") or {})
        return self.is_named(name) and self.arguments in (None, arguments)

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in (self.arguments or {}).items())
        return self.cls.__name__ + (f"({given})" if given else "")

    @classmethod
    def of(cls, of: type, arguments: Mapping[str, Any]) -> Chosen:
        """Leave arguments out that are the defaults of a class."""
        defaults = inspect.signature(of).parameters
        others = {k: v for k, v in arguments.items() if k not in defaults or defaults[k].default != v}
        return cls(of, others)


@dataclass(frozen=True)
class Asked:
    """What an experiment asks of a site, as far as it is known.

    Args:
        method: Its class.
        backends: What hides messages, by channel; ``""`` is for all channels that are not named.
        participants: Number of clients; ``None`` if it is not known yet.
        exports: Keys of the configuration that ask for one of `EXPORTS`, by that.
    """

    method: type
    backends: Mapping[str, Sequence[Chosen]]
    participants: int | None = None
    exports: Mapping[str, str] = field(default_factory=dict)


class Policy:
    """What a site takes part in; ``None`` and keys that are left out allow everything.

    Classes are named as in a configuration: those of fedlit by their names, others by paths with dots.

    Args:
        methods: Of the classes of methods.
        backends: Of privacy backends and two-party protocols, ``Plain`` and ``PlainAffine`` included where messages
            may be in plaintext: one list for all channels, or a list by channel, where channels that are not named are
            refused. A name stands for the class with its default arguments; others are in a mapping,
            ``{class_path: PairwiseMasking, init_args: {threshold: 3}}``.
        min_participants: Least number of clients of the federation, this site's included.
        exports: Of ``model``, ``predictions`` and ``loggers``.
        path: Of the file, for errors.

    Raises:
        PolicyError: If a key has another type or value.
    """

    def __init__(
        self,
        methods: list[str] | None = None,
        backends: list[Any] | dict[str, list[Any]] | None = None,
        min_participants: int | None = None,
        exports: list[str] | None = None,
        path: str = "policy",
    ) -> None:
        self.path, way_out = path, f"mend {path}"
        for key, names in {"methods": methods, "exports": exports}.items():
            check(names is None or isinstance(names, list), key, "a list of names", names, way_out, PolicyError)
            for name in names or ():
                check(isinstance(name, str), key, "a list of names", name, way_out, PolicyError)
        lists = [*backends.values()] if isinstance(backends, dict) else [] if backends is None else [backends]
        for each in lists:
            rule = "a list of classes, or a list for each channel"
            check(isinstance(each, list), "backends", rule, backends, way_out, PolicyError)
            for entry in each:
                rule = "names of classes, or mappings of class_path and init_args"
                check(_is_class(entry), "backends", rule, entry, way_out, PolicyError)
        for name in exports or ():
            check_one_of("exports", name, EXPORTS, way_out, PolicyError)
        if min_participants is not None:
            whole = isinstance(min_participants, int) and not isinstance(min_participants, bool)
            check(whole, "min_participants", "a whole number", min_participants, way_out, PolicyError)
            check_at_least("min_participants", min_participants, 1, "client", way_out, PolicyError)
        self.methods, self.backends, self.min_participants, self.exports = methods, backends, min_participants, exports

    @classmethod
    def read(cls, path: str | Path) -> Policy:
        """Read a file; a `PolicyError` if it is missing, or no policy: then this site takes part in nothing."""
        keys = [name for name in inspect.signature(cls).parameters if name != "path"]
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            check(False, "policy", "a file in YAML", str(path), f"{type(error).__name__}: mend it", PolicyError)
        check(
            isinstance(content, dict) and bool(content),
            "policy",
            f"a mapping with some of {keys}",
            str(path),
            "mend it",
            PolicyError,
        )
        for key, value in content.items():
            check_one_of("policy", key, keys, f"mend {path}", PolicyError)
            check(value is not None, key, "given or left out", value, f"mend {path}: [] is none", PolicyError)
        return cls(**content, path=str(path))

    def check(self, asked: Asked) -> None:
        """Raise a `PolicyError` where an experiment asks for what this policy does not have."""
        way_out = f"agree on another experiment, or change {self.path}"
        if self.methods is not None:
            method = Chosen(asked.method)
            allowed = any(map(method.is_named, self.methods))
            check(allowed, "methods", f"one of {self.methods}", str(method), way_out, PolicyError)
        for channel, chosen in asked.backends.items():
            for each in chosen:
                self._check_backend(channel, each, way_out)
        if self.min_participants is not None and asked.participants is not None:
            number = self.min_participants
            check_at_least("min_participants", asked.participants, number, "clients", way_out, PolicyError)
        for export, key in asked.exports.items():
            allowed = self.exports is None or export in self.exports
            check(allowed, "exports", f"among {self.exports}", export, f"leave {key} out, or {way_out}", PolicyError)

    def _check_backend(self, channel: str, chosen: Chosen, way_out: str) -> None:
        if self.backends is None:
            return
        entries = self.backends
        if isinstance(entries, dict):
            if channel:
                check(channel in entries, "backends", f"of the channels {[*entries]}", channel, way_out, PolicyError)
            by_channel = [entries[channel]] if channel else entries.values()  # a choice for all is for some of them
            entries = [entry for each in by_channel for entry in each]
        rule = f"one of {entries}" + (f" over channel {channel!r}" if channel else "")
        check(any(map(chosen.fits, entries)), "backends", rule, str(chosen), way_out, PolicyError)

    def check_run(self, run: Run, **choices: Any) -> None:
        """`check` a run that is built, by the channels that it declares; ``choices`` as of `FederatedStrategy`."""
        backends: dict[str, list[Chosen]] = {}
        for name, each in run.make_federation(**choices).channels.items():
            if isinstance(each.declared, Summed):
                backends[name] = [Chosen(type(each.backend))]
            elif each.protocol is not None:
                backends[name] = [Chosen(type(each.protocol))]
        self.check(Asked(type(run.module), backends, len(run.clients)))


def _is_class(entry: object) -> bool:
    """Whether an entry of ``backends`` names a class."""
    if not isinstance(entry, dict):
        return isinstance(entry, str)
    arguments = entry.get("init_args") or {}
    return (
        {*entry} <= {"class_path", "init_args"}
        and isinstance(entry.get("class_path"), str)
        and isinstance(arguments, dict)
    )
