"""Variance of a mixture, against pooled samples and numbers by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlit.functional import mixture_variance


def test_it_is_the_variance_of_all_samples_together(generator: torch.Generator) -> None:
    parts = [torch.randn(n, 3, generator=generator, dtype=torch.float64) * (n / 9) + n for n in (5, 9, 14)]
    means = torch.stack([part.mean(dim=0) for part in parts])
    variances = torch.stack([part.var(dim=0, correction=0) for part in parts])
    found = mixture_variance(means, variances, torch.tensor([5.0, 9.0, 14.0], dtype=torch.float64))
    np.testing.assert_allclose(found.numpy(), np.var(torch.cat(parts).numpy(), axis=0), rtol=1e-12)
    lost = (variances * torch.tensor([[5.0], [9.0], [14.0]]) / 28).sum(dim=0)
    assert bool((found > 2 * lost).all())  # what a mean of variances lacks


def test_large_means_lose_no_digits() -> None:
    """E[x^2] - E[x]^2 in float32 would be 0 or 16 here."""
    means, variances = torch.full((2, 1), 1e4), torch.ones(2, 1)
    assert mixture_variance(means, variances, torch.ones(2)).item() == pytest.approx(1.0)
