"""Tables on a screen, or in a file; without torch, so that commands that need none can print theirs at once."""

from __future__ import annotations

import sys

from rich.console import Console, RenderableType


def show(what: RenderableType) -> None:
    """Print a table; in a file or a pipe as wide as it needs, as there is no screen to fit it to."""
    console = Console()
    if not sys.stdout.isatty():
        wide = Console(width=10_000)
        console = Console(width=max(80, wide.measure(what).maximum))
    console.print(what)
