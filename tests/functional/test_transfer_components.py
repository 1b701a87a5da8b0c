"""TCA, R-TCA and RF-TCA against scipy's generalised eigenproblem and the identities that their solutions satisfy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

import processes
from fedlit import functional as fn
from measured import sums_of_a_stream
from refused import refused

KERNEL = partial(fn.gaussian_kernel, bandwidth=1.5)
NUM_SOURCE, NUM_TARGET, NUM, DIM, M, GAMMA = 14, 11, 25, 3, 4, 0.3


def double(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.fixture
def xs(generator: torch.Generator) -> Tensor:
    return double(NUM_SOURCE, DIM, generator=generator)


@pytest.fixture
def xt(generator: torch.Generator) -> Tensor:
    return double(NUM_TARGET, DIM, generator=generator) + 0.7


def contrast(num_source: int = NUM_SOURCE, num_target: int = NUM_TARGET) -> np.ndarray:
    return np.array([1 / num_source] * num_source + [-1 / num_target] * num_target)


def centring(num: int = NUM) -> np.ndarray:
    return np.eye(num) - 1 / num


@dataclasses.dataclass
class Case:
    """One method on given data, with the pencil (A, B) it is to solve and the map Z: its features are Z W."""

    solve: Callable[..., fn.TransferComponents]
    pencil: Callable[[np.ndarray, float], tuple[np.ndarray, np.ndarray]]
    rows: Callable[[Tensor], np.ndarray]


def kernel_rows(z: Tensor) -> np.ndarray:
    return KERNEL(z, z).numpy()


def feature_rows(num: int, z: Tensor) -> np.ndarray:
    return fn.random_fourier_features(z, fn.sample_frequencies(num, DIM, 1.5)).numpy()


def tca_pencil(k: np.ndarray, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    gap = k @ contrast()
    return k @ centring() @ k, np.outer(gap, gap) + gamma * np.eye(NUM)


def r_tca_pencil(k: np.ndarray, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    gap = k @ contrast()
    return k @ centring() @ k, np.outer(gap, gap) + gamma * k


def rf_tca_pencil(rows: np.ndarray, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    gap = rows.T @ contrast()
    return rows.T @ centring() @ rows, np.outer(gap, gap) + gamma * np.eye(rows.shape[1])


CASES = {
    "tca": Case(partial(fn.tca, kernel=KERNEL), tca_pencil, kernel_rows),
    "r_tca": Case(partial(fn.r_tca, kernel=KERNEL), r_tca_pencil, kernel_rows),
    "rf_tca with more samples than features": Case(
        partial(fn.rf_tca, frequencies=fn.sample_frequencies(10, DIM, 1.5)), rf_tca_pencil, partial(feature_rows, 10)
    ),
    "rf_tca with fewer samples than features": Case(
        partial(fn.rf_tca, frequencies=fn.sample_frequencies(40, DIM, 1.5)), rf_tca_pencil, partial(feature_rows, 40)
    ),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def features_of(found: fn.TransferComponents) -> np.ndarray:
    return torch.cat([found.source, found.target]).numpy()


def projector(columns: np.ndarray) -> np.ndarray:
    basis = np.linalg.qr(columns)[0]
    return basis @ basis.T


def same_up_to_sign(first: np.ndarray, second: np.ndarray, atol: float) -> None:
    signs = np.sign((first * second).sum(axis=0))
    np.testing.assert_allclose(first, second * signs, rtol=0, atol=atol)


def test_is_the_top_of_scipys_generalised_eigenproblem(case: Case, xs: Tensor, xt: Tensor) -> None:
    rows = case.rows(torch.cat([xs, xt]))
    values, vectors = scipy.linalg.eigh(*case.pencil(rows, GAMMA))
    values, vectors = values[::-1][:M], vectors[:, ::-1][:, :M]
    found = case.solve(xs, xt, M, GAMMA)
    np.testing.assert_allclose(found.eigenvalues.numpy(), values, rtol=1e-9)
    # a projector onto W is not determined where K is nearly singular; that onto its features is
    np.testing.assert_allclose(projector(features_of(found)), projector(rows @ vectors), atol=1e-8)
    same_up_to_sign(features_of(found), rows @ (vectors / np.sqrt(values)), atol=1e-8)


def test_projects_new_samples_by_their_kernel_with_the_old(xs: Tensor, xt: Tensor, generator: torch.Generator) -> None:
    new = double(5, DIM, generator=generator)
    found = fn.tca(xs, xt, M, GAMMA, KERNEL)
    torch.testing.assert_close(found.project(xs), found.source, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.project(new), KERNEL(new, torch.cat([xs, xt])) @ found.aligner)
    omega = fn.sample_frequencies(10, DIM, 1.5)
    found = fn.rf_tca(xs, xt, M, GAMMA, omega)
    torch.testing.assert_close(found.project(new), fn.random_fourier_features(new, omega) @ found.aligner)


def test_the_same_call_gives_the_same_bits_and_signs_follow_a_rule(case: Case, xs: Tensor, xt: Tensor) -> None:
    first, second = (case.solve(xs, xt, M, GAMMA) for _ in range(2))
    assert torch.equal(first.source, second.source)
    assert torch.equal(first.aligner, second.aligner)
    largest = first.aligner.gather(0, first.aligner.abs().argmax(dim=0, keepdim=True))
    assert (largest > 0).all()


def test_streaming_equals_the_batch(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fn.random_features, "CHUNK", 64)
    x = double(1000, DIM, generator=generator)
    omega = fn.sample_frequencies(8, DIM, 1.0)
    whole = fn.RandomFeatureSums.of(fn.random_fourier_features(x, omega))
    streamed = fn.random_feature_sums(iter(x.split(7)), omega)
    assert (whole.count, streamed.count) == (1000, 1000)
    assert streamed.second_moment.dtype == streamed.total.dtype == torch.float64
    for name in ("second_moment", "total"):
        a, b = getattr(streamed, name), getattr(whole, name)
        assert torch.linalg.norm(a - b) < 1e-12 * torch.linalg.norm(b)
    # the regrouping makes more than that true: any batches give the same bits
    for batches in (x.split(1000), x.split(64), [x[:1], x[1:1], x[1:130], x[130:]]):
        other = fn.random_feature_sums(batches, omega)
        assert torch.equal(other.second_moment, streamed.second_moment)
        assert torch.equal(other.total, streamed.total)


@pytest.mark.parametrize("scaling", ["constraint", "unit"])
@pytest.mark.parametrize("num", [6, 40])
def test_sums_of_each_domain_suffice(scaling: fn.Scaling, num: int, xs: Tensor, xt: Tensor) -> None:
    omega = fn.sample_frequencies(num, DIM, 1.5)
    source = fn.random_feature_sums(xs.split(5), omega)
    target = fn.random_feature_sums(xt[:4].split(3), omega) + fn.random_feature_sums([xt[4:]], omega)
    aligner, values = fn.rf_tca_from_sums(source, target, M, GAMMA, scaling)
    found = fn.rf_tca(xs, xt, M, GAMMA, omega, scaling)
    torch.testing.assert_close(values, found.eigenvalues, rtol=1e-9, atol=0)
    torch.testing.assert_close(aligner, found.aligner, rtol=0, atol=1e-8)


def test_memory_does_not_grow_with_the_number_of_samples() -> None:
    """All features of 6e4 samples would take 96 MB."""
    ((count, megabytes),) = processes.results(sums_of_a_stream, 6)
    assert count == 60_000
    assert megabytes < 50


def test_coincident_samples_work(case: Case, xs: Tensor, xt: Tensor) -> None:
    """K is then singular: R-TCA by its definition would invert gamma K + K l l^T K."""
    found = case.solve(xs.repeat(2, 1), xt.repeat(2, 1), M, GAMMA)
    centred = centring(2 * NUM) @ features_of(found)
    np.testing.assert_allclose(centred.T @ centred, np.eye(M), atol=1e-10)
    np.testing.assert_allclose(found.source[:NUM_SOURCE].numpy(), found.source[NUM_SOURCE:].numpy(), atol=1e-10)
    # twice the samples double S H S^T and leave S l alone: RF-TCA's eigenvalues double, and so do those of R-TCA
    if case.pencil is not tca_pencil:
        torch.testing.assert_close(found.eigenvalues, 2 * case.solve(xs, xt, M, GAMMA).eigenvalues, rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", [fn.tca, fn.r_tca])
@pytest.mark.parametrize("bandwidth", [1e-3, 1.0])
def test_large_problems_take_lanczos_and_give_the_same(
    method: Callable[..., fn.TransferComponents],
    bandwidth: float,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the small bandwidth K = I and all eigenvalues are equal, from which Lanczos has to fall back.

    Components of equal eigenvalues are any rotation of one another, and round-off, which depends on where in memory
    the matrix lies, chooses it: only at the larger bandwidth are they the same again.
    """
    kernel = partial(fn.gaussian_kernel, bandwidth=bandwidth)
    xs, xt = double(90, DIM, generator=generator), double(110, DIM, generator=generator)
    dense = method(xs, xt, 5, GAMMA, kernel)
    monkeypatch.setattr(fn.transfer_components, "_LANCZOS_FROM", 100)
    lanczos, again = (method(xs, xt, 5, GAMMA, kernel) for _ in range(2))
    torch.testing.assert_close(lanczos.eigenvalues, dense.eigenvalues, rtol=1e-10, atol=0)
    centred = lanczos.source.new_tensor(features_of(lanczos))
    centred = centred - centred.mean(dim=0)
    torch.testing.assert_close(centred.T @ centred, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-9)
    if bandwidth == 1.0:
        torch.testing.assert_close(lanczos.source, again.source, rtol=0, atol=1e-12)
        torch.testing.assert_close(lanczos.source, dense.source, rtol=0, atol=1e-9)


