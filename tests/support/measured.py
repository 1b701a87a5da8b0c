"""What has to be measured in a process of its own."""

from __future__ import annotations

import resource

import torch
from torch import Tensor

from fedlit.functional import random_feature_sums, sample_frequencies


def sums_of_a_stream(batches: int) -> tuple[int, float]:
    """Samples in a sum of random features over so many batches of 10,000, and the MB by which the process grew."""
    generator = torch.Generator().manual_seed(0)
    omega = sample_frequencies(100, 16, 4.0)

    def draw() -> Tensor:
        return torch.randn(10_000, 16, generator=generator)

    random_feature_sums([draw()], omega)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
    sums = random_feature_sums((draw() for _ in range(batches)), omega)
    return sums.count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
