r"""How much two-party exchanges may tell about the same moments: below what it takes to solve for them.

k numbers y = A m are k equations for M moments, and fewer than M can be enough: the moments are integers of few digits
on a grid, so that lattice reduction (Lenstra, Lenstra and Lovasz, 1982) finds them as soon as y has as many digits as
they have. So bits count. S answers with at most ``output_bits`` for each number, whatever T has put into its reply: k
numbers take one of at most 2^(k output_bits) values, and tell no more vectors m apart. With ``moment_bits`` for a
moment, from minus to plus its bound, S refuses from

.. math:: k \cdot \text{output\_bits} \ge M \cdot \text{moment\_bits} / 2

The half is for what T knows beforehand, such as that moments are much smaller than their bound: of the 26 bits of the
default grid 13 count, which moments of 2^-8 have (with their sign, above steps of 2^-20).

On the safe side: every number that S grants counts, whether T asks for it or not, and with the greatest range that it
can have; and exchanges with all receivers count together, since they may pool what they learn. Not counted are moments
that differ: those of two batches, or of one batch under networks that hardly differ, count apart. And below the bound T
still learns k linear functions of the moments, of its own choice: what it singles out is not hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from typing import final

from torch import Tensor

from fedlit.checks import refuse
from fedlit.privacy.errors import SolvableError

COLLUSION = (
    "receivers of one source may, whom its one key pair serves: what it grants about the same moments is counted over "
    "all of them. The channel to each must be authenticated"
)
"""Who must not join forces, as a text for privacy reports."""

_DIGEST_BYTES = 16


def most_outputs(num_moments: int, moment_bits: int, output_bits: int) -> int:
    """Greatest number of outputs that S grants in all about the same moments: see the module."""
    return (num_moments * moment_bits - 1) // (2 * output_bits)


def of_moments(revealed: bool) -> str:
    """What is hidden from T, as a text for privacy reports."""
    return "nothing from the target, by reveal_moments" if revealed else "the moments, from the target"


def of_outputs(revealed: bool) -> str:
    """What T learns, as a text for privacy reports."""
    if revealed:
        return "y, to the target, however many numbers it asks for: it can solve for the moments themselves"
    return (
        "y, to the target: linear functions of the moments that it chooses, with fewer than half as many bits as the "
        "moments have, over all exchanges about the same ones; the source refuses more"
    )


def key_of(moments: Tensor) -> bytes:
    """Name of contiguous float64 moments on the CPU."""
    return sha256(moments.numpy().tobytes()).digest()[:_DIGEST_BYTES]


@final
class Granted:
    """Counts what one holder of moments lets others learn, by the moments themselves.

    Args:
        outputs: What was granted in earlier processes, by `key_of` the moments.
    """

    def __init__(self, outputs: Mapping[bytes, int] | None = None) -> None:
        self._outputs: Counter[bytes] = Counter(outputs)

    def add(self, moments: Tensor, outputs: int, most: int) -> None:
        """Count ``outputs`` more about contiguous moments on the CPU; a `SolvableError` if they were over ``most``."""
        key = key_of(moments)
        total = self._outputs[key] + outputs
        if total > most:
            rule = f"at most {most}, in all exchanges about the same {len(moments)} moments"
            way_out = (
                "from more they can be solved for. Ask for fewer, have more moments, or set reveal_moments=True on the "
                "protocol, which then hides nothing"
            )
            refuse("max_outputs", rule, total, way_out, SolvableError)
        self._outputs[key] = total
