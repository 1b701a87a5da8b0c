"""A word at the start where classes are shared out unequally, and a method makes clients' features alike as a whole.

What is alike has classes in equal shares. A target that has them in others is moved until some of a class lie where
the sources have another one: methods that match distributions then end below one that does not adapt at all.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fedlit.federation import FederatedLoader
from fedlit.federation.labels import UNLABELLED
from fedlit.run.run import Run
from fedlit.run.tasks import Classification

UNEQUAL = 0.2
"""Total variation, beyond that of chance, from which class shares count as unequal. Hospitals differ by 0.1 to 0.6; the
digits, photographs and drawings on which matching helps, by less than 0.2."""


def warn_of_unequal_classes(run: Run, loader: FederatedLoader) -> None:
    """Warn if sources of this process have classes in other shares than each other, or its only one than equal ones.

    Nothing is sent, and nobody learns another's shares: a process with one source cannot know that others are alike.
    Sources whose labels are no tensor in memory are left out, as reading labels means reading all samples.
    """
    task, weight = run.task, run.requires.adaptation_weight
    is_off = weight and not getattr(run.module, weight)
    if is_off or not (run.requires.matches_distributions and isinstance(task, Classification)):
        return
    counts = {}
    for client in run.sources:
        found = (
            count_classes(loader.datasets[client.name], task.num_classes) if client.name in loader.datasets else None
        )
        if found is not None:
            counts[client.name] = found
    distance, words = most_unequal(counts)
    if distance > UNEQUAL:
        warnings.warn(
            f"classes are shared out unequally ({words}), and {run.name} makes the features of all "
            "clients alike as a whole. If the target's shares differ too, samples of one class are moved onto another: "
            "in the four hospitals that cost up to 23 points against SourceOnly. Compare with SourceOnly (--compare), "
            "or take KD3A, FedAvg or recipes/tables, which hold there",
            stacklevel=2,
        )


def count_classes(dataset: Any, num_classes: int) -> Tensor | None:
    """Samples of each class in a dataset that has its labels in memory, shape (num_classes,), float64.

    ``None`` where it has not, or has none, or others than classes, which its items may stand for.
    """
    tensors = dataset.tensors[1:2] if isinstance(dataset, TensorDataset) else [getattr(dataset, "y", None)]
    for labels in tensors:
        if isinstance(labels, Tensor) and labels.dim() == 1 and not labels.is_floating_point():
            known = labels.long()[labels.long() != UNLABELLED]
            if len(known) and int(known.min()) >= 0 and int(known.max()) < num_classes:
                return torch.bincount(known, minlength=num_classes).double()
    return None


def most_unequal(counts: Mapping[str, Tensor]) -> tuple[float, str]:
    """How much further apart in their class shares two clients are than chance makes samples of equal shares.

    Args:
        counts: Samples of each class by client, each of shape (C,) and not all 0; a single client is compared with
            equal shares.

    Returns:
        Total variation less that of chance, in [0, 1], of the two clients that differ most, and what they have of
        one class; 0 and no words of no client.
    """
    if not counts:
        return 0.0, ""
    table = dict(counts)
    if len(table) == 1:
        (own,) = table.values()
        table["equal shares"] = torch.full_like(own, 1e12)
    names, rows = [*table], torch.stack([*table.values()])
    distances = torch.stack([beyond_chance(row, rows) for row in rows])
    one, two = divmod(int(distances.argmax()), len(names))
    (p, q), others = (rows[place] / rows[place].sum() for place in (one, two)), names[two]
    label = int((p - q).argmax())  # of which the first has more
    other = others if len(counts) == 1 else repr(others)
    return float(
        distances[one, two]
    ), f"{p[label]:.0%} of {names[one]!r} and {q[label]:.0%} of {other} are of class {label}"


def beyond_chance(a: Tensor, b: Tensor) -> Tensor:
    """Total variation of the class shares of two samples less what is expected if they are drawn from equal ones.

    The latter is that of normal distributions: the mean of |x| is sqrt(2 / pi) of its deviation.

    Args:
        a: Samples of each class, shape (C,).
        b: The same of others, shape (..., C).

    Returns:
        Shape (...), at least 0.
    """
    sizes = a.sum(), b.sum(dim=-1, keepdim=True)
    total = (a + b) / (sizes[0] + sizes[1])
    chance = (2 / math.pi * total * (1 - total) * (1 / sizes[0] + 1 / sizes[1])).sqrt()
    apart = (a / sizes[0] - b / sizes[1]).abs()
    return ((apart - chance).sum(dim=-1) / 2).clamp(min=0)
