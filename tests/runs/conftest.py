"""What tests of exported files share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache

import pytest


@pytest.fixture(scope="module")
def translations_kept() -> Iterator[None]:
    """Keep the translations to ONNX, whose source PyTorch parses anew for each file, for half of the time it takes."""
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError, AttributeError):  # of another release
            from torch.onnx._internal.exporter._registration import ONNXRegistry

            patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        yield
