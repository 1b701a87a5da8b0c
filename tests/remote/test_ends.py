"""Sites that are away when the last round ends: they get the result when they return, or are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from processes import Ended
from refused import slow
from site_runs import plain, start
from stars import struck

pytest.importorskip("grpc")

MASKED = "PairwiseMasking(colluders=0, threshold=2)"
RUN = ("--own", "--everyone", "--steps", "2", "--rounds", "3")
LAST = "local steps:5"
"""In the second of two steps of the last of three rounds."""


def back_at_the_end(
    folder: Path, site: str, method: str, privacy: str = "None", fault: str = LAST
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """What each process has at the end, by its client, and one process in which the client was absent in round 2."""
    arguments = ("--method", method, *RUN, "--privacy", privacy)
    ended = struck(folder, f"{site}:{fault}:kill", *arguments, "--checkpoints", str(folder / "kept"), back=True)
    assert ended[site].exit_code == -9
    results = finished({**ended, site: ended["back"]})
    there = [["clean", "blended", "fonts"]] * 2 + [[name for name in ("clean", "blended", "fonts") if name != site]]
    (scheduled,) = start(*arguments, "--schedule", json.dumps(there))
    return results, scheduled


def finished(ended: dict[str, Ended]) -> dict[str, dict[str, Any]]:
    for name in ("server", "clean", "blended", "fonts"):
        assert not ended[name].error, f"{name}: {ended[name].error}"
    return {name: plain(ended[name].result) for name in ("server", "clean", "blended", "fonts")}


@pytest.mark.parametrize("privacy", ["None", MASKED, "PaillierAffine(key_bits=512)"])
def test_probe(privacy: str, tmp_path: Path) -> None:
    results, scheduled = back_at_the_end(tmp_path, "blended", "FedAvg", privacy)
    print(json.dumps({name: [each["weights"], each["round_idx"], each["metrics"], each["lost"]] for name, each in results.items()}, indent=1))
    print(scheduled["weights"], scheduled["metrics"])
    import glob
    print(sorted(glob.glob(str(tmp_path / "kept/*/*"))))
    assert 0
