"""Sites that vanish: the others go on as if these had been absent, or stop and say why."""

from __future__ import annotations

from pathlib import Path

import pytest

from site_runs import plain, start
from stars import struck

pytest.importorskip("grpc")

RUN = ("--own", "--everyone", "--rounds", "4", "--steps", "2")


@pytest.mark.parametrize("method", ["FedAvg", "FedGP", "FedMMD", "FedDaDiL", "FedRFTCA", "FedDA"])
def test_a_site_that_is_killed_is_as_one_that_is_away(method: str, tmp_path: Path) -> None:
    arguments = ("--method", method, *RUN)
    # two steps a round: in the second of round 1, or before the first where clients speak in each
    step = 2 if method in ("FedMMD", "FedRFTCA") else 3
    ended = struck(tmp_path, f"blended:local steps:{step}:kill", *arguments)
    assert ended["blended"].exit_code == -9
    (scheduled,) = start(*arguments, "--absent", "{'blended': [1, 2, 3]}")
    for name in ("server", "clean", "fonts"):
        assert not ended[name].error, ended[name].error
        result = plain(ended[name].result)
        assert result["lost"] == [2]
        assert all(result["weights"][client] == scheduled["weights"][client] for client in result["weights"])
