"""Faults at random moments of small runs: how the others end, whether as promised, and when it was noticed."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import KINDS, PHASES
from site_runs import plain, start
from stars import struck

BACKENDS = {
    "plain": "None",
    "masking": "PairwiseMasking(colluders=0)",
    "masking, 2 of 3 shares": "PairwiseMasking(colluders=0, threshold=2)",
}
ROUNDS, STEPS = 4, 2
AFTER_IT_HAS_SPOKEN = ("unmasking", "download")
"""Phases of a round in which a site counts in the round's mean already; a checkpoint belongs to the next."""


@dataclass(frozen=True)
class Moment:
    """When a fault strikes, and which."""

    phase: str
    number: int
    kind: str
    backend: str


def moments(count: int, seed: int = 0) -> list[Moment]:
    """Random ones, each phase and kind as often as another."""
    draw = random.Random(seed)
    grid = [(phase, kind) for phase in PHASES for kind in KINDS]
    found = []
    for place in range(count):
        phase, kind = grid[place % len(grid)]
        masked = phase in ("opening", "unmasking") or draw.random() < 0.5
        backend = draw.choice([*BACKENDS][1:]) if masked else "plain"
        # enrolment is two steps, an opening two; there is one mean in a round, and one download
        most = {"local steps": ROUNDS * STEPS, "opening": 2 + 2 * ROUNDS}.get(phase, ROUNDS)
        found.append(Moment(phase, draw.randrange(most), kind, backend))
    return found


def outcome(moment: Moment) -> dict[str, Any]:
    """What came of a fault: how the others ended, and after how many seconds it was noticed."""
    method = ("--method", "FedAvg", "--own", "--everyone", "--rounds", str(ROUNDS), "--steps", str(STEPS))
    arguments = (*method, "--privacy", BACKENDS[moment.backend], "--wait-for", "5")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        fault = f"blended:{moment.phase}:{moment.number}:{moment.kind}"
        ended = struck(place, fault, *arguments, "--checkpoints", str(place / "kept"))
        hit, seen = place / "struck", place / "noticed"
        if not hit.exists():
            return {"outcome": "did not strike", "seconds": 0.0}
        seconds = seen.stat().st_mtime - hit.stat().st_mtime if seen.exists() else 0.0
        round_idx = int(hit.read_text())
    others = [ended[name] for name in ("server", "clean", "fonts")]
    errors = [one.error.strip().splitlines()[-1].split(":")[0].split(".")[-1] for one in others if one.error]
    if errors:
        whole = len(errors) == len(others) and {*errors} <= NAMED
        return {"outcome": "stopped" if whole else "broken", "seconds": seconds, "errors": errors}
    first = round_idx + (moment.phase in AFTER_IT_HAS_SPOKEN)
    there = [["clean", "blended", "fonts"] if each < first else ["clean", "fonts"] for each in range(ROUNDS)]
    (scheduled,) = start(*arguments, "--schedule", json.dumps(there))
    results = [plain(one.result) for one in others]
    weights = {name: each for result in results for name, each in result["weights"].items()}
    equal = all(scheduled["weights"][name] == weights[name] for name in weights)
    return {"outcome": "finished" if equal else "other weights", "seconds": seconds}


NAMED = {
    *("FederationError", "QuorumError", "LostClientsError", "KeyCheckError", "PeerFailedError", "DecodeError"),
    "ServerLostError",  # of a server that ends by a LostClientsError, and may come back
}
"""Errors that say why a run cannot go on."""
