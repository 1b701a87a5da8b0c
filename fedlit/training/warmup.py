"""How many rounds of a run warm it up, given as such or as a share of the planned ones."""

from __future__ import annotations

import math


def check_warmup(warmup: int | float) -> None:
    """Raise a `ValueError` unless it is a number of rounds, or a share of the planned ones."""
    if not (0 < warmup < 1 or (warmup >= 0 and float(warmup).is_integer())):
        raise ValueError(
            "warmup_rounds must be a number of rounds, at least 0, or a share of the planned ones, above 0 and below "
            f"1, got {warmup}"
        )


def is_share(warmup: int | float) -> bool:
    """Whether it is a share of the planned rounds."""
    return 0 < warmup < 1


def warmup_of(warmup: int | float, planned: int | None) -> int:
    """Rounds of warm-up in a run of so many: of a share the whole ones in it, so that a round is left for the method.

    Args:
        warmup: As the user gave it.
        planned: Rounds of the whole run; ``None`` has no planned end.

    Raises:
        ValueError: If it is a share of a run without a planned end.
    """
    if not is_share(warmup):
        return int(warmup)
    if planned is None:
        raise ValueError(
            f"warmup_rounds={warmup} is a share of the planned rounds, and a run with max_epochs=-1 has no planned "
            "end: give max_epochs, or warmup_rounds as a number of rounds"
        )
    return math.floor(warmup * planned + 1e-9)  # 0.29 of 100 are 29