def test_eigenvalues_that_lapack_loses_are_found_by_another_driver(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some processors ``evr`` finds none of equal eigenvalues, and says nothing."""
    xs, xt = double(9, DIM, generator=generator), double(11, DIM, generator=generator)
    kernel = partial(fn.gaussian_kernel, bandwidth=1.0)
    expected = fn.tca(xs, xt, 3, GAMMA, kernel)
    whole = scipy.linalg.eigh

    def lossy(matrix: Any, driver: str, **kwargs: Any) -> Any:
        values, vectors = whole(matrix, driver=driver, **kwargs)
        return (values[:0], vectors[:, :0]) if driver == "evr" else (values, vectors)

    monkeypatch.setattr(scipy.linalg, "eigh", lossy)
    found = fn.tca(xs, xt, 3, GAMMA, kernel)
    torch.testing.assert_close(found.eigenvalues, expected.eigenvalues, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.source, expected.source, rtol=0, atol=1e-9)


def linear(x: Tensor, y: Tensor) -> Tensor:
    return x @ y.T


@pytest.mark.parametrize("shift", [0.0, 100.0])
@pytest.mark.parametrize("method", [fn.tca, fn.r_tca])
def test_components_beyond_the_rank_are_refused(
    method: Callable[..., fn.TransferComponents], shift: float, generator: torch.Generator
) -> None:
    """A linear kernel of p features has rank p; what follows is round-off of the size of the uncentred kernel."""
    xs, xt = (double(rows, DIM, generator=generator) + shift for rows in (200, 150))
    assert method(xs, xt, DIM, GAMMA, linear).source.shape == (200, DIM)
    with refused("num_components"):
        method(xs, xt, DIM + 1, GAMMA, linear)
