"""CORAL, JDA and GFK: what each computes of samples in any order; what they share with TCA is in test_shallow.py."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from fedlit.functional import geodesic_flow_kernel, jda, laplace_kernel
from fedlit.shallow import CORAL, GFK, JDA
from refused import refused


def two_domains(size: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of both domains mixed; each has a covariance and a mean of its own."""
    draws = np.random.default_rng(0)
    domain = draws.permutation(np.repeat([1, -1], [2 * size // 3, size - 2 * size // 3]))
    labels = np.arange(size) % 3
    samples = draws.normal(size=(size, 6))
    samples[np.arange(size), labels] += 8
    mixing = np.eye(6) + 0.4 * draws.normal(size=(6, 6))
    return np.where(domain[:, None] > 0, samples, samples @ mixing + 1), labels, domain


@pytest.mark.parametrize("center", [False, True])
def test_coral_gives_the_source_the_targets_covariance_and_leaves_the_target(center):
    samples, _, domain = two_domains()
    source = domain > 0
    fitted = CORAL(reg=0.0, center=center)
    moved = fitted.fit_transform(samples, sample_domain=domain)
    np.testing.assert_array_equal(moved[~source], samples[~source])
    np.testing.assert_allclose(np.cov(moved[source].T), np.cov(samples[~source].T))
    mean = samples[~source].mean(axis=0) if center else samples[source].mean(axis=0) @ fitted.aligner_
    np.testing.assert_allclose(moved[source].mean(axis=0), mean)
    np.testing.assert_allclose(moved[source], samples[source] @ fitted.aligner_ + fitted.offset_)


def test_coral_takes_samples_without_a_domain_for_the_targets():
    samples, _, domain = two_domains()
    fitted = CORAL().fit(samples, sample_domain=domain)
    np.testing.assert_array_equal(fitted.transform(samples), samples)
    again = fitted.transform(samples, sample_domain=domain)
    np.testing.assert_allclose(again, fitted.fit_transform(samples, sample_domain=domain))
    alone = fitted.transform(samples[domain > 0], sample_domain=domain[domain > 0])
    np.testing.assert_allclose(alone, again[domain > 0])
    with refused("sample_domain"):
        fitted.transform(samples[:1], sample_domain=[0])


def test_gfk_is_the_kernel_of_the_domains_principal_subspaces():
    samples, _, domain = two_domains()
    fitted = GFK(2)
    features = fitted.fit_transform(samples, sample_domain=domain)
    bases = (torch.tensor(PCA(2).fit(samples[mask]).components_.T) for mask in (domain > 0, domain < 0))
    kernel = geodesic_flow_kernel(*bases).numpy()
    assert features.shape == (60, 4)
    assert fitted.n_components_ == 2
    np.testing.assert_allclose(features @ features.T, samples @ kernel @ samples.T, atol=1e-9)


def test_gfk_finds_the_dimension_at_which_subspaces_disagree():
    """Three common axes are the longest; the fourth of all samples is one domain's, and the fifth the other's.

    So with four axes, one domain agrees with the pooled ones; with five, each domain has one that they lack.
    """
    draws = np.random.default_rng(0)
    domain = np.repeat([1, -1], 200)
    samples = draws.normal(size=(400, 14)) * np.r_[9, 8, 7, np.full(11, 1e-3)]
    samples[domain > 0, 3:6] *= [6e3, 5e3, 4e3]
    samples[domain < 0, 6:9] *= [6e3, 5e3, 4e3]
    assert GFK("auto").fit(samples, sample_domain=domain).n_components_ == 5
    common = GFK("auto").fit(np.vstack([samples[domain > 0]] * 2), sample_domain=domain)
    assert common.n_components_ == 7  # nothing disagrees: the most there can be


def test_jda_reaches_its_function_with_labels_of_any_kind_and_none_of_the_targets():
    samples, labels, domain = two_domains()
    xs, xt = (torch.tensor(samples[mask]) for mask in (domain > 0, domain < 0))
    kernel = partial(laplace_kernel, bandwidth=9.0)
    expected = jda(
        xs, torch.tensor(labels[domain > 0]), xt, 3, 0.2, kernel,
        num_iterations=4, labelling="class_mean", scaling="constraint",
    )  # fmt: skip
    names = np.array(["ant", "bee", "cat"], dtype=object)[labels]
    names[domain < 0] = None  # not read
    estimator = JDA(
        3, gamma=0.2, kernel="laplace", bandwidth=9.0, scaling="constraint", labelling="class_mean", max_iter=4
    )
    components = estimator.fit_transform(samples, names, sample_domain=domain)
    np.testing.assert_allclose(components[domain > 0], expected.source, atol=1e-9)
    np.testing.assert_allclose(components[domain < 0], expected.target, atol=1e-9)
    np.testing.assert_allclose(estimator.aligner_, expected.aligner)
    np.testing.assert_allclose(estimator.eigenvalues_, expected.eigenvalues)
    assert estimator.n_iter_ == expected.num_iterations
    assert list(estimator.pseudo_labels_) == [["ant", "bee", "cat"][i] for i in expected.pseudo_labels]
    assert estimator.bandwidth_ == 9.0


def test_jda_takes_the_samples_as_they_are_without_a_kernel():
    samples, labels, domain = two_domains()
    fitted = JDA(3).fit(samples, labels, sample_domain=domain)
    np.testing.assert_allclose(fitted.transform(samples), samples @ fitted.aligner_)
    np.testing.assert_allclose(np.linalg.norm(fitted.aligner_, axis=0), 1)
    assert not hasattr(fitted, "bandwidth_")


def test_jda_needs_classes():
    samples, labels, domain = two_domains()
    with pytest.raises(ValueError, match="requires y to be passed, but the target y is None"):
        JDA(2).fit(samples, None, sample_domain=domain)
    with pytest.raises(ValueError, match="Unknown label type: continuous"):
        JDA(2).fit(samples, labels + 0.5, sample_domain=domain)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        JDA(2).fit(samples, labels[:-1], sample_domain=domain)
