"""Differential privacy at the source: each client clips what it sends and adds Gaussian noise, before any backend.

The guarantee is about one client's whole message. It differs from the public point that it is clipped around by at
most the clipping norm (zero-out adjacency: Kairouz et al. 2021, section 3.1). Two messages that a client might send
differ by up to twice that: for what swapping its data for other data changes, read epsilon at half the multiplier.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from fedlit.checks import check, check_positive
from fedlit.privacy.errors import InputError
from fedlit.privacy.links import derive
from fedlit.privacy.packing import Payload

_PIECE = 1 << 20
"""Numbers whose noise is drawn at a time: the random bits and steps of each take ten times its room."""

NOISE_VERSION = 2
"""Of how noise is made of a key, `_PIECE` included: a message that is repeated with other noise is another release."""


@final
class GaussianMechanism:
    """Clips a payload to a norm and adds Gaussian noise (Dwork and Roth 2014, appendix A; McMahan et al. 2018).

    Noise comes from the operating system's randomness, never from a seeded generator, so that runs with it do not
    repeat bit for bit. Each number is a sum of four normals, without which the digits of floats separate the noise from
    the signal (Holohan and Braghin 2021); backends on a grid round them off as well.

    Args:
        clip_norm: Greatest L2 norm of what a client sends (C), all entries together, in the units of the payload;
            longer ones are shortened to it.
        noise_multiplier: Standard deviation of the noise of each number, in units of ``clip_norm`` (z).
        delta: Probability with which the guarantee may fail, in (0, 1); keep it below one in the number of clients.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(self, clip_norm: float, noise_multiplier: float, delta: float = 1e-5) -> None:
        check_positive("clip_norm (C)", clip_norm)
        check_positive("noise_multiplier (z)", noise_multiplier)
        check(0 < delta < 1, "delta", "above 0 and below 1", delta)
        self.clip_norm = float(clip_norm)
        self.noise_multiplier = float(noise_multiplier)
        self.delta = float(delta)

    def release(self, payload: Payload, around: Payload | None = None, key: bytes | None = None) -> dict[str, Tensor]:
        """Clipped and noisy ``payload``, to send in its place, in the same names, shapes and types.

        Args:
            payload: Of one client, real numbers. Integer entries are rounded again after the noise, and stay within
                their type.
            around: Public values of the same shapes, such as the weights that all clients started the round with;
                the difference to them is what is clipped. ``None`` is zero.
            key: 32 secret bytes from which the noise is derived, to repeat a release: for one payload alone. ``None``
                draws them.

        Raises an `InputError` if ``around`` lacks an entry of the payload, or the payload is not finite, or has flags
        or complex numbers.
        """
        for name, tensor in payload.items():
            if tensor.is_complex() or tensor.dtype == torch.bool:
                raise InputError(
                    f"entry {name!r} has type {tensor.dtype}, to which no noise can be added: leave it out"
                )
        differences = {name: tensor.detach().to(torch.float64) for name, tensor in payload.items()}
        if around is not None:
            missing = [name for name in payload if name not in around or around[name].shape != payload[name].shape]
            rule = "a value in the shape of each entry of the payload"
            check(not missing, "around", rule, missing, "", InputError, f"none for {missing}")
            around = {name: around[name].detach().to(tensor.device) for name, tensor in payload.items()}
            differences = {name: tensor - around[name] for name, tensor in differences.items()}
        norm = math.sqrt(sum(float(tensor.square().sum()) for tensor in differences.values()))
        if not math.isfinite(norm):
            raise InputError("cannot clip NaN or infinity: the model has diverged")
        shrink = min(1.0, self.clip_norm / norm) if norm else 1.0
        deviation = self.noise_multiplier * self.clip_norm
        released: dict[str, Tensor] = {}
        key = os.urandom(32) if key is None else key
        for name, tensor in payload.items():
            noise = _normals(tensor.numel(), derive(key, "noise", name)).reshape(tensor.shape).to(tensor.device)
            value = (differences[name] * shrink).add_(noise, alpha=deviation)
            if around is not None:
                value += around[name]
            if not tensor.is_floating_point():
                limits = torch.iinfo(tensor.dtype)
                value = value.round().clamp(max(limits.min, -(2**53)), min(limits.max, 2**53))
            released[name] = value.to(tensor.dtype)
        return released

    def __repr__(self) -> str:
        return f"GaussianMechanism(clip_norm={self.clip_norm:g}, noise_multiplier={self.noise_multiplier:g})"


