"""Warning about unequal class shares, with which matching distributions moves samples onto other classes."""

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
"""Total variation beyond chance from which class shares count as unequal. Hospitals differ by 0.1 to 0.6; digits,
photographs and drawings, where matching helps, by less than 0.2.
"""


def warn_of_unequal_classes(run: Run, loader: FederatedLoader) -> None:
    """Warn if local sources differ in class shares (a single one: from equal shares); nothing is sent.

    Only labels in memory are counted, as others would mean reading all samples.
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
    """Count a dataset's samples by class, shape (num_classes,), float64; ``None`` without class labels in memory."""
    tensors = dataset.tensors[1:2] if isinstance(dataset, TensorDataset) else [getattr(dataset, "y", None)]
    for labels in tensors:
        if isinstance(labels, Tensor) and labels.dim() == 1 and not labels.is_floating_point():
            known = labels.long()[labels.long() != UNLABELLED]
            if len(known) and int(known.min()) >= 0 and int(known.max()) < num_classes:
                return torch.bincount(known, minlength=num_classes).double()
    return None


def most_unequal(counts: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the maximum difference of two clients' class shares (of a single one: from equal shares) and a text.

    It is total variation less that of chance, in [0, 1]; ``counts`` are samples of each class, shape (C,), not all 0.
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
    """Return the total variation of class shares less its expectation under equal ones, shape (...), at least 0.

    The expectation is that of normal distributions: the mean of |x| is sqrt(2 / pi) of its deviation. Counts have
    shapes (C,) and (..., C).
    """
    sizes = a.sum(), b.sum(dim=-1, keepdim=True)
    total = (a + b) / (sizes[0] + sizes[1])
    chance = (2 / math.pi * total * (1 - total) * (1 / sizes[0] + 1 / sizes[1])).sqrt()
    apart = (a / sizes[0] - b / sizes[1]).abs()
    return ((apart - chance).sum(dim=-1) / 2).clamp(min=0)
