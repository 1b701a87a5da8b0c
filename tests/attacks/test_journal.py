"""A server that has sums repeated: a site with a journal sends the same to the same clients again, or nothing."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlit.federation import Federation, Summed
from fedlit.federation.errors import JournalError, public_text
from fedlit.federation.journal import Journal
from fedlit.federation.transport import Transport
from fedlit.privacy import AuthenticationError, GaussianMechanism, PairwiseMasking, Plain
from fedlit.privacy.masking import MaskingClient
from thread_transport import on_ranks

NAMES = ["a", "b", "c", "d"]
PLACEMENT = [[], *([name] for name in NAMES)]  # the server apart


def federation_of(transport: Transport, folder: Path, settled: bool = True, **settings: Any) -> Federation:
    """A process that has started (again), with its journal, and whose sites may drop out."""
    transport.losable = True
    settings = {"privacy": PairwiseMasking(), "channels": [Summed("weights", "weights")]} | settings
    federation = Federation(NAMES, "d", transport=transport, placement=PLACEMENT, seed=0, **settings)
    federation.settled = settled
    if federation.local_clients:
        federation.journal = Journal(folder / f"{transport.rank}.releases")
    return federation


def vectors_of(federation: Federation, senders: Sequence[str], shift: float, size: int) -> dict[str, Any]:
    return {
        client.name: {"w": torch.arange(float(size)) / 2 + NAMES.index(client.name) + shift}
        for client in federation.local_clients
        if client.name in senders
    }


def means(
    transport: Transport,
    folder: Path,
    rounds: Sequence[int] = (0, 1),
    senders: Sequence[str] = NAMES,
    shift: float = 0.0,
    size: int = 3,
    frozen: bool = False,
    dropped: str | None = None,
    weights: dict[str, float] | None = None,
    **settings: Any,
) -> list[list[float]]:
    """Masked means of some rounds; ``dropped`` is a client whose vector the server does not add."""
    federation = federation_of(transport, folder, **settings)
    if dropped is not None and transport.rank == 0:
        gather_each = federation._messenger.gather_each

        def without(channel: str, messages: Any, sizes: Any, take: Any) -> None:
            gather_each(
                channel,
                messages,
                sizes,
                lambda name, got: None if name == dropped and "sum" in got else take(name, got),
            )

        federation._messenger.gather_each = without  # type: ignore[method-assign]
    read = []
    for round_idx in rounds:
        federation.round_idx = round_idx
        payloads = vectors_of(federation, senders, shift if frozen else shift + round_idx, size)
        received = federation.mean("weights", payloads, among=senders, weights=weights)
        read += [mean["w"].tolist() for mean in received.values()]
    return read


def run(folder: Path, **arguments: Any) -> list[list[list[float]]]:
    return on_ranks(lambda transport: means(transport, folder, **arguments), len(PLACEMENT))


def entries(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {path.name: [json.loads(line) for line in path.open()] for path in sorted(folder.iterdir())}


def test_a_round_that_is_repeated_alike_gives_the_same_and_no_new_entries(tmp_path: Path) -> None:
    first, before = run(tmp_path), entries(tmp_path)
    # a head, three peers' keys; of each round the release, and the list of survivors
    assert {name: len(each) for name, each in before.items()} == {f"{rank}.releases": 8 for rank in range(1, 5)}
    assert run(tmp_path) == first
    assert entries(tmp_path) == before
    run(tmp_path, rounds=(1, 2))  # the server comes back a round earlier
    assert {len(each) for each in entries(tmp_path).values()} == {10}


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"senders": NAMES[:3]}, "among"),
        ({"shift": 1e-3}, "another vector"),
        ({"dropped": "c"}, "a total of"),
    ],
    ids=["other clients", "other vectors", "a false dropout"],
)
def test_a_round_that_is_repeated_otherwise_is_refused(tmp_path: Path, changed: dict[str, Any], what: str) -> None:
    """Over other clients, the difference of both sums is the vector of the one that is left out."""
    run(tmp_path)
    before = entries(tmp_path)
    with pytest.raises(JournalError, match=what):
        run(tmp_path, **changed)
    assert entries(tmp_path) == before


@pytest.mark.parametrize(("threshold", "last"), [(1.0, "keys"), (None, "shares")])
def test_a_sum_that_fails_before_any_vector_has_left_binds_no_later_one(
    tmp_path: Path, threshold: float | None, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server damages the last message that "a" receives before it masks: the same step may be taken over others."""
    receive, backend = MaskingClient.receive, PairwiseMasking(threshold=threshold)

    def damaged(client: MaskingClient, step: str, message: bytes) -> None:
        is_last = (step, client.name) == (last, "a")
        receive(client, step, message[:-1] + bytes([message[-1] ^ 1]) if is_last else message)

    with monkeypatch.context() as patch:
        patch.setattr(MaskingClient, "receive", damaged)
        with pytest.raises(AuthenticationError):
            run(tmp_path, rounds=(0,), privacy=backend)
    for lines in entries(tmp_path).values():
        assert sum("among" in each for each in lines) == sum("withdrawn" in each for each in lines)
    assert not any("among" in each for each in entries(tmp_path)["1.releases"])  # of "a", which knows
    assert run(tmp_path, rounds=(0,), senders=NAMES[:3], privacy=backend)[1:] == [[[1.0, 1.5, 2.0]]] * 4