def _normals(count: int, key: bytes) -> Tensor:
    """Independent standard normals, shape (``count``,), float64, from an AES-CTR key that is used once."""
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    total = torch.zeros(count, dtype=torch.float64)
    for piece in torch.split(total, _PIECE) if count else ():
        for _ in range(4):
            words = torch.frombuffer(bytearray(stream.update(bytes(16 * len(piece)))), dtype=torch.int64)
            # 53 bits each: in (0, 1] for the logarithm, in [0, 1) for the angle (Box and Muller 1958)
            uniform = (words & (2**53 - 1)).to(torch.float64).mul_(2.0**-53)
            radius = uniform[: len(piece)].neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
            piece += radius.mul_(uniform[len(piece) :].mul_(2 * math.pi).cos_())
    return total.div_(2.0)


def spent_by(noise_multiplier: float) -> float:
    """Privacy that a release with this multiplier z spends, in units that add up: 1 / z^2."""
    # below 1e-150, where the square would overflow, nothing is private
    return noise_multiplier**-2 if noise_multiplier > 1e-150 else math.inf


def epsilon_of(spent: float, delta: float) -> float:
    r"""Epsilon of Gaussian mechanisms that have ``spent`` together, as of `spent_by`, at failure probability ``delta``.

    The least epsilon at which, with mu = sqrt(spent) and the normal distribution function Phi,

    .. math:: \Phi(\mu/2 - \epsilon/\mu) - e^\epsilon \Phi(-\mu/2 - \epsilon/\mu) \le \delta,

    exactly (Balle and Wang 2018, theorem 8).
    """
    if spent == 0 or math.isinf(spent):
        return spent
    mu = math.sqrt(spent)

    def fails(epsilon: float) -> bool:
        ends = torch.tensor([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu], dtype=torch.float64)
        first, second = torch.special.log_ndtr(ends).tolist()  # logarithms, as exp(epsilon) would overflow
        return bool(first + math.log(-math.expm1(min(0.0, second + epsilon - first)) or 1e-300) > math.log(delta))

    # above it, by the bound for concentrated differential privacy (Bun and Steinke 2016, proposition 1.3)
    low, high = 0.0, fails(0.0) * (spent / 2 + mu * math.sqrt(-2 * math.log(delta)))
    for _ in range(52):
        middle = (low + high) / 2
        low, high = (middle, high) if fails(middle) else (low, middle)
    return high


@final
class Accountant:
    """Counts what each client has released, and reports how much privacy that has cost.

    Every release is a Gaussian mechanism; releases with multipliers z_i compose to one of multiplier z with
    1 / z^2 = sum of 1 / z_i^2, exactly (Dong et al. 2019, corollary 2), also where a release follows from earlier ones,
    and where a budget ends them (Smith and Thakurta 2022). No amplification by sampling is claimed: participation is
    drawn from a seed that all parties know.
    """

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}  # sum of 1 / z^2

    def record(self, clients: Iterable[str], noise_multiplier: float) -> None:
        """Count one release of each of ``clients``."""
        for name in clients:
            self._spent[name] = self.spent(name) + spent_by(noise_multiplier)

    @property
    def clients(self) -> list[str]:
        """Clients that have released anything."""
        return list(self._spent)

    def spent(self, client: str) -> float:
        """Privacy that ``client`` has spent, as `spent_by` adds it up."""
        return self._spent.get(client, 0.0)

    def epsilon(self, client: str, delta: float) -> float:
        """Privacy loss of all releases of ``client`` together, at failure probability ``delta``, exactly."""
        return epsilon_of(self.spent(client), delta)

    def state_dict(self) -> dict[str, Any]:
        """Spent privacy of each client, as plain values."""
        return dict(self._spent)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._spent = dict(state)
