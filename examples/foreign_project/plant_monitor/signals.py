"""Vibrations of machines, generated: four conditions, and in each plant another speed and another sensor.

Gdansk's, Oslo's and Lyon's sensors hear high frequencies as well as low ones, or better. Turin's is mounted so that it
hears them less, next to a transformer that hums at 100 Hz, which is also where a misaligned shaft vibrates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RATE, LENGTH = 1024, 256
"""Samples per second, and in one record."""

CONDITIONS = {
    "healthy": (1.0, 0.3, 0.0),
    "imbalance": (2.2, 0.3, 0.0),
    "misalignment": (1.0, 1.4, 0.0),
    "bearing": (1.0, 0.3, 1.2),
}
"""Strength of vibration at the shaft's speed, at twice the speed, and of the ringing of a damaged bearing."""


@dataclass(frozen=True)
class Plant:
    """What is different in a plant.

    Args:
        speed: Of the shafts, turns per second.
        hum: Strength of the mains hum.
        damping: How much less the sensor hears high frequencies: loss, as a power of e, from the lowest to the highest.
        noise: Standard deviation of the sensor's noise.
    """

    speed: float
    hum: float
    damping: float
    noise: float


PLANTS = {
    "gdansk": Plant(speed=48, hum=0.0, damping=0.0, noise=0.3),
    "oslo": Plant(speed=50, hum=0.1, damping=-1.2, noise=0.4),
    "lyon": Plant(speed=51, hum=0.1, damping=-0.5, noise=0.35),
    "turin": Plant(speed=49, hum=0.8, damping=2.0, noise=0.4),
}


def record(plant: str, number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Records of ``number`` machines, shape (number, LENGTH), and their conditions, as many of each."""
    about = PLANTS[plant]
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, columns: int = 1) -> Tensor:
        return low + (high - low) * torch.rand(number, columns, generator=generator)

    def wave(frequency: Tensor | float) -> Tensor:
        return torch.sin(2 * math.pi * frequency * seconds + uniform(0, 2 * math.pi))

    seconds = torch.arange(LENGTH) / RATE
    conditions = torch.arange(number) % len(CONDITIONS)
    strength = torch.tensor(list(CONDITIONS.values()))[conditions] * uniform(0.7, 1.3, columns=3)
    speed = about.speed * uniform(0.98, 1.02)
    hits = 3.6 * speed  # of a ball on the damaged spot, per second; each makes the bearing ring at 330 Hz
    since_hit = ((hits * seconds + uniform(0, 1)) % 1) / hits
    shaft, twice, ringing = strength.split(1, dim=1)
    signals = shaft * wave(speed) + twice * wave(2 * speed) + ringing * wave(330.0) * torch.exp(-40 * since_hit)
    signals = signals + about.hum * wave(100.0)
    signals = signals + about.noise * torch.randn(number, LENGTH, generator=generator)
    spectrum = torch.fft.rfft(signals)
    heard = torch.exp(about.damping * (0.25 - torch.linspace(0, 1, spectrum.shape[1])))
    return torch.fft.irfft(spectrum * heard, n=LENGTH), conditions
