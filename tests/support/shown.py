"""Which rows of a table of all methods are tested by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

KINDS = ("FedAvg", "FedDANN", "FedDaDiL", "FedGP auto", "FedMMD", "FedRFTCA", "FedRFTCAClosedForm", "FedRep", "KD3A")
"""A method of each kind: weights, a discriminator, atoms, updates, moments, votes, one pass, personal, knowledge."""


def one_of_each(names: Iterable[str]) -> list[Any]:
    """Parameters of a test of all methods: one of each kind by default, and the others ``slow``."""
    return [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in names]