def test_a_sum_does_not_pass_for_one_of_another_round(tmp_path: Path) -> None:
    """The same vectors later over other clients: as where a site returns to a round that the server names."""
    same: dict[str, Any] = {"size": 40, "frozen": True}
    run(tmp_path, rounds=(0,), **same)
    run(tmp_path, rounds=(7,), **same)  # over the same clients the total is the same, too
    with pytest.raises(JournalError, match="another round"):
        run(tmp_path, rounds=(8,), senders=NAMES[:3], **same)
    fixed: dict[str, Any] = {"channels": [Summed("weights", "weights", fixed=True)]}
    for rounds, senders in (((0,), NAMES), ((8,), NAMES[:3])):  # declared to repeat its messages, of which a run warns
        run(tmp_path / "fixed", rounds=rounds, senders=senders, **same, **fixed)


def test_weighted_vectors_do_not_pass_for_others_without_the_heaviest_client(tmp_path: Path) -> None:
    """Weights are relative to the greatest: without its client all are scaled, and both means give its vector."""
    same: dict[str, Any] = {"size": 40, "frozen": True, "weights": {"a": 1.0, "b": 2.0, "c": 3.0, "d": 9.0}}
    run(tmp_path, rounds=(0,), **same)
    run(tmp_path, rounds=(1,), **same)
    with pytest.raises(JournalError, match="another round"):
        run(tmp_path, rounds=(2,), senders=NAMES[:3], **same)


@pytest.mark.parametrize("content", ["notes\nand more", '{"version": 1}'.replace("version", "name"), "\x00" * 100])
def test_another_file_stays_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "precious"
    path.write_text(content)
    path.chmod(0o644)
    with pytest.raises(JournalError, match="no journal"):
        Journal(path)
    assert path.read_text() == content
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("skipped", [0, 50])
def test_before_the_first_round_a_site_numbers_its_sums_itself(tmp_path: Path, skipped: int) -> None:
    """The server states how many announcements a process missed; that moves no sum to another place."""

    def first(transport: Transport, senders: Sequence[str], skipped: int = 0) -> None:
        federation = federation_of(transport, tmp_path, settled=False)
        federation._messenger.skip(skipped)
        for _ in range(2):
            federation.sum("weights", vectors_of(federation, senders, 0.0, 3), among=senders)

    on_ranks(lambda transport: first(transport, NAMES), len(PLACEMENT))
    on_ranks(lambda transport: first(transport, NAMES, skipped), len(PLACEMENT))
    with pytest.raises(JournalError):
        on_ranks(lambda transport: first(transport, NAMES[:3], skipped), len(PLACEMENT))


