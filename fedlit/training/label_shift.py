"""A word at the start where classes are shared out unequally, and a method makes clients' features alike as a whole.

What is alike has classes in equal shares. A target that has them in others is moved until some of a class lie where
the sources have another one: methods that match distributions then end below one that does not adapt at all.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fedlit.federation import FederatedLoader
from fedlit.federation.labels import known_labels
from fedlit.training.method import Method
from fedlit.training.tasks import Classification

UNEQUAL = 0.2
"""Total variation, beyond that of chance, from which class shares count as unequal. Hospitals differ by 0.1 to 0.6; the
digits, photographs and drawings on which matching helps, by less than 0.2."""


def warn_of_unequal_classes(method: Method, loader: FederatedLoader) -> None:
    """Warn if sources of this process have classes in other shares than each other, or its only one than equal ones.

    Nothing is sent: nobody learns another's shares. Sources whose labels are no tensor in memory are left out, as
    reading labels means reading all samples.
    """
    argument, task = method.adaptation_weight, method.task
    if not (argument and getattr(method, argument) and isinstance(task, Classification)):
        return
    local = [client.name for client in method.sources if client.name in loader.datasets]
    labels = {name: labels_of(loader.datasets[name]) for name in local}
    counts = {name: count_classes(y, task.num_classes) for name, y in labels.items() if y is not None}
    distance, words = most_unequal(counts)
    if distance > UNEQUAL:
        warnings.warn(
            f"classes are shared out unequally ({words}), and {type(method).__name__} makes the features of all "
            "clients alike as a whole. A target that has its classes in other shares than the sources is then drawn "
            "apart from them: in hospitals that cost up to 23 points against SourceOnly. Compare with it "
            f"(--compare), lower {argument}, or take KD3A, FedAvg or recipes/tables, which hold there",
            stacklevel=2,
        )


def labels_of(dataset: Any) -> Tensor | None:
    """Labels of a dataset that has them in memory, shape (n,)."""
    labels = dataset.tensors[1] if isinstance(dataset, TensorDataset) else getattr(dataset, "y", None)
    return labels if isinstance(labels, Tensor) and labels.dim() == 1 and not labels.is_floating_point() else None


def count_classes(labels: Tensor, num_classes: int) -> Tensor:
    """Samples of each class among known labels, shape (num_classes,), float64."""
    return torch.bincount(labels[known_labels(labels)], minlength=num_classes).double()


def most_unequal(counts: Mapping[str, Tensor]) -> tuple[float, str]:
    """How much further apart in their class shares two clients are than chance makes samples of equal shares.

    Args:
        counts: Samples of each class by client, each of shape (C,); a single client is compared with equal shares.

    Returns:
        Total variation less that of chance, in [0, 1], of the two clients that differ most, and what they have of
        one class; 0 and no words where there is nothing to compare.
    """
    able = {name: own for name, own in counts.items() if own.sum()}
    pairs = [((one, a), (two, b)) for (one, a), (two, b) in itertools.combinations(able.items(), 2)]
    if not pairs:
        pairs = [((name, own), ("", torch.full_like(own, 1e12))) for name, own in able.items()]
    found = [(beyond_chance(a, b), _words(one, a, two, b)) for (one, a), (two, b) in pairs]
    return max(found, default=(0.0, ""))


def beyond_chance(a: Tensor, b: Tensor) -> float:
    """Total variation of the class shares of two samples less what is expected if they are drawn from equal ones.

    The latter is that of normal distributions: the mean of |x| is sqrt(2 / pi) of its deviation.
    """
    total = (a + b) / (a.sum() + b.sum())
    chance = (2 / math.pi * total * (1 - total) * (1 / a.sum() + 1 / b.sum())).sqrt()
    return max(0.0, float(((a / a.sum() - b / b.sum()).abs() - chance).sum()) / 2)


def _words(one: str, a: Tensor, two: str, b: Tensor) -> str:
    p, q = a / a.sum(), b / b.sum()
    label = int((p - q).argmax())  # of which the first has more
    other = f"{two!r}" if two else "equal shares"
    return f"{p[label]:.0%} of {one!r} and {q[label]:.0%} of {other} are of class {label}"
