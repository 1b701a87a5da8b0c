"""Hostile processes: what they send is refused by stock code on the honest side."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import one_site
import processes
from fedlit.federation import DivergedError, Facts, Federation, PeerFailedError
from fedlit.federation import transport as transports
from fedlit.federation.documents import document
from fedlit.federation.messenger import KINDS
from fedlit.federation.transport import MOST_BYTES, Transport
from fedlit.federation.wire import part
from fedlit.privacy import DecodeError
from fedlit.run.gathering import Part
from thread_transport import on_ranks

NAMES = ["a", "b", "t"]


class MakesFolder:
    def __reduce__(self) -> Any:
        return os.mkdir, ("stolen",)


def pickled() -> Tensor:
    return torch.tensor(list(pickle.dumps(MakesFolder())), dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def placed(transport: Transport) -> Federation:
    return Federation(NAMES, "t", transport=transport, placement=[["a", "b"], ["t"]])


def at_rank_0(honest: Callable[[Federation], Any], hostile: Callable[[Transport], Any]) -> BaseException:
    """The error of rank 0, which hosts two clients, while rank 1 is hostile."""

    def both(transport: Transport) -> BaseException | None:
        try:
            hostile(transport) if transport.rank else honest(placed(transport))
        except Exception as error:
            return error
        return None

    error = on_ranks(both, 2, timeout=0.5)[0]
    assert error is not None, "rank 0 has noticed nothing"
    assert not Path("stolen").exists(), "code of rank 1 has run"
    return error


def sends(message: Tensor, announced: int | None = None) -> Callable[[Transport], Any]:
    """A peer that takes part in an exchange of values with this message."""

    def hostile(transport: Transport) -> None:
        size = len(message) if announced is None else announced
        (theirs, _) = transport.meet(torch.tensor([size]), "a lie")
        transport.swap([(0, 1, int(theirs)), (1, 0, size)], [message], "a lie")

    return hostile


def agreement(federation: Federation) -> None:
    federation.agree("a word", "good")


def introduction(federation: Federation) -> None:
    federation.introduce({"a": Facts(3, (2,)), "b": Facts(3, (2,))})


@pytest.mark.parametrize("honest", [agreement, introduction])
def test_what_is_pickled_is_no_message(honest: Callable[[Federation], Any]) -> None:
    assert isinstance(at_rank_0(honest, sends(pickled())), DecodeError)


@pytest.mark.parametrize("size", [-1, MOST_BYTES + 1])
def test_sizes_are_checked_before_memory_is_taken(size: int) -> None:
    error = at_rank_0(agreement, sends(pickled(), announced=size))
    assert isinstance(error, DecodeError)
    assert f"{size} bytes are announced by 1" in str(error)


@pytest.mark.parametrize(
    "sent",
    [
        *(None, {}, {"a": (1, (2,))}, {"x": (1, (2,))}, {("t",): (1, (2,))}, {"t": 1}),
        *({"t": fact} for fact in ((-1, (2,)), (1.0, (2,)), (1, [2]), (1, (-2,)), (True, (2,)))),
    ],
)
def test_a_process_introduces_its_own_clients_and_by_numbers(sent: Any) -> None:
    error = at_rank_0(introduction, sends(document(sent, "")))
    assert ("['t'] have no training data" if sent == {} else "rank 1 introduces client") in str(error)
    assert isinstance(error, DecodeError) == (sent != {})


def fails_with(sent: Any) -> Callable[[Transport], Any]:
    """A peer that announces a failure, and then sends this as its error."""

    def hostile(transport: Transport) -> None:
        federation = placed(transport)
        frame = transport.meet

        def failed(words: Tensor, doing: str) -> list[Tensor]:
            words = words.clone()
            words[3] = 1
            return frame(words, doing)

        messenger = federation._messenger
        messenger.transport = type(
            "Failed", (), {"meet": staticmethod(failed), "world_size": 2, "rank": 1, "lost": frozenset()}
        )()
        messenger._raise_everywhere = lambda failure: sends(document(sent, ""))(transport)  # type: ignore[method-assign]
        federation.check("anything", None)

    return hostile


@pytest.mark.parametrize(
    ("sent", "expected", "text"),
    [
        (["DivergedError", "the loss is NaN"], DivergedError, "the loss is NaN [raised by rank 1]"),
        (["annotations", "x"], PeerFailedError, "x [raised by rank 1]"),
        (["__builtins__", "x"], PeerFailedError, "x [raised by rank 1]"),
        (["SystemExit", "x"], PeerFailedError, "x [raised by rank 1]"),
        (["DivergedError", "x" * 1_000_000], DivergedError, "x" * 10_000 + " [raised by rank 1]"),
        (7, PeerFailedError, "7 [raised by rank 1]"),
        ([], PeerFailedError, "[] [raised by rank 1]"),
        (None, PeerFailedError, "a process announced that it failed, and then sent no error"),
    ],
)
def test_a_peers_failure_is_an_error_of_this_package_whatever_it_sends(sent: Any, expected: type, text: str) -> None:
    error = at_rank_0(lambda federation: federation.check("anything", None), fails_with(sent))
    assert type(error) is expected
    assert str(error) == text


def test_a_process_reports_of_its_own_clients_alone() -> None:
    def reports_of_others(transport: Transport) -> None:
        federation = placed(transport)
        gather = federation._messenger.all_gather

        def lie(table: Tensor, channel: str) -> list[Tensor]:
            table[:, 0] = torch.tensor([[float("nan")], [1.0]])  # of a, after an announcement of t alone
            return gather(table, channel)

        federation._messenger.all_gather = lie  # type: ignore[method-assign]
        federation.report({"t": {"loss": 1.0}}, ["loss"])

    def honest(federation: Federation) -> None:
        federation.report({"a": {"loss": 2.0}}, ["loss"])

    error = at_rank_0(honest, reports_of_others)
    assert "rank 1 reports numbers of clients that it does not host" in str(error)


def test_a_process_announces_messages_of_its_own_clients_alone() -> None:
    def announces(transport: Transport) -> None:
        placed(transport)._messenger.announce("w", {"b": 30}, KINDS.index("exchange"))

    error = at_rank_0(lambda federation: federation.exchange("w", {"a": {"x": torch.ones(2)}}), announces)
    assert isinstance(error, DecodeError)
    assert "rank 1 announces a message of 'b'" in str(error)


def test_a_server_that_leaves_out_the_total_is_an_error() -> None:
    def both(transport: Transport) -> str:
        federation = placed(transport)
        if transport.rank == 0:
            announce = federation._messenger.announce
            federation._messenger.announce = lambda channel, sizes, *more: announce(  # type: ignore[method-assign]
                channel, {name: size for name, size in sizes.items() if name != "server"}, *more
            )
        mine = {client.name: {"x": torch.ones(2)} for client in federation.local_clients}
        with pytest.raises(DecodeError) as error:
            federation.sum("w", mine)
        return str(error.value)

    assert on_ranks(both, 2) == ["the server announces no total over channel 'w', which is due"] * 2


@pytest.mark.parametrize(
    "then",
    [
        lambda federation, mine: federation.sum("w", mine),
        lambda federation, mine: federation.exchange("e", mine),
        lambda federation, mine: federation.report({}, ["loss"]),
        lambda federation, mine: federation.agree("a word", "good"),
        lambda federation, mine: federation.all_gather("a word", lambda name: name),
        lambda federation, mine: federation.see_who_is_there(),
    ],
    ids=["sum", "exchange", "report", "agree", "all_gather", "close"],
)
def test_within_a_step_a_total_that_does_not_open_for_one_fails_elsewhere_at_the_next_exchange(then: Any) -> None:
    def both(transport: Transport) -> tuple[bool, str]:
        federation = placed(transport)
        mine = {client.name: {"x": torch.ones(2)} for client in federation.local_clients}
        meetings: list[str] = []
        meet = transport.meet
        transport.meet = lambda frame, doing: meetings.append(doing) or meet(frame, doing)  # type: ignore
        federation.sum("w", mine)
        with federation.stepping():
            federation.sum("w", mine)
        assert len(meetings) == 3 + 2
        if transport.rank:
            federation._sums.totals._revealed = lambda *_: part({}, "sum")  # type: ignore[method-assign]
        first = True
        with pytest.raises(DecodeError) as error:  # noqa: PT012 (where it is raised is what this is about)
            with federation.stepping():
                federation.sum("w", mine)
            first = False
            then(federation, mine)
        return first, str(error.value)

    text = "part 'sum' must be in the message, got []"
    assert on_ranks(both, 2) == [(False, f"{text} [raised by rank 1]"), (True, text)]


@pytest.mark.parametrize(
    "message",
    [{}, {"bytes": torch.zeros(3, dtype=torch.bfloat16)}, {"bytes": torch.zeros(2, 2, dtype=torch.uint8)}],
)
def test_parts_of_a_message_have_the_type_and_form_that_is_due(message: Any) -> None:
    with pytest.raises(DecodeError, match="part 'bytes'"):
        part(message, "bytes", torch.uint8)


def test_a_message_that_is_due_and_was_not_announced_is_an_error() -> None:
    def quiet(transport: Transport) -> None:
        federation = placed(transport)
        keys = iter([federation._two_party._guarded])  # it sends its key, and then nothing
        federation._two_party._guarded = lambda *each: next(keys, lambda *_: None)(*each)  # type: ignore[method-assign]
        pairs = [(federation.clients[2], federation.clients[0])]
        federation.affine("dot", {"t": torch.ones(3)}, {}, pairs, 2)

    def honest(federation: Federation) -> None:
        pairs = [(federation.clients[2], federation.clients[0])]
        federation.affine("dot", {}, {"a": {"t": (torch.ones(2, 3), torch.ones(2))}}, pairs, 2)

    error = at_rank_0(honest, quiet)
    assert isinstance(error, DecodeError)
    assert "between 't' and 'a' is due" in str(error)


@pytest.mark.parametrize(
    "sent",
    [
        *(None, {}, {"clients": {"t": {}}, "public": {}}, {"clients": {"t": {}}, "public": {}, "callbacks": []}),
        *({"clients": c, "public": {}, "callbacks": {}} for c in ({}, {"a": {}}, {"t": 1}, {"t": {}, "a": {}})),
    ],
)
def test_a_checkpoint_has_the_clients_of_the_process_that_sends_it(sent: Any) -> None:
    with pytest.raises(DecodeError, match="process"):
        Part.read(["t"], document(sent, ""))


@pytest.mark.multiprocess
def test_a_whole_run_unpickles_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    arguments = ["--devices", "3", "--steps", "3", "--save-steps", str(tmp_path / "steps")]
    (first, *_) = processes.results(run_without_pickles, [*arguments, "--rounds", "2", "--save", path], ranks=3)
    assert first["round_idx"] == 2
    (second, *_) = processes.results(run_without_pickles, [*arguments, "--rounds", "3", "--resume", path], ranks=3)
    assert second["round_idx"] == 3


def run_without_pickles(arguments: list[str]) -> dict[str, Any]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something of another process was about to be unpickled")

    torch.distributed.distributed_c10d._tensor_to_object = refuse  # type: ignore[assignment]
    return one_site.run(arguments)


def test_the_most_that_is_received_is_what_the_machine_has() -> None:
    assert 2**30 < MOST_BYTES < 2**50
    assert transports.check_sizes({0: 5, 1: 0}, "a test") is None
    with pytest.raises(DecodeError, match=rf"of {MOST_BYTES + 1} in all"):
        transports.check_sizes({0: 1, 1: MOST_BYTES}, "a test")
