"""Checks of a client's samples: their errors name client, row, value and way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset

from fedlit.checks import check, refuse
from fedlit.federation.errors import SampleError, about
from fedlit.federation.labels import TaskName, known_labels
from fedlit.federation.nested import Inputs, Rows, take, tensors_of

_NAMED = 5
"""Rows that an error names; it counts the others."""

_VALUES_AT_ONCE = 2**20
"""Of inputs that are looked at together: so many fit a processor's cache."""


@dataclass(frozen=True)
class Stored:
    """Samples in memory: ``read`` returns inputs and labels of rows, ``final`` is whether no transform follows."""

    read: Callable[[Rows], tuple[Inputs, Tensor]]
    final: bool

    def look(self, size: int) -> tuple[Tensor, Tensor]:
        """Labels of all ``size`` samples, and positions of those whose inputs are not finite, int64."""
        one = tensors_of(self.read(slice(0, 1))[0]).values()
        step = max(1, _VALUES_AT_ONCE // max(1, sum(leaf.numel() for leaf in one)))
        labels, wrong = [], [torch.empty(0, dtype=torch.int64)]
        for start in range(0, size, step):
            inputs, some = self.read(slice(start, min(start + step, size)))
            labels.append(some)
            bad = not_finite(inputs)
            if bad is not None:
                wrong.append(bad.nonzero().squeeze(1).cpu() + start)
        return torch.cat(labels), torch.cat(wrong)


def reads_tensors(dataset: object) -> bool:
    """Return whether a dataset's items are rows of its tensors, as of a plain `TensorDataset`."""
    return isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__


def stored(dataset: Any) -> Stored | None:
    """The samples of a dataset in memory, or ``None`` if each is made when it is read.

    A dataset of another class has a method ``stored(rows)``, of inputs and labels before any ``transform``.
    """
    if reads_tensors(dataset):
        inputs, labels = dataset.tensors[:2]
        return Stored(lambda rows: (inputs[rows], labels[rows]), True)
    if type(dataset) is Subset:
        whole, indices = stored(dataset.dataset), torch.as_tensor(dataset.indices)
        return None if whole is None else Stored(lambda rows: whole.read(indices[rows]), whole.final)
    if callable(getattr(dataset, "stored", None)):
        return Stored(dataset.stored, getattr(dataset, "transform", None) is None)
    return None


def check_map_style(client: str, dataset: Any) -> None:
    """Raise a `TypeError` if a dataset lacks ``__len__`` or ``__getitem__``."""
    kind = type(dataset).__name__
    sized = hasattr(type(dataset), "__len__") and not isinstance(dataset, IterableDataset)
    if isinstance(dataset, Subset):
        _check_indices(client, dataset)
    if sized and (hasattr(type(dataset), "__getitem__") or hasattr(dataset, "batch")):
        return
    way_out = "read its samples into a TensorDataset(x, y), or give a dataset that has both"
    if hasattr(dataset, "dataset"):
        way_out = f"give the dataset of the {kind}; batch_size is an argument of FederatedLoader"
    text = (
        f"the dataset of client {client!r} must give samples by their number (__len__ and __getitem__), got {kind}: "
        f"{way_out}"
    )
    raise about("dataset", kind, TypeError(text))


def _check_indices(client: str, subset: Subset[Any]) -> None:
    """Refuse a mask, whose values would be read as rows 0 and 1, and rows that there are not."""
    size, indices = len(subset.dataset), torch.as_tensor(subset.indices)  # type: ignore[arg-type]
    argument, mask = f"indices of the Subset of client {client!r}", f"a mask of {len(indices)} values"
    check(indices.dtype != torch.bool, argument, "rows", mask, "give mask.nonzero()[:, 0]", TypeError, mask)
    outside = indices[(indices < -size) | (indices >= size)][:_NAMED].tolist()
    rule = f"rows of its dataset of {size} samples"
    check(not outside, argument, rule, outside, "take indices of this dataset", SampleError)


def check_entries(client: str, samples: Any) -> None:
    """Raise a `TypeError` if samples are no tuples of inputs and labels."""
    entries = isinstance(samples, list | tuple)
    if entries and len(samples) >= 2:
        return
    shown = type(samples).__name__ + (f" of {len(samples)}" if entries else "")
    way_out = (
        "give a TensorDataset(x, y), or let the dataset's __getitem__ give such tuples; or name the labels of "
        "DataLoaders (label of FederatedLoader.from_loaders). Inputs may be a dictionary of tensors; the second entry "
        "is the one that the label guard keeps, -1 (in regression NaN) for a sample of the target without a label. "
        "For a module in fedlit.Federated that reads no labels, -1 of every sample will do"
    )
    refuse(f"samples of client {client!r}", "(inputs, labels, ...)", shown, way_out, TypeError, shown)


def check_labels(
    labels: Any,
    client: str,
    task: TaskName,
    num_outputs: int,
    *,
    may_lack: bool,
    exact: bool = True,
    positions: Tensor | None = None,
    word: str = "client",
    error: type[ValueError] = SampleError,
) -> None:
    """Raise an ``error`` that names rows, unless labels are classes, or in regression numbers.

    Args:
        labels: Classes of shape (n,), or of each pixel, (n, ...), whose values are not checked.
        client: Whose they are.
        task: What is predicted.
        num_outputs: Number of classes, or of numbers per sample.
        may_lack: Whether samples may have no label, as those of a target.
        exact: Whether the type must be the one that losses take, int64 or a floating one.
        positions: Rows of the samples, int64, shape (n,); ``None`` counts from 0.
        word: What the client is called in errors.
        error: Type of the error.
    """
    whose = f"labels of {word} {client!r}"
    if not isinstance(labels, Tensor):
        kind = type(labels).__name__
        refuse(whose, "a tensor", kind, "give one of shape (n,)", error, kind)
    shown = f"{labels.dtype} of shape {tuple(labels.shape)}"
    counts = task == "regression" and not labels.is_floating_point()  # of which -1 is a number like others
    known = torch.ones(len(labels), dtype=torch.bool) if counts else known_labels(labels)
    if task == "regression":
        number = labels[:1].numel()
        valid = number == num_outputs and (not exact or labels.is_floating_point())
        mend = f"give the model num_classes={number}, or mend the labels"
        way_out = "give y.float()" if number == num_outputs else mend
        check(valid, whose, f"{num_outputs} floating-point numbers per sample", shown, way_out, error, shown)
        wrong = labels.reshape(len(labels), -1).isinf().any(dim=1)
        if bool(wrong.any()):
            shown = f"infinity in {_rows(wrong, positions)}"
            refuse(whose, "finite", shown, "leave out samples without a value", error, shown)
    else:
        valid = labels.dim() != 2 and (labels.dtype == torch.int64 if exact else not labels.is_floating_point())
        way_out = "" if valid else f"give {_as_classes(labels)}"
        check(valid, whose, "classes, torch.int64 of shape (n,)", shown, way_out, error, shown)
        if labels.dim() > 2:
            return
        wrong = known & ((labels < 0) | (labels >= num_outputs))
        if bool(wrong.any()):
            low, high = int(labels[known].min()), int(labels[known].max())
            values = sorted({*labels[wrong].tolist()})[:_NAMED]
            text = (
                f"{whose} must lie in 0..{num_outputs - 1} ({num_outputs} classes), got {low}..{high} "
                f"({', '.join(map(str, values))} in {_rows(wrong, positions)}): renumber them from 0 (y - 1 if they "
                "count from 1), or name all classes (num_classes)"
            )
            raise about("labels", values, error(text))
    if not may_lack and not bool(known.all()):
        nothing, else_way = ("NaN", "") if task == "regression" else ("-1", "; if -1 is a class, number them from 0")
        text = (
            f"{int((~known).sum())} of {len(labels)} samples of source {client!r} have no label ({nothing} in "
            f"{_rows(~known, positions)}), and only those of the target may lack them: leave these samples out, or "
            f"make {client!r} the target{else_way}"
        )
        raise about("labels", nothing, error(text))


def _as_classes(labels: Tensor) -> str:
    """Code that makes classes of labels of another form."""
    if labels.dim() == 2 and labels.shape[1] > 1:
        return "y.argmax(dim=1), if they are one-hot"
    return "y" + (".squeeze(1)" if labels.dim() == 2 else "") + ("" if labels.dtype == torch.int64 else ".long()")


def not_finite(inputs: Inputs) -> Tensor | None:
    """Which samples of a batch have NaN or infinity in their inputs, bool, shape (n,); ``None`` if none has."""
    wrong: Tensor | None = None
    for leaf in tensors_of(inputs).values():
        if not leaf.is_floating_point() or leaf.layout != torch.strided or bool(leaf.sum().isfinite()):
            continue  # a sum of finite numbers may overflow, but one with NaN or infinity is never finite
        rows = ~leaf.isfinite().flatten(1).all(dim=1) if leaf.dim() > 1 else ~leaf.isfinite()
        wrong = rows if wrong is None else wrong | rows
    return wrong if wrong is not None and bool(wrong.any()) else None


def refuse_inputs(client: str, inputs: Inputs, positions: Tensor, number: int) -> SampleError:
    """Return the error of samples whose ``inputs`` are not finite, at ``positions`` among ``number`` samples."""
    first = tensors_of(take(inputs, slice(0, 1)))
    path, value = next(
        (path, leaf[~leaf.isfinite()][0])
        for path, leaf in first.items()
        if leaf.is_floating_point() and not bool(leaf.isfinite().all())
    )
    text = (
        f"inputs{path} of client {client!r} must be finite, got {float(value)} in {_named(positions)} "
        f"({len(positions)} of {number} samples), of which its network makes no finite features: leave these samples "
        "out, or fill in what is missing"
    )
    return about("inputs", float(value), SampleError(text))


def _rows(wrong: Tensor, positions: Tensor | None) -> str:
    rows = wrong.nonzero().squeeze(1).cpu()
    return _named(rows if positions is None else positions[rows])


def _named(rows: Tensor) -> str:
    first = [str(row) for row in sorted(rows.tolist())[:_NAMED]]
    if len(rows) > _NAMED:
        return f"rows {', '.join(first)} and {len(rows) - _NAMED} more"
    return f"row {first[0]}" if len(first) == 1 else f"rows {', '.join(first[:-1])} and {first[-1]}"
