"""Returns: how processes that resume, or return to a run, reach the round of the server.

A site that returns has its clients' state, from its checkpoint or afresh. The server sends the rest: round, counters,
ledger, and the available totals, of which its clients then fetch what they missed.
"""

from __future__ import annotations

from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping

from fedlit.federation import FederationError, RosterError
from fedlit.federation.client import reports_by_client
from fedlit.federation.errors import AheadOfServerError, printable
from fedlit.run.planning import change_optimizer, set_epoch_length
from fedlit.run.run import Run


def come_together(run: Run) -> bool:
    """Bring this process to the server's round before the first batch; return whether that round's roll call is done.

    Raises:
        AheadOfServerError: If this process resumes from a later round than the server.
        FederationError: If the server has no checkpoint, and others have trained for more than a round.
        RosterError: If it resumes within a round.
    """
    federation = run.federation
    transport = federation.transport
    if federation.batch_idx:
        raise RosterError(
            f"the checkpoint was written within round {federation.round_idx}, where the others cannot join: resume "
            "from one that was written at the end of a round"
        )
    if transport.returning:
        back = federation.roll_call(run.requires.adapts)
        welcome(run, back, transport.over)
        return True
    rounds = [each if type(each) is int else 0 for each in transport.all_gather(federation.round_idx, "rounds")]
    ahead = frozenset(rank for rank, each in enumerate(rounds) if each > rounds[0])
    if not rounds[0] and max(rounds) > 1:  # by one round, it was killed before its first checkpoint
        names = [name for name, rank in federation.roster.rank_of.items() if rank in ahead]
        raise FederationError(
            f"the server begins at round 0, and {names} come from round {max(rounds)}, so that all rounds would be "
            "lost: start the server where its checkpoint is. To begin anew, start all sites with --fresh=true"
        )
    transport.begin(ahead)
    if transport.rank in ahead:
        raise AheadOfServerError(federation.round_idx, rounds[0])
    if rounds[0]:
        over = rounds[0] == run.clock.all_rounds()  # all start again for those who were away then
        run.clock.last_round = rounds[0] - 1 if over else -1
        welcome(run, frozenset(range(1, transport.world_size)) - ahead, over)
        if over:
            rank_of = federation.roster.rank_of
            federation.roster.call_back([name for name, rank in rank_of.items() if rounds[rank] < rounds[0]])
        if transport.rank == 0:
            _go_to_round(run, run.trainer.fit_loop.state_dict())
    federation.settled = True
    return False


def welcome(run: Run, back: frozenset[int], over: bool = False) -> None:
    """Let processes that return go on where the server is; all others call it, too.

    ``over`` is whether this is after the last round, in which case their clients have ``returned``.
    """
    if not back:
        return
    federation = run.federation
    transport = federation.transport
    have = federation.have()  # before the server's state takes the place of this process's
    state = transport.broadcast(_state(run, over) if transport.rank == 0 else None, back, "a return")
    public = _public_state(run) if state is None else state["components"]
    if state is not None:
        _go_on(run, state)
    federation.settled = True
    totals = transport.all_gather(have if transport.rank in back else None, "totals of those who come back")
    rank_of = federation.roster.rank_of
    came = {name: rank for name, rank in rank_of.items() if rank in back and rank not in transport.lost}
    own = [totals[rank] if rank in came.values() else {} for rank in range(transport.world_size)]
    federation.welcome(reports_by_client(own, came, "totals"))
    for each in run.components:
        each.on_return(public, [*came])
    federation.roster.call_back(came if over else ())


def _public_state(run: Run) -> dict[str, Any]:
    """Return the public state of all components."""
    public: dict[str, Any] = {}
    for each in run.components:
        public |= each.public_state()
    return public


def _state(run: Run, over: bool) -> dict[str, Any]:
    """Return the state that the server sends, which holds nothing of a client but what it has reported to all."""
    numbers = {name: float(value) for name, value in run.trainer.callback_metrics.items()}
    return {
        **({"end": {"last_round": run.clock.last_round, "metrics": numbers}} if over else {}),
        "federation": run.federation.public_state(),
        "components": _public_state(run),
        "loops": run.trainer.fit_loop.state_dict(),
        "stopping": {each.state_key: each.state_dict() for each in _stopping(run.trainer)},
    }


def _stopping(trainer: Trainer) -> list[EarlyStopping]:
    return [each for each in trainer.callbacks if isinstance(each, EarlyStopping)]  # type: ignore[attr-defined]


def _go_on(run: Run, state: dict[str, Any]) -> None:
    """Take over the server's state; raises an `AheadOfServerError` as `come_together`."""
    trainer = run.trainer
    run.record.check_plan(state["components"]["plan"])  # before anything of this process is replaced
    own, servers = run.federation.round_idx, state["federation"]["round_idx"]
    if own > servers:  # the server has gone back, while this one was away
        raise AheadOfServerError(own, servers)
    run.federation.come_back(state["federation"])
    change_optimizer(run, own)
    for callback in _stopping(trainer):
        if callback.state_key in state["stopping"]:
            callback.load_state_dict(state["stopping"][callback.state_key])
    _go_to_round(run, state["loops"])
    if "end" in state:
        trainer.should_stop = True  # also where the others stopped early
        run.clock.last_round = state["end"]["last_round"]
        run.log({name: value for name, value in state["end"]["metrics"].items() if _is_number(name, value)})


def _is_number(name: object, value: object) -> bool:
    """Whether what the server has sent can be logged under its name: a cell of a table, and no formula."""
    return isinstance(name, str) and name == printable(name) and name[:1].isalnum() and type(value) is float


def _go_to_round(run: Run, state: dict[str, Any]) -> None:
    """Set Lightning's counters to those before the first batch of the current round.

    They are set anew rather than restored: a checkpoint may precede or follow the validation between two epochs, after
    which Lightning would act differently on different processes.
    """
    loop = run.trainer.fit_loop
    loop.load_state_dict(state)
    set_epoch_length(run)
    epoch, number = divmod(run.clock.round_idx, run.clock.rounds_per_epoch)
    epochs, batches = cast(Any, loop.epoch_progress), loop.epoch_loop.batch_progress
    for tracker in (epochs.total, epochs.current):
        _count(tracker, epoch)
    _count(batches.total, batches.total.completed)
    _count(batches.current, number * run.clock.batches_in())
    batches.is_last_batch = False
    if number:  # as after an interruption within an epoch
        for tracker in (epochs.total, epochs.current):
            tracker.ready = tracker.started = epoch + 1
        loop.update_restart_stage()
    else:
        for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
            each.restarting = each._loaded_from_state_dict = each._resuming_from_checkpoint = False
            each.reset_restart_stage()
    assert loop._data_fetcher is not None
    iter(loop._data_fetcher)  # from here, and not from where this process began


def _count(tracker: Any, number: int) -> None:
    tracker.ready = tracker.started = tracker.processed = tracker.completed = number
