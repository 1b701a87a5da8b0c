"""Area under the ROC curve with DeLong's interval, and predictive values, against counts by hand and bootstraps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from fedlit.functional import auroc_interval, predictive_values
from refused import refused


def by_pairs(scores: np.ndarray, positive: np.ndarray) -> tuple[float, float]:
    """Area and its variance from the table of all pairs, as DeLong et al. write them."""
    x, y = scores[positive], scores[~positive]
    psi = (x[:, None] > y).astype(float) + 0.5 * (x[:, None] == y)
    v, w = psi.mean(axis=1), psi.mean(axis=0)
    return psi.mean(), v.var(ddof=1) / len(x) + w.var(ddof=1) / len(y)


def test_the_interval_of_a_few_samples_is_the_one_by_hand() -> None:
    """Positives 3, 2, 1 and negatives 2, 0: placements 1, 3/4, 1/2 and 1/2, 1; area 3/4.

    Variances are 1/16 of the three and 1/8 of the two: 1/48 + 1/16 = 1/12.
    """
    scores = torch.tensor([3.0, 2.0, 1.0, 2.0, 0.0])
    area, low, high = auroc_interval(scores, torch.tensor([True, True, True, False, False]), 0.5)
    margin = 0.6744897501960817 / math.sqrt(12)
    assert (area, low, high) == pytest.approx((0.75, 0.75 - margin, 0.75 + margin))


@pytest.mark.parametrize("ties", [False, True])
def test_the_interval_is_that_of_all_pairs_and_as_wide_as_a_bootstrap_finds(ties: bool) -> None:
    random = np.random.default_rng(0)
    positive = random.random(150) < 0.3
    scores = random.standard_normal(150) + positive
    scores = scores.round() if ties else scores
    area, low, high = auroc_interval(torch.from_numpy(scores), torch.from_numpy(positive))
    expected, variance = by_pairs(scores, positive)
    margin = 1.959963984540054 * math.sqrt(variance)
    assert (area, low, high) == pytest.approx((expected, expected - margin, expected + margin))
    assert area == pytest.approx(roc_auc_score(positive, scores))
    drawn = [random.integers(0, 150, 150) for _ in range(400)]
    areas = [by_pairs(scores[each], positive[each])[0] for each in drawn]
    assert high - area == pytest.approx(1.96 * np.std(areas), rel=0.2)


def test_what_samples_do_not_show_is_no_number() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0])
    nothing = (math.nan,) * 3
    assert auroc_interval(scores, torch.tensor([True] * 3)) == pytest.approx(nothing, nan_ok=True)
    assert auroc_interval(scores[:0], torch.zeros(0, dtype=torch.bool)) == pytest.approx(nothing, nan_ok=True)
    unsure = auroc_interval(torch.tensor([1.0, math.nan]), torch.tensor([True, False]))
    assert unsure == pytest.approx(nothing, nan_ok=True)
    of_one = auroc_interval(scores, torch.tensor([False, True, False]))
    assert of_one == pytest.approx((0.5, math.nan, math.nan), nan_ok=True)
    separated = auroc_interval(torch.arange(6.0), torch.arange(6) > 2)
    assert separated == pytest.approx((1.0, math.nan, math.nan), nan_ok=True)


def test_predictive_values_are_shares_of_a_population() -> None:
    """Of 1000 people 50 are ill: 45 of them are found, and 190 of the 950 others are, too."""
    assert predictive_values(0.9, 0.8, 0.05) == pytest.approx((45 / 235, 760 / 765))
    assert predictive_values(0.0, 1.0, 0.3) == pytest.approx((math.nan, 0.7), nan_ok=True)
    assert predictive_values(1.0, 0.0, 0.3) == pytest.approx((0.3, math.nan), nan_ok=True)


def test_arguments_that_do_not_fit_are_refused() -> None:
    with refused("positive"):
        auroc_interval(torch.zeros(3), torch.zeros(2, dtype=torch.bool))
    with refused("confidence"):
        auroc_interval(torch.zeros(3), torch.zeros(3, dtype=torch.bool), 1.0)
