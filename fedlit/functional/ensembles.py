"""Ensembles: class probabilities of several models for the same samples, combined without labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import scipy.sparse
import torch
import torch.nn.functional as F
from torch import Tensor

from fedlit.checks import check_at_least
from fedlit.functional.checks import check_shape
from fedlit.functional.refinement import neighbour_agreement, refine_labels, to_confidence
from fedlit.functional.scores import diversity_score, neighbourhood_information

CONFIDENCE = 0.5
"""Of every model before predictions are averaged, as of `to_confidence`."""

SUREST = 0.99
"""Highest confidence of a combination, as of `to_confidence`; the lowest is 1 less that."""

_TINY = 1e-12


@dataclass(frozen=True)
class Combination:
    """Combined predictions of n samples by M models.

    Args:
        p: Class probabilities, refined and as sure as neighbours agree, shape (n, C), float64.
        weights: Of each model, shape (M,), float64, sum 1.
        information: What weights are of, shape (M,), from 0 to about 1; see `combine_predictions`.
    """

    p: Tensor
    weights: Tensor
    information: Tensor


def combine_predictions(
    predictions: Sequence[Tensor],
    graph: scipy.sparse.csr_array,
    *,
    features: Tensor | None = None,
    sharpness: float = 15.0,
    power: float = 20.0,
) -> Combination:
    r"""Mean of models' predictions, more of those whose classes are neighbourhoods, and refined.

    Predictions get the same confidence first. With the share a of samples on which two models name the same class,

    .. math:: w_m \propto \frac{\exp(\beta K_m / \max_j K_j)}{\sum_j a_{mj}^\gamma}, \qquad
              K_m = \frac{I_m}{H_m}

    where I is the mutual information of a sample's class and its neighbours', and H the entropy of the shares of the
    predicted classes (Theil's uncertainty coefficient, at most 1 but for the edges' weights). Over log C, as
    `neighbourhood_information` has it, models would gain by naming all classes equally often; a model that leaves
    classes out is not seen by K, and is to be left out before, see `class_mean_match`. A group of equal models weighs
    as much as a single other one. The mean is refined by `refine_labels`, and gets the confidence that is the
    `neighbour_agreement` of its classes before.

    With two classes neighbourhoods tell models apart too little, since any smooth border makes some: beta is 0 then,
    and the mean is not refined (both were seen on hospitals with unequal class shares, benchmarks/combining.py).

    Args:
        predictions: p_m, M class probabilities, each of shape (n, C).
        graph: Neighbourhoods of the samples, shape (n, n), as of `neighbour_graph`.
        features: Of the samples, shape (n, d), centred, for the model of `refine_labels`; ``None`` goes without.
        sharpness: beta, at least 0: how much more the models of most information weigh; 0 with two classes.
        power: gamma, at least 0; with 0 equal models do not share a weight.
    """
    check_at_least("predictions", len(predictions), 1, "model's")
    check_at_least("sharpness (beta)", sharpness, 0)
    check_at_least("power (gamma)", power, 0)
    for each in predictions:
        check_shape("predictions", each, graph.shape[0], predictions[0].shape[1])
    if features is not None:
        check_shape("features", features, graph.shape[0], "d")
    confident = torch.stack([to_confidence(each, CONFIDENCE) for each in predictions])
    classes, num_classes = confident.argmax(dim=2), confident.shape[2]
    information = torch.stack([_information(each, graph, num_classes) for each in classes])
    alike = (classes[:, None] == classes).double().mean(dim=2) ** power
    beta = sharpness if num_classes > 2 else 0.0
    weights = (beta * information / information.max().clamp(min=_TINY)).softmax(dim=0) / alike.sum(dim=1)
    weights = weights / weights.sum()
    mean = (weights[:, None, None] * confident).sum(dim=0)
    agreement = neighbour_agreement(mean.argmax(dim=1), graph)
    confidence = (agreement * num_classes - 1) / max(num_classes - 1, 1)
    combined = mean
    if num_classes > 2:
        combined = refine_labels(mean, graph) if features is None else refine_labels(mean, features, graph=graph)
    p = to_confidence(combined, min(max(confidence, 1 - SUREST), SUREST))
    return Combination(p, weights, information)


def _information(classes: Tensor, graph: scipy.sparse.csr_array, num_classes: int) -> Tensor:
    diversity = diversity_score(F.one_hot(classes, num_classes).double().mean(dim=0))
    return neighbourhood_information(classes, graph, num_classes) / diversity.clamp(min=_TINY)
