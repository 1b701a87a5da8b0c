"""One privacy backend of fedlit by itself, without Trainer and without processes: a mean that nobody's part shows in.

How strongly a healthy machine vibrates at each frequency is worth knowing for all plants together; a plant's own
figures are nobody else's business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedlit.privacy import PairwiseMasking
from plant_monitor.signals import CONDITIONS, record


def healthy_spectrum(plant: str, machines: int = 200, seed: int = 0) -> Tensor:
    """Mean amplitude of a plant's healthy machines at each frequency."""
    signals, conditions = record(plant, machines, seed)
    healthy = signals[conditions == list(CONDITIONS).index("healthy")]
    return torch.fft.rfft(healthy, norm="forward").abs().mean(dim=0)


def secure_mean(spectra: dict[str, Tensor]) -> Tensor:
    """Mean over plants, each of which sends its spectrum behind masks that cancel in the sum."""
    payloads = {plant: {"spectrum": spectrum} for plant, spectrum in spectra.items()}
    return PairwiseMasking().mean(payloads)["spectrum"]
