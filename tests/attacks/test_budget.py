"""Privacy that is spent and not counted: by crashes, in other runs, in sums that clients have left."""

from __future__ import annotations

import json
import math
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from crashing import POINTS, booked, crash, released
from fedlit.federation import Federation, Open, Pairwise
from fedlit.federation.account import Account
from fedlit.federation.errors import BudgetError, JournalError, public_text
from fedlit.federation.journal import Journal
from fedlit.federation.metrics import METRICS
from fedlit.federation.transport import Transport
from fedlit.methods import FedAvg
from fedlit.privacy import CKKS, GaussianMechanism, PairwiseMasking, Plain
from fedlit.privacy.differential import epsilon_of
from refused import refused, slow
from small_federation import Blobs, build, trainer
from stars import struck
from thread_transport import on_ranks

NAMES = ["a", "b", "c", "d"]
NOISE = GaussianMechanism(clip_norm=1.0, noise_multiplier=2.0)
PLACEMENT = [[], *([name] for name in NAMES)]


def federation(folder: Path | None = None, target: str = "d", seed: int = 0, **more: Any) -> Federation:
    account = None if folder is None else str(folder)
    return Federation(NAMES, target, differential_privacy=NOISE, account=account, seed=seed, **more)


def send(fed: Federation, rounds: int = 1, value: float = 1.0) -> None:
    for _ in range(rounds):
        fed.mean("weights", {client.name: {"w": torch.full((3,), value)} for client in fed.local_clients})
        fed.round_idx += 1


def spent(folder: Path, against: Any = "sum") -> dict[str, float]:
    return {path.stem: Account(path).spent[against] for path in sorted(folder.glob("*.account"))}


@pytest.mark.parametrize("with_journal", [False, slow(True)])
def test_five_crashes_book_at_least_what_was_released(tmp_path: Path, with_journal: bool) -> None:
    """Each process goes on a round earlier than the last one was, as a server makes it."""
    draw, at = random.Random(with_journal), 0
    for number, point in enumerate(draw.sample(POINTS, len(POINTS))):
        at += draw.randrange(1, 3)
        crash(tmp_path, point, max(0, at - 2), at, with_journal)
        before = booked(tmp_path)
        assert all(before[name] >= left for name, left in released(tmp_path).items()), (number, point)
    assert max(released(tmp_path).values()) > (at + 1) / 4 or with_journal, "no round was repeated with other noise"


