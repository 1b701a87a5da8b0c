"""Actions of each rank of a federation over several, for test_processes.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedlit.federation import DivergedError, Facts, Federation, Fraction, Schedule
from fedlit.federation.transport import ProcessGroup
from fedlit.privacy import AffineGrid, FixedPoint, GaussianMechanism, PaillierAffine, PlainAffine
from pads import AdditivePads

NAMES = ["a", "b", "c", "d", "t"]
TIMEOUT = 1.0


def federation(transport: Any, **arguments: Any) -> Federation:
    return Federation(NAMES, "t", transport=transport, **{"seed": 5, **arguments})


def payloads(fed: Federation, salt: int) -> dict[str, Any]:
    """Different numbers, and for exchanges different shapes, at each local client."""
    made = {}
    for client in fed.local_clients:
        index = NAMES.index(client.name)
        generator = torch.Generator().manual_seed(100 * salt + index)
        made[client.name] = {"w": torch.randn(4, 3, generator=generator), "n": torch.tensor(salt + index)}
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
    return PaillierAffine(GRID, key_bits=512, insecure_test_keys=True, reveal_moments=True)


SPOILED: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "far": ("t", lambda own: own["moments"].__setitem__(3, 99.0)),
    "nan": ("t", lambda own: own["moments"].__setitem__(3, float("nan"))),
    "wide": ("b", lambda own: own["matrix"].__setitem__((0, 0), -99.0)),
    "blank": ("a", lambda own: own["matrix"].__setitem__((0, 0), float("nan"))),
    "ragged": ("d", lambda own: own.update(matrix=own["matrix"][:, :5])),
    "greedy": ("a", lambda own: own.update(matrix=torch.ones(3, 6), offset=torch.ones(3))),
}
"""By case, the client whose numbers are changed, and how."""


def spoil(case: str) -> Callable[[str, dict[str, Any]], None]:
    client, change = SPOILED[case]
    return lambda name, own: change(own) if name == client else None


def affine_failures(transport: Any) -> dict[str, Any]:
    """Errors of one party of a pair."""
    ended: dict[str, Any] = {}
    for case in SPOILED:
        for when in ("", " before keys"):
            fed = federation(transport, two_party=PlainAffine(GRID))
            if not when:
                affine(fed)  # keys are there already: the next message is the first that can fail
            ended[case + when] = attempt(lambda fed=fed, case=case: affine(fed, 1, spoil(case)))
    mechanism = GaussianMechanism(1.0, 1.0)
    noisy = federation(transport, two_party=PlainAffine(), differential_privacy={"dot": mechanism})
    affine(noisy)
    ended["nan under noise"] = attempt(lambda: affine(noisy, 1, spoil("nan")))

    def out_of_step() -> None:
        fed = federation(transport, two_party=PlainAffine())
        if transport.rank == 0:
            fed.exchange("dot", {})
        else:
            fed.affine("dot", {}, {}, [(fed.clients[4], fed.clients[0])], 1)

    ended["affine out of step"] = attempt(out_of_step)
    ended["afterwards"] = attempt(lambda: affine(federation(transport, two_party=PlainAffine(GRID))))
    return ended


def attempt(action: Callable[[], Any]) -> tuple[str, str, float]:
    """Kind and text of the error that ``action`` ends in, and the seconds it took."""
    start = time.perf_counter()
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), time.perf_counter() - start
    return "", "", time.perf_counter() - start


def failures(rank: int, transport: Any) -> dict[str, Any]:
    """Errors of each type as this process raises them; the group stays usable after all of them."""

    def sum_with(tensor: Callable[[Tensor], Tensor]) -> Callable[[Federation], Any]:
        def run(fed: Federation) -> None:
            sent = payloads(fed, 0)
            if "t" in sent:
                sent["t"]["w"] = tensor(sent["t"]["w"])
            fed.sum("w", sent)

        return run

    def another_round(fed: Federation) -> None:
        fed.round_idx = rank
        fed.sum("w", payloads(fed, 0))

    def kept(fed: Federation) -> None:
        if rank == 1:
            fed.fail(DivergedError("kept by one"))
        fed.report({}, ["loss"])

    shapes = {name: (3,) if name == "t" else (2,) for name in NAMES}
    masked = {"privacy": AdditivePads(), "participation": Schedule([["a"]])}
    cases: dict[str, Callable[[Federation], Any]] = {
        "out_of_step": lambda fed: fed.mean("one" if rank == 0 else "other", payloads(fed, 0)),
        "other_verb": lambda fed: getattr(fed, "mean" if rank == 0 else "exchange")("same", payloads(fed, 0)),
        "other_report": lambda fed: fed.report({}, ["loss"] if rank == 0 else ["loss", "acc"]),
        "other_round": another_round,
        "diverged": sum_with(lambda w: w * float("nan")),
        "mismatched": sum_with(lambda w: torch.zeros(5)),
        "weightless": lambda fed: fed.mean("w", payloads(fed, 0), weights=dict.fromkeys(NAMES, 1.0) | {"t": 0.0}),
        "kept": kept,
        "shapes": lambda fed: fed.introduce({c.name: Facts(1, shapes[c.name]) for c in fed.local_clients}),
        "disagree": lambda fed: fed.agree("seed", 1 if rank == 0 else 2),
        "not_mine": lambda fed: fed.exchange("w", {"a" if rank else "t": {"w": torch.zeros(1)}}),
        "too_few": lambda fed: fed.sum("w", payloads(fed, 0)),
    }
    return {
        name: attempt(lambda name=name, case=case: case(federation(transport, **(masked if name == "too_few" else {}))))
        for name, case in cases.items()
    }


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
        time.sleep(TIMEOUT + 1)
        federation(last).mean("w", payloads(federation(last), 0))
        os._exit(9)  # as if killed
    results["stalled"] = attempt(lambda: talk(hasty))
    results["died"] = attempt(lambda: talk(last))
    torch.save(results, folder / f"{patient.rank}.pt")
    os._exit(0)  # a group with a dead member cannot be left in order
