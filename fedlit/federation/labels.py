"""The label guard: labels of the target that may be scored against, never trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from fedlit.federation.errors import LabelGuardError
from fedlit.federation.nested import mapped, num_samples, take, tensors_of

TaskName = Literal["classification", "regression"]
"""Whether labels are classes or numbers."""

UNLABELLED = -1
"""Label value of a training sample whose class is not known; where labels are numbers, it is NaN."""


def known_labels(y: Tensor) -> Tensor:
    """Which labels are known, bool, shape (n,), of classes, int64, (n,), or numbers, floating, (n,) or (n, k)."""
    return y.isfinite().reshape(len(y), -1).all(dim=1) if y.is_floating_point() else y != UNLABELLED


def known_samples(labels: Any) -> Tensor:
    """Which samples of a batch have labels, bool, shape (n,), whatever form labels have.

    Of several tensors all have to be known; one of integers of shape (n, ...) is where some entry is not -1. Texts are.
    """
    known = torch.ones(num_samples(labels), dtype=torch.bool)
    for leaf in tensors_of(labels).values():
        there = known_labels(leaf)
        known = known.to(leaf.device) & (there if there.dim() == 1 else there.flatten(1).any(dim=1))
    return known


def with_known_labels(samples: Sequence[Any]) -> Sequence[Any]:
    """Return the samples of a batch that have labels; all, if labels are a list with a structure for each sample."""
    inputs, labels, *_ = samples
    if isinstance(labels, list | tuple) and labels and all(isinstance(each, Mapping) for each in labels):
        number, leaves = num_samples(inputs), tensors_of(labels).values()
        if any(leaf.dim() == 0 or len(leaf) != number for leaf in leaves):  # such as boxes of each image
            return samples
    known = known_samples(labels)
    return [take(each, known) for each in samples]


class GuardedLabels:
    """Stands in a batch where labels would be, and raises on any use of them.

    Batches of an unlabelled target hold this object instead of a label tensor. In training it is empty; in validation
    and testing it carries the labels to `reveal_for_oracle`, which only the ``oracle/...`` metrics call.

    Args:
        client: Whose labels these are, for the error message.
        labels: Shape (batch,), or ``None`` when there are none to reveal.
    """

    __slots__ = ("_client", "_labels")

    def __init__(self, client: str, labels: Tensor | None = None) -> None:
        self._client = client
        self._labels = labels

    def to(self, *args: Any, **kwargs: Any) -> GuardedLabels:
        """Move the labels, as `Tensor.to` does; Lightning calls this on every batch."""
        moved = None if self._labels is None else mapped(lambda leaf: leaf.to(*args, **kwargs), self._labels)
        return GuardedLabels(self._client, moved)

    def __repr__(self) -> str:
        return f"GuardedLabels({self._client!r})"

    def _refuse(self) -> NoReturn:
        raise LabelGuardError(
            f"the labels of target client {self._client!r} are not available: it is unlabelled in training, and its "
            "test labels are an oracle that only metrics named 'oracle/...' may read. To train on target labels, "
            "give the data module target_labels"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocol look-ups by copy, pickle and hasattr must fail the ordinary way
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stack: list[Any] = [args, kwargs or {}]
        while stack:
            item = stack.pop()
            if isinstance(item, GuardedLabels):
                item._refuse()
            if isinstance(item, dict):
                stack.extend(item.values())
            elif isinstance(item, list | tuple):
                stack.extend(item)
        return NotImplemented

    # No __iter__: loops end up here, and Lightning, which looks into all iterables of a batch for its size, passes by.
    def _refuse_use(self, *operands: object, **options: object) -> Any:
        self._refuse()

    __hash__ = None  # type: ignore[assignment]
    __len__ = __getitem__ = __setitem__ = __contains__ = __array__ = __bool__ = __eq__ = _refuse_use
    __lt__ = __le__ = __gt__ = __ge__ = _refuse_use
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse_use
    __neg__ = __int__ = __float__ = __index__ = _refuse_use


def guard(batch: Mapping[str, Any], client: str, keep: bool) -> Mapping[str, Any]:
    """``{client: (inputs, labels)}`` with the labels of ``client`` behind the guard, if the batch has any.

    Unless ``keep``, by which the ``oracle/...`` metrics may read them, they are thrown away.
    """
    samples = batch.get(client)
    if not isinstance(samples, list | tuple) or len(samples) < 2 or isinstance(samples[1], GuardedLabels):
        return batch
    inputs, labels, *rest = samples
    return {**batch, client: (inputs, GuardedLabels(client, labels if keep else None), *rest)}


def reveal_for_oracle(labels: Tensor | GuardedLabels) -> Tensor:
    """Labels behind the guard, for a metric whose name starts with ``oracle/`` and for nothing else.

    Args:
        labels: Of an evaluation batch; labels that are not guarded are returned as they are.

    Raises:
        LabelGuardError: If the guard is empty, as it is in every training batch.
    """
    if not isinstance(labels, GuardedLabels):
        return labels
    if labels._labels is None:
        labels._refuse()
    return labels._labels
