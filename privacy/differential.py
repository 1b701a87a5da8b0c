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
    for _ in range(4):
        words = torch.frombuffer(bytearray(stream.update(bytes(16 * max(1, count)))), dtype=torch.int64)[: 2 * count]
        # 53 bits each: in (0, 1] for the logarithm, in [0, 1) for the angle (Box and Muller 1958)
        uniform = (words & (2**53 - 1)).to(torch.float64).mul_(2.0**-53)
        radius = uniform[:count].neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
        total += radius.mul_(uniform[count:].mul_(2 * math.pi).cos_())
    return total.div_(2.0)


@final
class Accountant:
    """Counts what each client has released, and reports how much privacy that has cost.

    Every release is a Gaussian mechanism; releases with multipliers z_i compose to one of multiplier z with
    1 / z^2 = sum of 1 / z_i^2, exactly so in Renyi differential privacy (Mironov 2017, corollary 3), from which
    ``dp-accounting`` (``pip install 'fedlit[dp]'``) takes epsilon. No amplification by sampling is claimed:
    participation is drawn from a seed that all parties know.
    """

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}  # sum of 1 / z^2

    def record(self, clients: Iterable[str], noise_multiplier: float) -> None:
        """Count one release of each of ``clients``."""
        for name in clients:
            # below 1e-150, where the square would overflow, nothing is private
            spent = noise_multiplier**-2 if noise_multiplier > 1e-150 else math.inf
            self._spent[name] = self._spent.get(name, 0.0) + spent

    @property
    def clients(self) -> list[str]:
        """Clients that have released anything."""
        return list(self._spent)

    def epsilon(self, client: str, delta: float) -> float:
        """Privacy loss of all releases of ``client`` together, at failure probability ``delta``.

        Raises an `ImportError` if dp-accounting is not installed.
        """
        try:
            from dp_accounting import GaussianDpEvent
            from dp_accounting.rdp import RdpAccountant
        except ImportError as error:
            raise ImportError("accounting for differential privacy needs: pip install 'fedlit[dp]'") from error
        if client not in self._spent:
            return 0.0
        if math.isinf(self._spent[client]):
            return math.inf
        accountant = RdpAccountant()
        accountant.compose(GaussianDpEvent(self._spent[client] ** -0.5))
        return float(accountant.get_epsilon(delta))

    def state_dict(self) -> dict[str, Any]:
        """Spent privacy of each client, as plain values."""
        return dict(self._spent)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._spent = dict(state)
