"""Runs of one_site.py over processes: what they give, and what they say when they fail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import one_site
import processes


def start(*arguments: str) -> list[dict[str, Any]]:
    """Results of all processes of a run; each of several is forked, as if a launcher had started it."""
    if devices(arguments) == 1:
        return [plain(one_site.run(arguments))]
    return [plain(one) for one in processes.results(one_site.run, arguments, ranks=devices(arguments), timeout=180)]


def under_torchrun(*arguments: str) -> list[dict[str, Any]]:
    """The same as `start`, by what ``torchrun`` is made of: an agent that joins, starts and watches the processes."""
    (results,) = processes.results(_agent, arguments, timeout=180)
    return [plain(one) for one in results]


def _agent(arguments: Sequence[str]) -> list[dict[str, Any]]:
    where = {"run_id": "fedlit", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "start_method": "fork"}
    config = LaunchConfig(1, 1, nproc_per_node=devices(arguments), max_restarts=0, monitor_interval=0.1, **where)
    return list(elastic_launch(config, one_site.run)(arguments).values())


def trouble(*arguments: str) -> str:
    """What all processes of a run say that fails, on every process."""
    ended = processes.run(one_site.run, arguments, ranks=devices(arguments), timeout=60)
    assert all(one.error or one.exit_code for one in ended), ended
    return "\n".join(one.output + one.error for one in ended)


def devices(arguments: Sequence[str]) -> int:
    return int(arguments[arguments.index("--devices") + 1]) if "--devices" in arguments else 1


def plain(result: dict[str, Any]) -> dict[str, Any]:
    """As it is printed and read again."""
    return json.loads(json.dumps(result))


def merged(results: list[dict]) -> dict[str, str]:
    """Fingerprints of all clients' weights, whichever process hosts them."""
    return {client: digest for result in results for client, digest in result["weights"].items()}
