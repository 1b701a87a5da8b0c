"""RF-TCA in time and memory: against vanilla TCA, against its matrix products, and as samples grow to a million.

Run from the repository root: python benchmarks/rf_tca.py [--out benchmarks/rf_tca.json]

Random samples of two domains, float32, p = 64, with N = 500 frequencies and m = 100 components. CPU seconds of one
thread (time.process_time), medians of several runs made in turn. Asked: at 8,000 samples RF-TCA at least 10 times
faster than vanilla TCA; time linear in the number of samples up to a million; no more than twice its own matrix
products; at most 500 MB more memory for a million samples that come in batches.

Its own products are x Omega^T, the three blocks of S^T S that it computes (the fourth is a mirror image), and S W, over
the same samples in the dtype that it computes in (float64); a stream is not projected and has no S W. What drawing the
stream's samples takes is left out on both sides. "as written" has the whole of S^T S, as equation 9 of the paper.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

# before numpy and scipy are imported: CPU time sums over threads, and their eigensolvers have threads of their own
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import numpy as np
import scipy
import torch
from torch import Tensor

from fedlit.functional import (
    gaussian_kernel,
    random_feature_sums,
    random_fourier_features,
    rf_tca,
    rf_tca_from_sums,
    sample_frequencies,
    tca,
)
from measures import mebibytes, medians

FEATURES, FREQUENCIES, COMPONENTS, GAMMA = 64, 500, 100, 1e-3
BANDWIDTH = math.sqrt(2 * FEATURES)  # about the median distance between the samples
BATCH = 5000
STREAMED = (10_000, 30_000, 100_000, 300_000, 1_000_000)


def samples(number: int, shift: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, FEATURES, generator=generator) + shift


def batches(number: int, shift: float) -> Iterator[Tensor]:
    for start in range(0, number, BATCH):
        yield samples(min(BATCH, number - start), shift, seed=start)


def in_memory(number: int, frequencies: Tensor, repeats: int) -> dict[str, float]:
    """RF-TCA, vanilla TCA and the matrix products of RF-TCA on the same samples."""
    xs, xt = samples(number // 2, 0.0, 0), samples(number // 2, 0.5, 1)
    kernel = partial(gaussian_kernel, bandwidth=BANDWIDTH)
    double, omega = torch.cat([xs, xt]).double(), frequencies.double()
    features = random_fourier_features(double, frequencies)
    cosines, sines = features[:, :FREQUENCIES], features[:, FREQUENCIES:]
    aligner = torch.randn(2 * FREQUENCIES, COMPONENTS, dtype=torch.float64)

    def products() -> None:
        double @ omega.T
        cosines.T @ cosines
        sines.T @ sines
        cosines.T @ sines
        features @ aligner

    def as_written() -> None:
        double @ omega.T
        features.T @ features
        features @ aligner

    actions = {"rf_tca": lambda: rf_tca(xs, xt, COMPONENTS, GAMMA, frequencies)}
    fast = medians({**actions, "products": products, "products_as_written": as_written}, repeats=5 * repeats)
    slow = medians({"tca": lambda: tca(xs, xt, COMPONENTS, GAMMA, kernel)}, repeats)
    return {
        **fast,
        **slow,
        "speedup": slow["tca"] / fast["rf_tca"],
        "per_products": fast["rf_tca"] / fast["products"],
        "per_products_as_written": fast["rf_tca"] / fast["products_as_written"],
    }


def stream(number: int, frequencies: Tensor) -> None:
    source, target = (random_feature_sums(batches(number // 2, shift), frequencies) for shift in (0.0, 0.5))
    rf_tca_from_sums(source, target, COMPONENTS, GAMMA)


def stream_of_products(number: int, frequencies: Tensor) -> None:
    """Draw the same batches and do nothing but the matrix products, in float64."""
    omega = frequencies.double()
    features = torch.zeros(BATCH, 2 * FREQUENCIES, dtype=torch.float64)
    blocks = [torch.zeros(FREQUENCIES, FREQUENCIES, dtype=torch.float64) for _ in range(3)]
    for shift in (0.0, 0.5):
        for batch in batches(number // 2, shift):
            features[: len(batch), :FREQUENCIES] = batch.double() @ omega.T
            cosines, sines = features[: len(batch), :FREQUENCIES], features[: len(batch), FREQUENCIES:]
            for block, left, right in zip(blocks, (cosines, sines, cosines), (cosines, sines, sines), strict=True):
                block.addmm_(left.T, right)


def stream_of_draws(number: int) -> None:
    """Draw the same batches and do nothing with them."""
    for shift in (0.0, 0.5):
        for _ in batches(number // 2, shift):
            pass


def streamed(frequencies: Tensor, repeats: int) -> tuple[list[dict[str, float]], float]:
    """Time of the stream at every size, and the slope of its logarithm."""
    rows = []
    for number in STREAMED:
        actions = {"rf_tca": partial(stream, number, frequencies)}
        actions["products"] = partial(stream_of_products, number, frequencies)
        actions["draws"] = partial(stream_of_draws, number)
        timed = medians(actions, repeats if number <= 100_000 else 1)
        for name in ("rf_tca", "products"):
            timed[name] -= timed["draws"]
        rows.append({"samples": number, **timed, "per_products": timed["rf_tca"] / timed["products"]})
        print("{samples:>9,}  {rf_tca:8.2f} s  {products:8.2f} s  {per_products:5.2f}".format(**rows[-1]), flush=True)
    slope = np.polyfit(np.log([r["samples"] for r in rows]), np.log([r["rf_tca"] for r in rows]), 1)[0]
    return rows, float(slope)


def memory_of_stream(number: int) -> float:
    """Peak memory of the stream above what a fresh process holds before it, in megabytes."""
    command = [sys.executable, str(Path(__file__)), "--peak-of-stream", str(number)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak-of-stream", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    frequencies = sample_frequencies(FREQUENCIES, FEATURES, BANDWIDTH)
    if options.peak_of_stream is not None:
        # torch's and the eigensolver's own memory is there before, whatever the number of samples
        torch.ones(8, 8, dtype=torch.float64) @ torch.ones(8, 8, dtype=torch.float64)
        scipy.linalg.eigh(np.eye(8))
        before = mebibytes("VmRSS")
        stream(options.peak_of_stream, frequencies)
        print(mebibytes("VmHWM") - before)
        return
    result: dict[str, object] = {"asked": {"speedup_at_8000": 10, "per_products": 2, "memory_mb": 500, "slope": 1}}
    print("in memory   RF-TCA (s)  vanilla TCA (s)  speedup  products (s)  RF-TCA/products")
    for number, repeats in ((2_000, options.repeats), (8_000, options.repeats)):
        row = in_memory(number, frequencies, repeats)
        result[f"in_memory_{number}"] = row
        line = "{rf_tca:10.2f}  {tca:15.2f}  {speedup:7.1f}  {products:12.2f}  {per_products:15.2f}"
        print(f"{number:>9,}  " + line.format(**row), flush=True)
    print("streamed       RF-TCA    products  ratio")
    result["streamed"], result["slope"] = streamed(frequencies, options.repeats)
    result["stream_memory_mb"] = {str(number): memory_of_stream(number) for number in (10_000, 1_000_000)}
    print(f"slope of log time over log samples: {result['slope']:.3f}")
    print(f"peak memory added by the stream, MB: {result['stream_memory_mb']}")
    result |= {
        "features": FEATURES, "frequencies": FREQUENCIES, "components": COMPONENTS, "gamma": GAMMA,
        "bandwidth": BANDWIDTH, "batch": BATCH, "seed": 0, "threads": 1, "cores": os.cpu_count(),
        "time": "CPU seconds, medians", "command": "python benchmarks/rf_tca.py",
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__,
            "numpy": np.__version__, "scipy": scipy.__version__,
        },
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
