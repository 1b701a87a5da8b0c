"""What an experiment asks of a site, read from its configuration before anything in it is built."""

from __future__ import annotations

from pydoc import locate
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger

from fedlit.callbacks import Artifacts, RunRecord, TargetPredictions
from fedlit.checks import check
from fedlit.privacy import Plain
from fedlit.remote.policy import Asked, Chosen, PolicyError
from fedlit.strategy import FederatedStrategy


def asked(arguments: Namespace) -> Asked:
    """What parsed arguments of ``fedlit fit`` ask for; a `PolicyError` if the strategy is another than fedlit's."""
    strategy = arguments.trainer.strategy
    by_name = strategy == "federated"
    chosen = None if isinstance(strategy, str) else _class_of(strategy)
    rule, way_out = "FederatedStrategy beside a policy", "agree on another experiment"
    check(by_name or chosen is FederatedStrategy, "strategy", rule, str(chosen or strategy), way_out, PolicyError)
    privacy, two_party = (None if by_name else strategy.init_args.get(key) for key in ("privacy", "two_party"))
    backends: dict[str, list[Chosen]] = {}
    for choice in (privacy, two_party):
        by_channel = choice if isinstance(choice, dict) else {} if choice is None else {"": choice}
        for channel, backend in by_channel.items():
            backends.setdefault(channel, []).append(_chosen(backend))
    if privacy is None:
        backends.setdefault("", []).append(Chosen(Plain, {}))
    return Asked(_class_of(arguments.model), backends, _participants(arguments.data), _exports(arguments.trainer))


def _class_of(given: Namespace) -> type:
    cls = locate(given.class_path)
    check(isinstance(cls, type), "class_path", "a class", given.class_path, "agree on another experiment", PolicyError)
    assert isinstance(cls, type)
    return cls


def _chosen(given: Namespace) -> Chosen:
    arguments = given.get("init_args") or {}
    return Chosen.of(_class_of(given), arguments.as_dict() if isinstance(arguments, Namespace) else dict(arguments))


def _participants(data: Namespace) -> int | None:
    """How many clients a configuration names; ``None`` if the data have to be seen."""
    init_args = data.get("init_args") or {}
    for key in ("clients", "files"):
        names = init_args.get(key)
        if isinstance(names, list | dict | Namespace):
            return len(vars(names) if isinstance(names, Namespace) else names)
    return None


def _exports(trainer: Namespace) -> dict[str, str]:
    exports = {}
    for each in _listed(trainer.get("callbacks")):
        cls = _class_of(each)
        if issubclass(cls, RunRecord) and (each.get("init_args") or {}).get("export") is not None:
            exports["model"] = "export of RunRecord"
        if issubclass(cls, TargetPredictions):
            exports["predictions"] = cls.__name__
        if issubclass(cls, Artifacts):
            given = each.get("init_args") or {}
            exports |= {name: cls.__name__ for name in ("model", "predictions") if given.get(name, True)}
    for each in _listed(trainer.get("logger")):
        if not issubclass(_class_of(each), CSVLogger):
            exports["loggers"] = _class_of(each).__name__
    return exports


def _listed(given: Any) -> list[Namespace]:
    """Objects of the Trainer that a configuration has at a key, which may be one, several, true, false or null."""
    return [each for each in (given if isinstance(given, list) else [given]) if isinstance(each, Namespace)]
