"""Processes that a process starts: how long they may take to end, and how many of their last lines are shown."""

from __future__ import annotations

import subprocess

PATIENCE = 30
"""Seconds that a process has to end once it was asked to."""

LAST_LINES = 15
"""Lines of a failed process's output that are shown."""


def await_end(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process has ended that was asked to, and kill it if it takes too long."""
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
