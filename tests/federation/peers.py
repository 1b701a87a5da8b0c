"""One process of a federation over several, started by test_processes.py; also the script that all of them follow."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fedlit.federation import DivergedError, Facts, Federation, Fraction, RosterError, Schedule
from fedlit.federation.transport import ProcessGroup

NAMES = ["a", "b", "c", "d", "t"]
TIMEOUT = 3.0


def toy_backend() -> Any:
    spec = importlib.util.spec_from_file_location(
        "contract", Path(__file__).parents[1] / "privacy" / "test_in_federation.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.AdditivePads()


def federation(transport: Any, **arguments: Any) -> Federation:
    return Federation(NAMES, "t", transport=transport, **{"seed": 5, **arguments})


def payloads(fed: Federation, salt: int) -> dict[str, Any]:
    """Different numbers, and for exchanges different shapes, at each local client."""
    made = {}
    for client in fed.local_clients:
        generator = torch.Generator().manual_seed(100 * salt + NAMES.index(client.name))
        made[client.name] = {"w": torch.randn(4, 3, generator=generator), "n": torch.tensor(salt + len(made))}
        made[client.name]["n"] = torch.tensor(salt + NAMES.index(client.name))
    return made


def script(transport: Any, privacy: Any = None, placement: Any = None) -> dict[str, Any]:
    """Everything a federation can do; returns what local clients got."""
    fed = federation(
        transport, participation=Fraction(0.5), drops={"drop": Fraction(0.5)}, privacy=privacy, placement=placement
    )
    fed.introduce({client.name: Facts(10 + NAMES.index(client.name), (2, 2)) for client in fed.local_clients})
    got: list[Any] = []
    for fed.round_idx in range(4):
        sent = payloads(fed, fed.round_idx)
        got.append(fed.catch_up("mean"))
        ragged = {name: {"w": sent[name]["w"][: 1 + NAMES.index(name) % 4]} for name in sent}
        got.append(fed.exchange("broadcast", ragged))
        got.append(fed.exchange("routed", sent, to={"t": fed.sources, "a": ["t"], "b": ["c", "t"]}))
        got.append(fed.exchange("drop", sent, to=["t"]))
        got.append(fed.mean("mean", sent, weights=fed.weights))
        got.append(fed.mean("some", sent, among=fed.sources, to=["t"]))
        got.append(fed.sum("sum", sent))
        got.append(fed.report({name: {"loss": float(sent[name]["w"][0, 0])} for name in sent}, ["loss", "acc"]))
    state = fed.state_dict()
    return {"got": got, "ledger": state["ledger"], "weights": fed.weights, "calls": state["calls"]}


def attempt(action: Callable[[], Any]) -> tuple[str, str, float]:
    """Kind and text of the error that ``action`` ends in, and the seconds it took."""
    start = time.perf_counter()
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), time.perf_counter() - start
    return "", "", time.perf_counter() - start


def failures(rank: int, transport: Any) -> dict[str, Any]:
    """What each kind of failure looks like from this process; the group stays usable after all of them."""
    found: dict[str, Any] = {}

    def out_of_step() -> None:
        fed = federation(transport)
        fed.mean("one" if rank == 0 else "other", payloads(fed, 0))

    def other_verb() -> None:
        fed = federation(transport)
        getattr(fed, "mean" if rank == 0 else "exchange")("same", payloads(fed, 0))

    def other_report() -> None:
        federation(transport).report({}, ["loss"] if rank == 0 else ["loss", "acc"])

    def other_round() -> None:
        fed = federation(transport)
        fed.round_idx = rank
        fed.sum("w", payloads(fed, 0))

    def diverged() -> None:
        fed = federation(transport)
        sent = payloads(fed, 0)
        if fed.is_local("t"):
            sent["t"]["w"][0, 0] = float("nan")
        fed.mean("w", sent)

    def mismatched() -> None:
        fed = federation(transport)
        sent = payloads(fed, 0)
        if fed.is_local("t"):
            sent["t"]["w"] = torch.zeros(5)
        fed.sum("w", sent)

    def weightless() -> None:
        fed = federation(transport)
        fed.mean("w", payloads(fed, 0), weights={**dict.fromkeys(NAMES, 1.0), "t": 0.0})

    def kept() -> None:
        fed = federation(transport)
        if rank == 1:
            fed.fail(DivergedError("kept by one"))
        fed.report({}, ["loss"])

    def shapes() -> None:
        fed = federation(transport)
        fed.introduce({c.name: Facts(1, (3,) if c.is_target else (2,)) for c in fed.local_clients})

    def disagree() -> None:
        federation(transport).agree("seed", 1 if rank == 0 else 2)

    def not_mine() -> None:
        fed = federation(transport)
        fed.exchange("w", {"a" if rank else "t": {"w": torch.zeros(1)}})

    def too_few() -> None:
        fed = federation(transport, privacy=toy_backend(), participation=Schedule([["a"]]))
        fed.sum("w", payloads(fed, 0))

    for case in (
        out_of_step, other_verb, other_report, other_round, diverged, mismatched, weightless, kept, shapes, disagree,
        not_mine, too_few,
    ):  # fmt: skip
        found[case.__name__] = attempt(case)
    assert issubclass(RosterError, ValueError)
    return found


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    patient = ProcessGroup(timedelta(seconds=60))
    hasty, last = ProcessGroup(timedelta(seconds=TIMEOUT)), ProcessGroup(timedelta(seconds=60))
    results: dict[str, Any] = {"script": script(patient)}
    if world_size == 2:
        results["placed"] = script(patient, placement=[["t", "b"], ["d", "a", "c"]])
    results["failures"] = failures(rank, patient)
    backend = toy_backend()
    results["pads"] = script(patient, backend)
    results["log"] = [entry[0] for entry in backend.log]

    def talk(transport: Any) -> None:
        fed = federation(transport)
        for _ in range(3):
            fed.mean("w", payloads(fed, 0))

    if rank == world_size - 1:
        time.sleep(TIMEOUT + 2)
    else:
        results["stalled"] = attempt(lambda: talk(hasty))
        torch.save(results, folder / f"{rank}.pt")
    if rank == world_size - 1:
        torch.save(results, folder / f"{rank}.pt")
        federation(last).mean("w", payloads(federation(last), 0))
        os._exit(9)  # as if killed
    results["died"] = attempt(lambda: talk(last))
    torch.save(results, folder / f"{rank}.pt")
    os._exit(0)  # a group with a dead member cannot be left in order


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
