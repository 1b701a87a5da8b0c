"""CORAL's map: the identity that defines it, and fractional powers of matrices by scipy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from fedlit.functional import coral_map


def covariances(num_samples: int = 50) -> tuple[Tensor, Tensor]:
    draws = np.random.default_rng(0)
    samples = [draws.normal(size=(num_samples, 4)) @ draws.normal(size=(4, 4)) for _ in range(2)]
    return tuple(torch.tensor(np.cov(x.T)) for x in samples)


@pytest.mark.parametrize("reg", ["auto", 0.0, 1.0])
def test_it_takes_one_covariance_to_the_other(reg: Any) -> None:
    source, target = covariances()
    ridges = [float(c.trace()) / 40 if reg == "auto" else reg for c in (source, target)]
    a = coral_map(source, target, reg)
    s, t = (c + ridge * torch.eye(4) for c, ridge in zip((source, target), ridges, strict=True))
    torch.testing.assert_close(a.T @ s @ a, t)
    powers = scipy.linalg.fractional_matrix_power(s.numpy(), -0.5) @ scipy.linalg.fractional_matrix_power(
        t.numpy(), 0.5
    )
    np.testing.assert_allclose(a, powers, atol=1e-9)


def test_equal_domains_stay_as_they_are() -> None:
    source, _ = covariances()
    torch.testing.assert_close(coral_map(source, source), torch.eye(4).double())


def test_units_do_not_matter_to_the_default_and_do_to_the_papers() -> None:
    source, target = covariances()
    torch.testing.assert_close(coral_map(1e-6 * source, 1e-6 * target), coral_map(source, target))
    faint = coral_map(1e-6 * source, 1e-6 * target, reg=1.0)
    torch.testing.assert_close(faint, torch.eye(4).double(), atol=1e-4, rtol=0)
