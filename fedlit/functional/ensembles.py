"""Ensembles: class probabilities of several models for the same samples, combined without labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import scipy.sparse
import torch
from torch import Tensor

from fedlit.checks import check_at_least, check_between
from fedlit.functional.checks import check_shape
from fedlit.functional.refinement import neighbour_agreement, refine_labels, to_confidence
from fedlit.functional.scores import neighbourhood_information

CONFIDENCE = 0.5
"""Of every model before predictions are averaged, as of `to_confidence`."""

SUREST = 0.99
"""Highest confidence of a combination, as of `to_confidence`; the lowest is 1 less that."""


@dataclass(frozen=True)
class Combination:
    """Combined predictions of n samples by M models.

    Args:
        p: Class probabilities, refined and as sure as neighbours agree, shape (n, C), float64.
        weights: Of each model, shape (M,), float64, sum 1; 0 for a model that is left out.
        information: `neighbourhood_information` of each model's refined predictions, shape (M,), in [0, 1].
        refined: Each model's own refined predictions, shape (M, n, C).
    """

    p: Tensor
    weights: Tensor
    information: Tensor
    refined: Tensor


def combine_predictions(
    predictions: Sequence[Tensor],
    graph: scipy.sparse.csr_array,
    *,
    least_share: float = 0.6,
    power: float = 20.0,
) -> Combination:
    r"""Mean of models' refined predictions, in which models that predict alike count as one; it is refined, too.

    Predictions p_m get the same confidence and are refined by `refine_labels`. With the share a of samples on which two
    models then name the same class,

    .. math:: w_m \propto \frac{[K_m \ge s \max_j K_j]}{\sum_j a_{mj}^\gamma}

    where K is the `neighbourhood_information`: a model that has collapsed, or whose classes are no neighbourhoods, is
    left out, and a group of equal models weighs as much as a single other one. The mean confidence of the result is the
    `neighbour_agreement` of the mean of predictions before they are refined.

    Args:
        predictions: p_m, M class probabilities, each of shape (n, C).
        graph: Neighbourhoods of the samples, shape (n, n), as of `neighbour_graph`.
        least_share: s, in [0, 1].
        power: gamma, at least 0; with 0 all models weigh the same.
    """
    check_at_least("predictions", len(predictions), 1, "model's")
    check_between("least_share (s)", least_share, 0, 1)
    check_at_least("power (gamma)", power, 0)
    for each in predictions:
        check_shape("predictions", each, graph.shape[0], predictions[0].shape[1])
    refined = torch.stack([refine_labels(to_confidence(each, CONFIDENCE), graph) for each in predictions])
    classes = refined.argmax(dim=2)
    num_classes = refined.shape[2]
    information = torch.stack([neighbourhood_information(each, graph, num_classes) for each in classes])
    kept = information >= least_share * information.max()
    alike = (classes[:, None] == classes[kept]).double().mean(dim=2) ** power
    weights = torch.where(kept, 1 / alike.sum(dim=1), 0.0)
    weights = weights / weights.sum()
    mean = (weights[:, None, None] * refined).sum(dim=0)
    # as sure as neighbours agree on the classes before any of them was refined
    before = sum(weight * to_confidence(each, CONFIDENCE) for weight, each in zip(weights, predictions, strict=True))
    assert isinstance(before, Tensor)
    agreement = neighbour_agreement(before.argmax(dim=1), graph)
    confidence = (agreement * num_classes - 1) / max(num_classes - 1, 1)
    p = to_confidence(refine_labels(mean, graph), min(max(confidence, 1 - SUREST), SUREST))
    return Combination(p, weights, information, refined)
