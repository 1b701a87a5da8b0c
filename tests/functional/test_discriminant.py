"""Linear discriminant analysis from moments, against scikit-learn's from samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from fedlit.functional import linear_discriminant


def samples(generator: torch.Generator, size: int = 90, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Classes of unequal sizes and a covariance that is not round."""
    labels = (torch.arange(size) % (classes + 1)).clamp(max=classes - 1)
    mixing = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    centres = 2 * torch.randn(classes, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return noise @ mixing + centres[labels], labels


def moments(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    hot = torch.nn.functional.one_hot(y, classes).to(x.dtype)
    return x.T @ x / len(x), x.T @ hot / len(x), hot.mean(dim=0)


@pytest.mark.parametrize("shrinkage", [0.01, 0.3, 1.0])
def test_agrees_with_scikit_learn(shrinkage: float, generator: torch.Generator) -> None:
    x, y = samples(generator)
    weights, biases = linear_discriminant(*moments(x, y, 3), shrinkage)
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(x.numpy(), y.numpy())
    np.testing.assert_allclose(weights.numpy(), oracle.coef_, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(biases.numpy(), oracle.intercept_, rtol=1e-9, atol=1e-9)
    logits = x @ weights.T + biases
    probabilities = oracle.predict_proba(x.numpy())
    np.testing.assert_allclose(logits.softmax(dim=1).numpy(), probabilities, rtol=1e-7, atol=1e-9)


def test_a_class_without_samples_is_never_predicted_and_changes_nothing_else(generator: torch.Generator) -> None:
    x, y = samples(generator)
    weights, biases = linear_discriminant(*moments(x, y, 4))
    without, other_biases = linear_discriminant(*moments(x, y, 3))
    assert weights.isfinite().all()
    assert biases.isfinite().all()
    torch.testing.assert_close(weights[:3], without)
    torch.testing.assert_close(biases[:3], other_biases)
    assert not weights[3].any()
    assert float(biases[3]) == -1e9
    for far in (1.0, 1e3, -1e3):  # there the other logits are far below the log of any small prior
        logits = far * x @ weights.T + biases
        assert not (logits.argmax(dim=1) == 3).any()
    assert float(logits[:, :3].max(dim=1).values.min()) < -100
