"""Random streams that are pure functions of who draws and when, so that there is no generator state to lose.

A stream is named by (seed, client, purpose, round, step). The same name gives the same numbers in one process and in
many, before and after a resume. It holds for torch's, numpy's and Python's global generators. Generators that an object
holds (``numpy.random.default_rng()``, ``random.Random()``) have a state of their own, which no stream reaches.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from the text of ``parts``; equal on every machine and Python version."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def global_seed() -> int:
    """The seed given to ``lightning.seed_everything``, or 0 if it was never called."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def was_seeded() -> bool:
    """Return whether ``lightning.seed_everything`` was called."""
    return "PL_GLOBAL_SEED" in os.environ


@contextmanager
def torch_streams(device: torch.device | None = None) -> Iterator[None]:
    """Keep the global random states of torch, numpy and Python untouched by `enter_stream` inside the block."""
    cpu_state, python_state = torch.random.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002, of the generator that augmentations of others draw from
    device_state = torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else None
    try:
        yield
    finally:
        torch.random.set_rng_state(cpu_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)
        if device is not None and device_state is not None:
            torch.cuda.set_rng_state(device_state, device)


def enter_stream(*name: object, device: torch.device | None = None) -> None:
    """Point the global generators at the start of the stream called ``name``; use inside `torch_streams`."""
    seed = stable_seed(*name)
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002, it takes 32 bits
    random.seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed(seed)
