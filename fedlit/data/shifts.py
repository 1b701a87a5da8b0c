"""Controlled shifts of FedGP (Jiang et al., 2024, appendix C.7): noisy features, label shift, few labels per source."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlit.checks import check, check_between
from fedlit.federation.streams import stable_seed

NUM_FIRST_CLASSES = 3
"""Classes in the first of the two sets that a label shift moves apart; the paper states how many, not which."""


def check_shifts(num_classes: int, label_shift: float | None, labels_per_source: int | None) -> None:
    """Refuse a label shift (eta, or ``None``) or a number of ``labels_per_source`` out of range, and both at once."""
    if label_shift is not None:
        way_out = "0.5 is no shift, 0 gives sources and target no class in common"
        check_between("label_shift (eta)", label_shift, 0, 0.5, way_out)
    if labels_per_source is not None:
        check_between("labels_per_source", labels_per_source, 1, num_classes)
        rule = "left out with label_shift, as both decide which classes a source has"
        check(label_shift is None, "labels_per_source", rule, labels_per_source)


def label_share(label: int, label_shift: float, is_target: bool) -> float:
    """Return the share of a class's samples that the sources together (or the target) hold under a label shift of eta.

    With D1 the first three classes and D2 the others, the sources hold eta of D1 and 1 - eta of D2, and the target
    1 - eta of D1 and eta of D2. At 0.5, the largest eta, both hold the same mixture; at 0 they share no class.
    """
    return label_shift if (label < NUM_FIRST_CLASSES) != is_target else 1 - label_shift


def source_labels(source: int, labels_per_source: int, num_classes: int) -> list[int]:
    """Return classes that a source (a number from 0) has when it has only some, ascending.

    Following NIID-Bench (Li et al., 2022), as FedGP does: source i has class i modulo the number of classes, and others
    at random (the same ones in each run).
    """
    first = source % num_classes
    others = torch.tensor([label for label in range(num_classes) if label != first], dtype=torch.int64)
    generator = torch.Generator().manual_seed(stable_seed("source_labels", source))
    chosen = others[torch.randperm(len(others), generator=generator)[: labels_per_source - 1]]
    return sorted([first, *chosen.tolist()])


def add_noise(x: Tensor, std: float, *stream: object) -> Tensor:
    """Add Gaussian noise to images, without clipping, as FedGP and NIID-Bench do; a ``std`` of 0 returns ``x`` itself.

    The same name (``stream``) gives the same noise.
    """
    if std == 0:
        return x
    generator = torch.Generator().manual_seed(stable_seed(*stream))
    return x + std * torch.randn(x.shape, generator=generator)