@pytest.mark.slow
def test_a_site_that_is_killed_before_it_sends_has_booked_it_and_the_others_go_on(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    accounts = tmp_path / "accounts"
    words = ("--method", "FedAvg", "--own", "--everyone", "--steps", "2", "--rounds", "3", "--noise", str(accounts))
    words += ("--wait-for", "5")
    ended = struck(tmp_path, "blended:sending:1:kill", *words)
    assert ended["blended"].exit_code == -9
    assert not ended["server"].error, ended["server"].error
    assert spent(accounts) == {"blended": 2.0, "clean": 3.0, "fonts": 3.0}


def test_a_run_that_goes_back_to_a_checkpoint_does_not_get_its_privacy_back(tmp_path: Path) -> None:
    fed = federation(tmp_path)
    state = fed.state_dict()
    send(fed, 2)
    for _ in range(2):  # the attack: the run's own count goes back with it
        fed = federation(tmp_path)
        fed.load_state_dict(state)
        send(fed, 2)
    assert fed.accounts["sum"].spent("a") == 2 / 4
    assert spent(tmp_path) == dict.fromkeys(NAMES, 6 / 4)


def test_an_account_covers_all_runs_that_name_it(tmp_path: Path) -> None:
    for seed, target in ((0, "d"), (1, "d"), (0, "a")):
        send(federation(tmp_path, target, seed))
    other = federation(tmp_path, channels=[Open("news"), Pairwise("dot"), METRICS], reports=NOISE)
    other.exchange("news", {"a": {"x": torch.zeros(1)}})
    other.exchange("news", {"b": {name: {"x": torch.zeros(1)} for name in "acd"}})
    other.report({"c": {"loss": 0.5}}, ["loss"])
    maps = {"a": {"d": (torch.ones(1, 2), torch.zeros(1))}}
    other.affine("dot", {"d": torch.ones(2)}, maps, [(other.target, other.sources[0])], 1)
    assert spent(tmp_path) == {"a": 1.0, "b": 1.5, "c": 1.0, "d": 1.0}


def test_a_data_set_may_have_a_name_that_no_client_has(tmp_path: Path) -> None:
    files = {name: str(tmp_path / ("ward" if name in "ab" else name)) for name in NAMES}
    with refused("account"):
        Federation(NAMES, "d", differential_privacy=NOISE, account={"a": files["a"]}, seed=0)
    send(Federation(NAMES, "d", differential_privacy=NOISE, account=files, seed=0))
    assert Account(tmp_path / "ward").spent["sum"] == 2 / 4
    assert Account(tmp_path / "c").spent["sum"] == 1 / 4


def test_what_exceeds_a_budget_is_refused_before_it_leaves(tmp_path: Path) -> None:
    budget = epsilon_of(3.5 / 4, NOISE.delta)
    fed = federation(epsilon_budget=budget)  # of this run
    send(fed, 3)
    sent = fed.ledger.total_bytes
    with pytest.raises(BudgetError, match=r"client 'a' has spent epsilon 3\.709") as caught:
        send(fed)
    assert fed.epsilon("sum")["a"] <= budget
    assert fed.accounts["message"].spent("b") == 3 / 4
    assert "4.377" in str(caught.value)
    assert public_text(caught.value) == "the privacy budget of client 'a' is spent"
    assert fed.ledger.total_bytes - sent <= sent // 3  # announced, and not sent
    send(federation(tmp_path, seed=1), 2)  # of all runs
    second = federation(tmp_path, seed=2, epsilon_budget=budget)
    send(second, 1)
    before = spent(tmp_path)
    with pytest.raises(BudgetError, match="in the account"):
        send(second)
    assert spent(tmp_path) == before == dict.fromkeys(NAMES, 3 / 4)


def test_messages_of_one_exchange_are_counted_one_by_one() -> None:
    fed = federation(epsilon_budget=epsilon_of(2.5 / 4, NOISE.delta), channels=[Open("news")])
    with pytest.raises(BudgetError):
        fed.exchange("news", {"a": {name: {"x": torch.zeros(1)} for name in "bcd"}})


def test_other_processes_see_that_a_budget_is_spent_and_no_more(tmp_path: Path) -> None:
    errors: dict[int, Exception] = {}
    arrived: list[int] = []

    def process(transport: Transport) -> None:
        budget = epsilon_of(1.5 / 4, NOISE.delta) if transport.rank == 2 else None
        fed = federation(tmp_path, transport=transport, placement=PLACEMENT, epsilon_budget=budget)
        carry = fed._messenger.gather_each
        fed._messenger.gather_each = lambda *given: (arrived.append(fed.round_idx), carry(*given))[1]  # type: ignore
        try:
            send(fed, 2)
        except BudgetError as error:
            errors[transport.rank] = error

    on_ranks(process, len(PLACEMENT))
    assert {*errors} == {*range(5)}
    assert {*arrived} == {0}  # no process has sent its vector of round 1
    for rank, error in errors.items():
        own = rank == 2
        assert ("the privacy budget of client 'b' is spent" in str(error)) != own
        assert ("epsilon" in str(error)) == own
        assert (str(tmp_path) in str(error)) == own


def test_what_is_repeated_with_the_same_noise_is_booked_once(tmp_path: Path) -> None:
    for shift, expected in ((0.0, 2), (0.0, 2), (0.5, 4)):  # the third has another payload
        fed = federation(tmp_path / "accounts")
        fed.journal = Journal(tmp_path / "journal")
        send(fed, 2, 1.0 + shift)
        assert spent(tmp_path / "accounts") == dict.fromkeys(NAMES, expected / 4)


@pytest.mark.parametrize(
    ("backend", "losable", "variance"),
    [(PairwiseMasking(), False, 4), (PairwiseMasking(), True, 3), (CKKS(), True, 2), (Plain(), True, 1)],
)
def test_noise_counts_as_far_as_it_cannot_be_lost(backend: Any, losable: bool, variance: int, tmp_path: Path) -> None:
    """Of masks, a total has the noise of 3 of 4 clients at least; under a shared key, of 2."""
    fed = federation(tmp_path, privacy=backend)
    fed.transport.losable = losable
    if losable:
        fed._messenger.settled = True
    send(fed)
    assert spent(tmp_path) == pytest.approx(dict.fromkeys(NAMES, 1 / 4 / variance))
    assert spent(tmp_path, "message") == pytest.approx(dict.fromkeys(NAMES, 1 / 4))


def test_the_noise_that_may_be_lost_is_that_of_the_largest_weights() -> None:
    fed = federation(privacy=PairwiseMasking())
    fed.transport.losable = fed._messenger.settled = True
    weights = {"a": 4.0, "b": 2.0, "c": 1.0, "d": 2.0}
    fed.mean("weights", {name: {"w": torch.ones(3)} for name in NAMES}, weights=weights)
    # itself and the two smallest others: 16 + 1 + 4 for a; 4 + 1 + 4 for b and d; 1 + 4 + 4 for c
    expected = {"a": 16 / 21, "b": 4 / 9, "c": 1 / 9, "d": 4 / 9}
    assert {name: 4 * fed.accounts["sum"].spent(name) for name in NAMES} == pytest.approx(expected)


def test_processes_side_by_side_share_an_account_and_its_budget(tmp_path: Path) -> None:
    refusals: list[BudgetError] = []

    def process() -> None:
        account = Account(tmp_path / "a.account")
        try:
            for _ in range(21):
                account.book("a", "weights", 0.25, 0.25, budget=epsilon_of(5.1, 1e-5))
        except BudgetError as error:
            refusals.append(error)

    threads = [threading.Thread(target=process) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    account = Account(tmp_path / "a.account")
    assert len(refusals) == 3
    assert account.spent["sum"] == 5.0
    assert account.epsilon(1e-5) == epsilon_of(5.0, 1e-5)
    assert (tmp_path / "a.account").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "line", [b"\n", b"[]\n", b'{"release": null, "message": -1, "sum": 0}\n', b'{"release": null, "sum": NaN}\n']
)
def test_an_account_that_was_changed_is_none(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.account"
    Account(path).book("a", "weights", 0.25, 0.25)
    whole = path.read_bytes()
    path.write_bytes(whole + line[:-1])  # cut off, as by a crash
    assert Account(path).spent["sum"] == 0.25
    path.write_bytes(whole + line)
    with pytest.raises(JournalError, match="is no account") as caught:
        Account(path)
    assert str(tmp_path) not in public_text(caught.value)


def test_a_journal_is_no_account_and_an_account_no_journal(tmp_path: Path) -> None:
    Journal(tmp_path / "journal")
    Account(tmp_path / "account")
    with pytest.raises(JournalError, match="is no account"):
        Account(tmp_path / "journal")
    with pytest.raises(JournalError, match="is no journal"):
        Journal(tmp_path / "account")
    with pytest.raises(JournalError, match="cannot be opened"):
        Account(tmp_path)
    with pytest.raises(JournalError, match="cannot be opened"):
        Account(tmp_path / "account" / "below a file")


def test_an_account_that_cannot_be_written_ends_the_run_before_anything_leaves(tmp_path: Path) -> None:
    fed = federation(tmp_path)
    send(fed)
    carried: list[str] = []
    fed._messenger.gather_each = lambda channel, *_: carried.append(channel)  # type: ignore[method-assign]
    with open("/dev/full", "r+b", buffering=0) as full:
        fed._releases._files["b"]._file = full.fileno()
        with pytest.raises(JournalError, match="nothing is sent"):
            send(fed)
    assert carried == []


def test_a_budget_ends_training_and_counts_the_runs_before(tmp_path: Path) -> None:
    budget = epsilon_of(3.5 / 4, NOISE.delta)
    strategy = {"differential_privacy": NOISE, "epsilon_budget": budget, "account": str(tmp_path / "accounts")}
    trainer(2, [], tmp_path, strategy=strategy).fit(build(FedAvg), Blobs())
    module = build(FedAvg)
    with pytest.raises(BudgetError):
        trainer(2, [], tmp_path, strategy=strategy).fit(module, Blobs())
    assert module.federation.round_idx == 1
    assert max(spent(tmp_path / "accounts").values()) == 3 / 4


def test_budgets_that_bound_nothing_are_refused() -> None:
    for budget, more in ((0.0, {}), (math.nan, {}), (1.0, {"differential_privacy": None})):
        with refused("epsilon_budget"):
            Federation(NAMES, "d", **({"differential_privacy": NOISE, "epsilon_budget": budget, "seed": 0} | more))


def test_entries_are_lines_that_anybody_can_add_up(tmp_path: Path) -> None:
    send(federation(tmp_path), 2)
    head, *lines = [json.loads(line) for line in (tmp_path / "a.account").open()]
    assert head == {"version": 1, "account": "1 / z^2 of each release, added up"}
    assert lines == [{"release": None, "channel": "weights", "message": 0.25, "sum": 0.25}] * 2
