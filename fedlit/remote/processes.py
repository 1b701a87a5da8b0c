"""Processes that a process starts: how long they may take to end, and how many of their last words are told."""

from __future__ import annotations

import subprocess

PATIENCE = 30
"""Seconds that a process has to end once it is told to."""

TOLD = 15
"""Lines of a failed process's output that are shown."""


def await_end(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process has ended that was told to, and kill it if it takes too long."""
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
