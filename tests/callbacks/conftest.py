"""What tests of callbacks share."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made and not written, which takes most of such a run: for tests that read no file."""
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kwargs: Path(path).touch())
