"""Time series: filling, resampling, windows and their features, against numpy, scipy and numbers by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import signal

from fedlit.functional.signals import (
    NUM_FEATURES,
    band_edges,
    cut_windows,
    fill_missing,
    on_grid,
    resample,
    window_features,
    window_labels,
    with_magnitudes,
)
from refused import refused

NAN = np.nan


def test_runs_up_to_a_length_are_filled_by_a_line_and_ends_stay():
    x = np.array([[NAN, 1.0], [1, NAN], [NAN, NAN], [3, NAN], [4, 5], [NAN, 6]])
    filled = fill_missing(x, 2)
    np.testing.assert_array_equal(filled[:, 0], [NAN, 1, 2, 3, 4, NAN])
    np.testing.assert_array_equal(filled[:, 1], x[:, 1])  # three are missing
    np.testing.assert_array_equal(fill_missing(x, 3)[:, 1], [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize(("rate", "new_rate"), [(100, 50), (50, 20), (25, 100), (99.5, 50)])
def test_a_slow_wave_survives_resampling_and_a_fast_one_does_not_come_back_as_a_slow_one(rate, new_rate):
    time, new = np.arange(0, 10, 1 / rate), np.arange(0, 10, 1 / new_rate)
    slow = 3 + np.sin(2 * np.pi * 1.5 * time)
    found = resample(slow[:, None], rate, new_rate)[:, 0]
    assert len(found) == np.ceil(len(slow) * new_rate / rate)
    inner = slice(new_rate, 8 * new_rate)
    np.testing.assert_allclose(
        found[: len(new)][inner], (3 + np.sin(2 * np.pi * 1.5 * new))[: len(found)][inner], atol=0.02
    )
    assert abs(found[0] - 3) < 0.2  # no jump from zero at the ends
    if new_rate < rate:
        fast = np.sin(2 * np.pi * 0.9 * (rate / 2) * time)
        assert np.abs(resample(fast[:, None], rate, new_rate)[inner]).max() < 0.05


def test_missing_samples_stay_missing_at_another_rate():
    x = np.ones((100, 2))
    x[40:60, 0] = NAN
    found = resample(x, 50, 25)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(found[:, 0])), np.arange(20, 30))
    assert np.allclose(found[:, 1], 1)


def test_jittered_stamps_are_brought_to_a_grid():
    rng = np.random.default_rng(0)
    time = np.arange(200) / 50 + rng.uniform(-0.005, 0.005, 200)
    x, nearest = on_grid(np.sin(time)[:, None], time, 50)
    grid = time[0] + np.arange(len(x)) / 50
    np.testing.assert_allclose(x[:, 0], np.sin(grid), atol=1e-4)
    assert np.abs(time[nearest] - grid).max() <= 0.011
    exact, nearest = on_grid(np.arange(5.0)[:, None], np.arange(5) / 10, 10)
    assert exact[:, 0].tolist() == nearest.tolist() == [0, 1, 2, 3, 4]


@given(st.lists(st.integers(-1, 2), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 5), st.booleans())
def test_labels_of_windows_are_those_of_a_loop(labels, size, stride, majority):
    expected = []
    for start in range(0, len(labels) - size + 1, stride):
        window = labels[start : start + size]
        fits = [c for c in range(3) if (2 * window.count(c) > size if majority else window.count(c) == size)]
        expected.append(fits[0] if fits else -1)
    assert window_labels(torch.tensor(labels), size, stride, majority).tolist() == expected
    assert len(cut_windows(torch.tensor(labels)[:, None], size, stride)) == len(expected)


@pytest.mark.parametrize("length", [10, 33, 128])
def test_features_are_those_of_numpy_and_scipy(length):
    x = np.random.default_rng(0).normal(1, 2, (3, 2, length))
    found = window_features(torch.from_numpy(x)).numpy().reshape(3, 2, NUM_FEATURES)
    np.testing.assert_allclose(found[..., 0], x.mean(-1))
    np.testing.assert_allclose(found[..., 1], x.std(-1))
    np.testing.assert_allclose(
        found[..., 2:7], np.moveaxis(np.quantile(x, [0.05, 0.25, 0.5, 0.75, 0.95], axis=-1), 0, -1)
    )
    np.testing.assert_allclose(found[..., 7], np.abs(np.diff(x)).mean(-1))
    _, power = signal.periodogram(x, scaling="spectrum", detrend="constant")
    edges = band_edges(length)
    bands = np.stack([power[..., a:b].sum(-1) for a, b in pairwise(edges)], axis=-1)
    np.testing.assert_allclose(found[..., 8:], np.log(bands + 1e-20), rtol=1e-8)
    np.testing.assert_allclose(np.exp(found[..., 8:]).sum(-1), x.var(-1))  # Parseval


def test_features_need_ten_samples_and_stand_a_channel_that_stands_still():
    with refused("length"):
        window_features(torch.zeros(1, 1, 9))
    assert window_features(torch.full((1, 1, 10), 5.0)).isfinite().all()
    assert all(len(set(band_edges(length))) == 6 for length in range(10, 300))


def test_magnitudes_are_lengths():
    x = torch.tensor([[[3.0, 0], [4, 2], [9, 9]]])
    assert with_magnitudes(x, [[0, 1]])[:, 3].tolist() == [[5, 2]]