def test_what_has_not_left_is_withdrawn_and_what_left_before_is_not(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    vector = torch.ones(3)
    step = journal.next_sum(("train", 0, 0), "weights")
    journal.release("a", step, vector, NAMES)
    journal.withdraw(step)
    journal.release("a", step, vector, NAMES[:3])  # over the others, as one was lost before anything left
    again = Journal(tmp_path / "j")
    assert again.next_sum(("train", 0, 0), "weights") == step
    again.release("a", step, vector, NAMES[:3])
    again.withdraw(step)
    with pytest.raises(JournalError):
        again.release("a", step, vector, NAMES)


def test_the_same_vector_in_another_total_is_refused_also_after_a_withdrawal(tmp_path: Path) -> None:
    journal, vector = Journal(tmp_path / "j"), torch.arange(40.0)
    first, second, third, fourth = (journal.next_sum(("train", number, 0), "w") for number in range(4))
    journal.next_sum(("train", 0, 0), "w")
    journal.release("a", first, vector, NAMES, once=True)
    journal.survivors("a", first, NAMES[:3])
    journal._written.clear()
    journal.release("a", second, vector, NAMES, once=True)
    with pytest.raises(JournalError, match="same vector"):
        journal.survivors("a", second, NAMES)  # a false dropout in one of both
    journal.withdraw(second)
    with pytest.raises(JournalError):
        journal.release("a", third, vector, NAMES[:3], once=True)
    again = Journal(tmp_path / "j")
    with pytest.raises(JournalError):
        again.release("a", third, vector, NAMES[:3], once=True)
    journal.release("b", third, torch.zeros(40), NAMES, once=True)  # votes of nobody, round after round
    journal.release("b", fourth, torch.zeros(40), NAMES[:3], once=True)


def test_stages_and_channels_are_numbered_apart(tmp_path: Path) -> None:
    """A resumed run may validate once more or less than before."""
    journal = Journal(tmp_path / "j")
    steps = [journal.next_sum((stage, 1, 0), channel) for stage in ("train", "validate") for channel in "xyx"]
    assert len({*steps}) == 6
    assert journal.next_sum(("train", 1, 0), "x") == steps[0]


def test_noise_is_the_same_for_the_same_message_and_no_other(tmp_path: Path) -> None:
    """Otherwise the mean of repetitions would tell more than is booked, or a difference the message without noise."""
    noise = {"differential_privacy": GaussianMechanism(10.0, 1.0), "privacy": Plain()}
    first = run(tmp_path, **noise)
    assert run(tmp_path, **noise) == first
    for changed in ({"shift": 1.0}, {"differential_privacy": GaussianMechanism(10.0, 2.0)}, {"rounds": (1, 2)}):
        other = run(tmp_path, **(noise | changed))
        distance = torch.tensor(first[1][0]) - torch.tensor(other[1][0])
        assert distance.std() > 1e-3  # and not a constant, which equal noise would leave
    assert run(tmp_path / "other", **noise) != first


def test_an_entry_cut_off_at_its_end_is_none(tmp_path: Path) -> None:
    run(tmp_path)
    path = tmp_path / "1.releases"
    path.chmod(0o644)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"client": "a", "cha')
    Journal(path)
    assert path.read_bytes() == whole
    assert path.stat().st_mode & 0o077 == 0  # it has a secret


def in_another_process(action: Callable[[], object]) -> bool:
    """Whether a `JournalError` comes of an action in a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except JournalError:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_a_second_process_does_not_write_to_the_same_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the mend both wrote, and neither knew of the other's: two sums of one step, over other clients."""
    path, vector = tmp_path / "j", torch.ones(3)
    step = ("train", 0, 0, "weights", 0)

    def other() -> None:
        Journal(path).release("a", step, vector, NAMES[:3])

    first = Journal(path)
    first.release("a", step, vector, NAMES)
    assert in_another_process(other)
    second = Journal(path)  # a run that begins anew in this process gets it
    second.release("a", step, vector, NAMES)
    del first
    assert in_another_process(lambda: Journal(path))
    monkeypatch.setattr(fcntl, "lockf", raising(BlockingIOError(11, "busy")))
    with pytest.raises(JournalError) as caught:
        Journal(path)
    assert f"'{path}' is open in another process: end that one" in str(caught.value)
    assert str(tmp_path) not in public_text(caught.value)


def test_a_journal_is_free_as_soon_as_its_process_is_killed_though_forks_of_it_live(tmp_path: Path) -> None:
    """As the workers of a loader, which may end later."""
    path = tmp_path / "j"
    ready, write = os.pipe()
    wait, end = os.pipe()
    holder = os.fork()
    if holder == 0:
        _held = Journal(path)
        if os.fork() == 0:
            os.write(write, b"1")
            os.close(end)
            os.read(wait, 1)  # until the test has ended
            os._exit(0)
        signal.pause()
    os.read(ready, 1)
    try:
        assert in_another_process(lambda: Journal(path))
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        Journal(path)
    finally:
        for pipe in (ready, write, wait, end):
            os.close(pipe)


def raising(error: OSError) -> Callable[..., None]:
    def raises(*_: object) -> None:
        raise error

    return raises


def test_where_files_cannot_be_locked_there_is_no_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "lockf", raising(OSError(37, "No locks available")))
    with pytest.raises(JournalError, match=r"cannot be locked \(No locks available\): name a file"):
        Journal(tmp_path / "j")


RUN = {"roster": [("a", "source"), ("t", "target")], "method": "FedAvg", "seed": 0}


def test_a_journal_is_of_one_run(tmp_path: Path) -> None:
    """One that was made before runs were written in it takes the first."""
    Journal(tmp_path / "j").release("a", ("train", 0, 0, "weights", 0), torch.ones(3), NAMES)
    for _ in range(2):
        Journal(tmp_path / "j", RUN)
    assert len((tmp_path / "j").read_text().splitlines()) == 3
    for name, value in (("seed", 1), ("roster", RUN["roster"][:1]), ("method", "FedProx")):  # type: ignore[index]
        with pytest.raises(JournalError, match=rf"another run \({name} was .*: name another file") as caught:
            Journal(tmp_path / "j", RUN | {name: value})
        # what the other run had, as the names of its clients, is no one else's business
        assert public_text(caught.value) == f"a site's journal of releases is of another run, with another {name}"


@pytest.mark.parametrize(
    "content",
    [b"not JSON\n", b'{"version": 9, "secret": "00"}\n', b"[]\n", b'{"version": 1, "secret": "00"}\n{"client": "a"}\n'],
)
def test_another_file_is_no_journal(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(JournalError, match=r"is no journal|version") as caught:
        Journal(tmp_path / "file")
    assert str(tmp_path) not in public_text(caught.value)  # a folder may have a patient's name


def test_a_journal_that_cannot_be_written_ends_the_run_before_anything_leaves(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path)
    federation = Federation(NAMES, "d", privacy=PairwiseMasking(), seed=0)
    federation.journal = Journal(tmp_path / "full")
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115, as long as the test
    federation.journal._file = full.fileno()
    with pytest.raises(JournalError, match="nothing is sent"):
        federation.mean("weights", {name: {"w": torch.zeros(2)} for name in NAMES})
    assert "weights" not in federation.ledger.bytes_by_channel()
