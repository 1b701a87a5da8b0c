"""Results of public functions are on their inputs' device: shown by tensors that say they are on another one."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import elsewhere
from elsewhere import tensors_in
from fedlit import functional as fn

# of numbers alone, or without tensors to begin with
WITHOUT_TENSORS = {
    *("annealing", "bandwidth_ladder", "exact_between_domains_mean", "exact_within_domain_mean", "left_out_focus"),
    *("moments_to_send", "num_taylor_moments", "predictive_values", "reversal_weight", "sample_frequencies"),
    *(
        "taylor_coefficients",
        "temperature_grid",
        "repelling_distance",
        "joint_gaps",
        "importance_weights",
        "within_domain_mean",
    ),
}
# what the tests of the folder give functions of their own, or nothing
HERE = {"tca", "r_tca", "softmax_regression", "centroid_labels", "nearest_prototypes", "domain_loss"}
UNSEEN = {"gradient_map"}  # by torch.func, which such tensors end
ARTEFACTS = {"wasserstein_barycenter"}  # of torch's shapes of such tensors, where it adds in place

X, Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
P = torch.nn.functional.one_hot(Y, 3).double() + 0.2
KERNEL = partial(fn.gaussian_kernel, bandwidth=1.0)


def _by_class(x: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shares = p / p.sum()
    return x.T.square() @ shares, x.T @ shares, shares.sum(dim=0)


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "tca": lambda x, y, p: fn.tca(x, x + 1, 2, 0.1, KERNEL),
    "r_tca": lambda x, y, p: fn.r_tca(x, x + 1, 2, 0.1, KERNEL),
    "softmax_regression": lambda x, y, p: fn.softmax_regression(x, p / p.sum(dim=1, keepdim=True)),
    "centroid_labels": lambda x, y, p: fn.centroid_labels(x, p),
    "nearest_prototypes": lambda x, y, p: fn.nearest_prototypes(x[:3], x, p),
    "kernel_ladder": lambda x, y, p: fn.kernel_ladder(x, x + 1),
    "gradient_penalty": lambda x, y, p: fn.gradient_penalty(lambda points: points.square().sum(dim=1), x),
    "diagonal_discriminant": lambda x, y, p: fn.diagonal_discriminant(*_by_class(x.double(), p)),
    "mean_squared_distance": lambda x, y, p: fn.mean_squared_distance(
        fn.taylor_moments(x, 2), fn.taylor_moments(x + 1, 2), 3, 2
    ),
    "pair_with_kernel": lambda x, y, p: fn.pair_with_kernel(fn.taylor_moments(x, 2), 3, [1.0, -0.5, 0.25]),
    "auto_weights": lambda x, y, p: fn.auto_weights(0.5, x.square()),
    "fedgp_delta_squared": lambda x, y, p: fn.fedgp_delta_squared(0.5, x.square(), 0.3, 10),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_result_is_where_the_inputs_are(name: str) -> None:
    expected = [*tensors_in(CALLS[name](X, Y, P))]
    with elsewhere.elsewhere():
        found = [*tensors_in(CALLS[name](*elsewhere.moved((X, Y, P))))]
        assert found
        assert all(isinstance(each, elsewhere.Elsewhere) for each in found)
        for before, after in zip(expected, found, strict=True):
            torch.testing.assert_close(before, after.cpu())


def test_the_device_refuses_what_a_real_one_does() -> None:
    with elsewhere.elsewhere():
        there = elsewhere.moved(X)
        assert (there + 1).device == torch.zeros(2, device=there.device).device == elsewhere.DEVICE
        assert torch.equal((there @ there.T).cpu(), X @ X.T)
        assert there.cpu().device.type == "cpu"
        assert float(there.sum()) == pytest.approx(float(X.sum()))
        with pytest.raises(RuntimeError, match="two devices"):
            there + X
        with pytest.raises(RuntimeError):
            there.numpy()
        own = there.clone().requires_grad_()
        fn.mmd_squared(own, there + 1, 1.0).backward()
        assert own.grad is not None
        assert own.grad.device == elsewhere.DEVICE


@pytest.mark.slow
def test_what_the_other_tests_of_this_folder_call_gives_results_where_the_inputs_are(tmp_path: Path) -> None:
    found, folder = tmp_path / "found.json", Path(__file__).parent
    paths = os.pathsep.join([str(folder.parent / "support"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "replayed", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
    command += [str(folder), f"--ignore={__file__}"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env={**os.environ, "FEDLIT_REPLAYED": str(found), "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stdout[-2000:]
    report = json.loads(found.read_text())
    failures = {name: error for name, error in report["failures"].items() if name not in ARTEFACTS}
    assert failures == {}
    functions = {name for name in fn.__all__ if inspect.isfunction(getattr(fn, name))}
    assert functions - report["calls"].keys() <= WITHOUT_TENSORS | HERE | UNSEEN | CALLS.keys()
