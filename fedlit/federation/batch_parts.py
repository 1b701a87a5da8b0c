"""Batches of any structure: which part is the label, which the inputs, and the whole as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

from fedlit.checks import refuse
from fedlit.federation.errors import SampleError
from fedlit.federation.nested import with_members

Entry: TypeAlias = str | int
"""Key of a dictionary, field of a dataclass or named tuple, or index of a tuple."""


@dataclass(frozen=True)
class Parts:
    """Which entries of a batch are the label and the inputs.

    Args:
        label: Entry with the labels; ``None`` is the second of a tuple, whose first has the inputs.
        inputs: Entry with the inputs, or several; ``None`` is all but the label. A single entry is given to networks
            by itself; several as a tuple if the batch is one, otherwise as a dictionary by name.
    """

    label: Entry | None = None
    inputs: Entry | Sequence[Entry] | None = None

    def split(self, client: str, batch: Any) -> Sequence[Any]:
        """Return ``(inputs, labels, Others)`` of a client's batch; a tuple without a named label is unchanged.

        Raises:
            SampleError: If the batch is no structure, or lacks one of the entries.
        """
        if self.label is None:
            if isinstance(batch, list | tuple) and len(batch) >= 2:
                return batch
            refuse(
                f"label of batches of client {client!r}",
                "named unless they are (inputs, labels, ...)",
                batch,
                "name the entry in FederatedLoader.from_loaders(..., label=...)",
                SampleError,
                f"None for {described(batch)}",
            )
        members = members_of(batch)
        label = self._entry(client, batch, members, "label", self.label)
        alone = isinstance(self.inputs, str | int)
        if self.inputs is None:
            names = [name for name in members if name != label]
            alone = len(names) == 1
        else:
            entries = [self.inputs] if isinstance(self.inputs, str | int) else self.inputs
            names = [self._entry(client, batch, members, "inputs", entry) for entry in entries]
        if not names or label in names:
            way_out = "leave inputs out, or let collate_fn give inputs beside the label"
            rule = f"entries other than the label {label!r}"
            refuse(f"inputs of client {client!r}", rule, self.inputs, way_out, SampleError, described(batch))
        picked: Any = {name: members[name] for name in names}
        if alone:
            (picked,) = picked.values()
        elif _is_plain(batch):
            picked = tuple(picked.values())
        others = {name: each for name, each in members.items() if name != label and name not in names}
        frame = Frame(with_members(batch, [None] * len(members)), label, tuple(names), alone)
        return picked, members[label], Others(frame, others)

    def _entry(self, client: str, batch: Any, members: Mapping[Any, Any], argument: str, entry: Entry) -> Any:
        if _is_plain(batch) and isinstance(entry, int) and -len(members) <= entry < 0:
            entry += len(members)
        if entry in members:
            return entry
        way_out = (
            "name an entry that there is, or let collate_fn or the dataset of this client call it as the others do"
        )
        if argument == "label":
            way_out += "; samples without a label have -1 there, in regression NaN"
        rule = f"an entry of the batches of client {client!r}"
        refuse(argument, rule, entry, way_out, SampleError, f"{entry!r} for {described(batch)}")


class Frame:
    """The structure of a batch without what was in it. It is no structure itself, so that it is never looked into."""

    def __init__(self, hollow: Any, label: Any, inputs: tuple[Any, ...], alone: bool) -> None:
        self.hollow, self.label, self.inputs, self.alone = hollow, label, inputs, alone

    def filled(self, inputs: Any, labels: Any, others: Mapping[Any, Any]) -> Any:
        """Return the batch with these parts."""
        values = [inputs] if self.alone else inputs.values() if isinstance(inputs, Mapping) else inputs
        given = {**others, **dict(zip(self.inputs, values, strict=True)), self.label: labels}
        return with_members(self.hollow, [given[name] for name in members_of(self.hollow)])


@dataclass
class Others:
    """Third entry of a batch that was taken apart: its structure, and entries that are neither inputs nor label."""

    frame: Frame
    values: dict[Any, Any]


def whole(samples: Sequence[Any]) -> Any:
    """Return a batch as its ``collate_fn`` made it, from ``(inputs, labels, Others)``; any other as it is."""
    if len(samples) == 3 and isinstance(samples[2], Others):
        inputs, labels, others = samples
        return others.frame.filled(inputs, labels, others.values)
    return samples


def members_of(batch: Any) -> dict[Any, Any]:
    """Return a structure's entries by name or index; none of anything else."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return dict(zip(batch._fields, batch, strict=True))
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return dict(enumerate(batch)) if isinstance(batch, list | tuple) else {}


def described(batch: Any) -> str:
    """Describe a batch's structure: ``a dict of 'image', 'label'``."""
    members, kind = members_of(batch), type(batch).__name__
    if _is_plain(batch):
        return f"a {kind} of {len(batch)}"
    return f"a {kind} of {', '.join(map(repr, members))}" if members else f"a {kind}"


def _is_plain(batch: Any) -> bool:
    """Whether entries have no names."""
    return isinstance(batch, list | tuple) and not hasattr(batch, "_fields")
