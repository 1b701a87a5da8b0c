"""Joint distribution adaptation, against scipy's generalised eigenproblem with the matrix M written out."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid
from torch import Tensor

from fedlit.functional import gaussian_kernel, jda, jda_from_sums

NUM_CLASSES = 3


def domains(
    gap: float = 1.0, num_source: int = 25, num_target: int = 20, apart: float = 2.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three classes in five dimensions, of which the target's are moved, each its own way; labels 10, 20 and 30."""
    draws = np.random.default_rng(0)
    ys, yt = (10 * (1 + np.arange(size) % NUM_CLASSES) for size in (num_source, num_target))
    means = draws.normal(size=(NUM_CLASSES, 5)) * apart
    xs = means[ys // 10 - 1] + draws.normal(size=(num_source, 5))
    moved = means + gap * draws.normal(size=(NUM_CLASSES, 5)) + gap
    xt = moved[yt // 10 - 1] + draws.normal(size=(num_target, 5))
    return tuple(torch.tensor(each) for each in (xs, ys, xt, yt))


def contrasts(ys: np.ndarray, yt: np.ndarray | None, num_target: int) -> np.ndarray:
    """Columns e_0 sqrt(C) and e_c, over all samples, source first."""
    names = np.unique(ys)
    e_0 = np.r_[np.full(len(ys), 1 / len(ys)), np.full(num_target, -1 / num_target)]
    columns = [np.sqrt(len(names)) * e_0]
    for name in names if yt is not None else ():
        here, there = ys == name, yt == name
        if there.any():
            columns.append(np.r_[here / here.sum(), -(there / there.sum())])
    return np.stack(columns, axis=1)


def solution(
    features: np.ndarray, ys: np.ndarray, yt: np.ndarray | None, m: int, gamma: float
) -> tuple[np.ndarray, np.ndarray]:
    """Largest eigenvalues of the paper's pencil, and W scaled to its constraint, with n x n matrices and scipy."""
    e = contrasts(ys, yt, len(features) - len(ys))
    size = len(features)
    norm = np.linalg.norm(e @ e.T)
    scatter = features.T @ (np.eye(size) - 1 / size) @ features
    right = features.T @ (e @ e.T / norm) @ features + gamma * np.eye(features.shape[1])
    values, weights = scipy.linalg.eigh(scatter, right)
    values, weights = values[::-1][:m], weights[:, ::-1][:, :m]
    return values, weights / np.sqrt(np.einsum("ij,ik,kj->j", weights, scatter, weights))


def by_hand(
    features: np.ndarray, ys: np.ndarray, m: int, gamma: float, iterations: int, labelling: str, scaling: str
) -> tuple[np.ndarray, list[np.ndarray]]:
    """All iterations, with scikit-learn's classifiers; W of the last and all pseudo-labels."""
    labels: list[np.ndarray] = []
    for _ in range(iterations):
        _, weights = solution(features, ys, labels[-1] if labels else None, m, gamma)
        if scaling == "unit":
            weights = weights / np.linalg.norm(weights, axis=0)
        z = features @ weights
        if labelling == "neighbour":
            z = z / np.linalg.norm(z, axis=1, keepdims=True)
        classifier = KNeighborsClassifier(1) if labelling == "neighbour" else NearestCentroid()
        labels.append(classifier.fit(z[: len(ys)], ys).predict(z[len(ys) :]))
    return weights, labels


def up_to_signs(weights: Any) -> np.ndarray:
    columns = np.asarray(weights)
    return columns * np.sign(columns[np.abs(columns).argmax(axis=0), np.arange(columns.shape[1])])


@pytest.mark.parametrize("scaling", ["unit", "constraint"])
@pytest.mark.parametrize("labelling", ["neighbour", "class_mean"])
@pytest.mark.parametrize("kernel", [None, partial(gaussian_kernel, bandwidth=3.0)], ids=["samples", "kernel"])
def test_every_iteration_is_the_papers_problem(kernel: Any, labelling: Any, scaling: Any) -> None:
    xs, ys, xt, _ = domains()
    samples = torch.cat([xs, xt])
    features = (samples if kernel is None else kernel(samples, samples)).numpy()
    aligners = []
    for iterations in (1, 2, 3, 4):
        found = jda(xs, ys, xt, 3, 0.5, kernel, num_iterations=iterations, labelling=labelling, scaling=scaling)
        weights, labels = by_hand(features, ys.numpy(), 3, 0.5, found.num_iterations, labelling, scaling)
        np.testing.assert_allclose(found.aligner, up_to_signs(weights), atol=1e-8)
        np.testing.assert_array_equal(found.pseudo_labels, labels[-1])
        aligners.append(found.aligner)
        projected = torch.cat([found.source, found.target])
        torch.testing.assert_close(projected, torch.tensor(features) @ found.aligner)
        torch.testing.assert_close(found.project(xt), found.target)
        if scaling == "constraint":
            centred = projected - projected.mean(dim=0)
            torch.testing.assert_close(centred.T @ centred, torch.eye(3).double(), atol=1e-9, rtol=0)
    assert not torch.allclose(aligners[0], aligners[1], atol=1e-3)  # classes count


def test_true_classes_are_a_fixed_point_at_which_it_stops() -> None:
    xs, ys, xt, yt = domains(gap=0.1, apart=10.0)
    found = jda(xs, ys, xt, 3, num_iterations=50)
    assert found.num_iterations < 10
    torch.testing.assert_close(found.pseudo_labels, yt)
    _, expected = solution(torch.cat([xs, xt]).numpy(), ys.numpy(), yt.numpy(), 3, 1.0)
    np.testing.assert_allclose(found.aligner, up_to_signs(expected), atol=1e-8)
    longer = jda(xs, ys, xt, 3, num_iterations=found.num_iterations + 1)
    torch.testing.assert_close(longer.aligner, found.aligner, rtol=0, atol=0)


@pytest.mark.parametrize("scaling", ["unit", "constraint"])
def test_sums_of_several_sources_give_every_iteration_of_the_pooled_samples(scaling: Any) -> None:
    xs, ys, xt, _ = domains()
    members = torch.nn.functional.one_hot(ys // 10 - 1, NUM_CLASSES).double()
    parts = [slice(0, 4), slice(4, 15), slice(15, 25)]
    second, sums, counts = (
        sum(part)
        for part in zip(*[(xs[p].T @ xs[p], xs[p].T @ members[p], members[p].sum(dim=0)) for p in parts], strict=True)
    )
    for iterations in (1, 2, 3, 10):
        pooled = jda(xs, ys, xt, 3, 0.5, num_iterations=iterations, labelling="class_mean", scaling=scaling)
        found = jda_from_sums(second, sums, counts, xt, 3, 0.5, num_iterations=iterations, scaling=scaling)
        torch.testing.assert_close(found.aligner, pooled.aligner, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.eigenvalues, pooled.eigenvalues)
        torch.testing.assert_close(10 * (found.pseudo_labels + 1), pooled.pseudo_labels)
        assert found.num_iterations == pooled.num_iterations


def test_a_class_without_source_samples_is_never_guessed_and_changes_nothing() -> None:
    xs, ys, xt, _ = domains()
    members = torch.nn.functional.one_hot(ys // 10 - 1, NUM_CLASSES).double()
    sums, counts = xs.T @ members, members.sum(dim=0)
    plain = jda_from_sums(xs.T @ xs, sums, counts, xt, 3)
    # the rest of nothing that an approximate secure sum leaves, whose quotient would be a mean anywhere
    noise = torch.full((5, 1), 1e-7).double(), torch.tensor([1e-7]).double()
    wider = jda_from_sums(xs.T @ xs, torch.cat([sums, noise[0]], dim=1), torch.cat([counts, noise[1]]), xt, 3)
    assert int(wider.pseudo_labels.max()) < NUM_CLASSES
    torch.testing.assert_close(wider.aligner, plain.aligner, rtol=1e-5, atol=1e-5)
