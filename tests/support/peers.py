"""What each rank of a federation over several does in test_processes.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fedlit.federation import DivergedError, Facts, Federation, Fraction, RosterError, Schedule
from fedlit.federation.transport import ProcessGroup
from fedlit.privacy import AffineGrid, FixedPoint, GaussianMechanism, PaillierAffine, PlainAffine
from pads import AdditivePads

NAMES = ["a", "b", "c", "d", "t"]
TIMEOUT = 3.0


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
        transport, participation=Fraction(0.5), heard={"drop": Fraction(0.5)}, privacy=privacy, placement=placement
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


GRID = AffineGrid(*[FixedPoint(16, 8.0)] * 3)


def affine(fed: Federation, salt: int = 0, spoil: Callable[[str, dict[str, Any]], None] | None = None) -> Any:
    """Products of t's moments with maps of a, b and d, and of c's with one of t; ``spoil`` changes what one has."""
    own: dict[str, dict[str, Any]] = {}
    for client in fed.local_clients:
        generator = torch.Generator().manual_seed(1000 * salt + NAMES.index(client.name))
        numbers = [torch.randn(*shape, generator=generator) for shape in ((6,), (2, 6), (2,))]
        own[client.name] = dict(zip(("moments", "matrix", "offset"), numbers, strict=True))
        if spoil is not None:
            spoil(client.name, own[client.name])
    first = {"a": "t", "b": "t", "d": "t", "t": "c"}
    clients = {client.name: client for client in fed.clients}
    return fed.affine(
        "dot",
        {name: own[name]["moments"] for name in ("t", "c") if name in own},
        {name: {first[name]: (own[name]["matrix"], own[name]["offset"])} for name in first if name in own},
        [(clients[holder], clients[learner]) for learner, holder in first.items()],
        2,
    )


def affine_script(transport: Any, protocol: Any, placement: Any = None) -> dict[str, Any]:
    """Four rounds, in which sources come and go; what local clients learn."""
    fed = federation(transport, participation=Fraction(0.5), placement=placement, two_party=protocol)
    got = []
    for fed.round_idx in range(4):
        got.append(affine(fed, fed.round_idx))
    state = fed.state_dict()
    return {"got": got, "ledger": state["ledger"], "calls": state["calls"]}


def paillier() -> Any:
    """Quick keys: this is about arithmetic and not about secrecy."""
    return PaillierAffine(GRID, key_bits=512, insecure_test_keys=True)


def affine_failures(transport: Any) -> dict[str, Any]:
    """What goes wrong at one party of a pair."""
    nan = float("nan")

    def far(name: str, own: dict[str, Any]) -> None:
        if name == "t":
            own["moments"][3] = 99.0

    def lost(name: str, own: dict[str, Any]) -> None:
        if name == "t":
            own["moments"][3] = nan

    def wide(name: str, own: dict[str, Any]) -> None:
        if name == "b":
            own["matrix"][0, 0] = -99.0

    def blank(name: str, own: dict[str, Any]) -> None:
        if name == "a":
            own["matrix"][0, 0] = nan

    def ragged(name: str, own: dict[str, Any]) -> None:
        if name == "d":
            own["matrix"] = own["matrix"][:, :5]

    def greedy(name: str, own: dict[str, Any]) -> None:
        if name == "a":
            own["matrix"], own["offset"] = torch.ones(3, 6), torch.ones(3)

    found: dict[str, Any] = {}
    for case in (far, lost, wide, blank, ragged, greedy):
        for when in ("", " before keys"):
            fed = federation(transport, two_party=PlainAffine(GRID))
            if not when:
                affine(fed)  # keys are there already: the next message is the first that can fail
            found[case.__name__ + when] = attempt(lambda fed=fed, case=case: affine(fed, 1, case))
    mechanism = GaussianMechanism(1.0, 1.0)
    noisy = federation(transport, two_party=PlainAffine(), differential_privacy={"dot": mechanism})
    affine(noisy)
    found["lost under noise"] = attempt(lambda: affine(noisy, 1, lost))

    def out_of_step() -> None:
        fed = federation(transport, two_party=PlainAffine())
        if transport.rank == 0:
            fed.exchange("dot", {})
        else:
            fed.affine("dot", {}, {}, [(fed.clients[4], fed.clients[0])], 1)

    found["out of step"] = attempt(out_of_step)
    found["afterwards"] = attempt(lambda: affine(federation(transport, two_party=PlainAffine(GRID))))
    return found


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
        fed = federation(transport, privacy=AdditivePads(), participation=Schedule([["a"]]))
        fed.sum("w", payloads(fed, 0))

    for case in (
        out_of_step, other_verb, other_report, other_round, diverged, mismatched, weightless, kept, shapes, disagree,
        not_mine, too_few,
    ):  # fmt: skip
        found[case.__name__] = attempt(case)
    assert issubclass(RosterError, ValueError)
    return found


def everything(transport: Any) -> dict[str, Any]:
    """What this rank has seen after all that tests of a federation over several ranks ask for."""
    results: dict[str, Any] = {"script": script(transport)}
    if transport.world_size == 2:
        results["placed"] = script(transport, placement=[["t", "b"], ["d", "a", "c"]])
    results["affine"] = affine_script(transport, PlainAffine(GRID))
    results["paillier"] = affine_script(transport, paillier())
    results["failures"] = failures(transport.rank, transport) | affine_failures(transport)
    backend = AdditivePads()
    results["pads"] = script(transport, backend)
    results["log"] = [entry[0] for entry in backend.log]
    return results


def join(folder: Path, world_size: int) -> None:
    """Join the processes that share ``folder``."""
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )


def over_processes(folder: Path, world_size: int) -> dict[str, Any]:
    """`everything` over a process group."""
    join(folder, world_size)
    return everything(ProcessGroup(timedelta(seconds=60)))


def with_the_last_one_lost(folder: Path, world_size: int) -> None:
    """The last process is silent for longer than the others wait, and then dies; each leaves a file."""
    join(folder, world_size)
    patient = ProcessGroup(timedelta(seconds=60))
    hasty, last = ProcessGroup(timedelta(seconds=TIMEOUT)), ProcessGroup(timedelta(seconds=60))
    results: dict[str, Any] = {"script": script(patient)}

    def talk(transport: Any) -> None:
        fed = federation(transport)
        for _ in range(3):
            fed.mean("w", payloads(fed, 0))

    if patient.rank == world_size - 1:
        torch.save(results, folder / f"{patient.rank}.pt")
        time.sleep(TIMEOUT + 2)
        federation(last).mean("w", payloads(federation(last), 0))
        os._exit(9)  # as if killed
    results["stalled"] = attempt(lambda: talk(hasty))
    results["died"] = attempt(lambda: talk(last))
    torch.save(results, folder / f"{patient.rank}.pt")
    os._exit(0)  # a group with a dead member cannot be left in order
