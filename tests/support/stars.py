"""Runs of one_site.py around a server: a process for it, and one for each client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import one_site
import processes
from fedlit.remote.certificates import make_certificates
from site_runs import plain


def certificates(folder: Path) -> str:
    if not (folder / "ca.crt").exists():
        make_certificates(folder, "localhost", one_site.SITES)
    return str(folder)


def around(folder: Path, *arguments: str, timeout: float = 90) -> list[dict[str, Any]]:
    """Results of the server and of each site."""
    words = (*arguments, "--star", certificates(folder))
    return [plain(one) for one in processes.results(one_site.run, words, ranks=4, timeout=timeout)]


def struck(
    folder: Path, fault: str, *arguments: str, back: bool = False, timeout: float = 60
) -> dict[str, processes.Ended]:
    """How the server and each site ended a run in which a fault struck one, which may come ``back``.

    Its second process is called ``"back"``.
    """
    words = (*arguments, "--star", certificates(folder), "--fault", fault)
    ranks = 5 + one_site.SITES.index(fault.split(":")[0]) if back else 4
    ended = processes.run(one_site.run, words, ranks=ranks, timeout=timeout)
    named = dict(zip(["server", *one_site.SITES], ended, strict=False))
    return named | {"back": ended[-1]} if back else named
