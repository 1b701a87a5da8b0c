"""The journal of a process in a run: which file it is, and what identifies the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn

from fedlit.federation import Federation
from fedlit.federation.journal import Journal
from fedlit.federation.streams import global_seed
from fedlit.run.checkpoint import class_path
from fedlit.run.run import Run


def identity_of(run: Run) -> dict[str, Any]:
    """Return what no resume changes: networks, epochs and the method's other arguments may be others then."""
    return {
        "roster": [(client.name, client.role) for client in run.clients],
        "method": class_path(run),
        "seed": global_seed(),
    }


def keep_journal(run: Run, federation: Federation, file: str | None, folder: str | None) -> None:
    """Let this process write what its clients release to a ``file``, or to one in a ``folder`` of several processes.

    All processes call it alike: where the folder is a relative one, the first of them tells where the run's is.
    """
    local, ranks = federation.local_clients, federation.transport.world_size
    hides = federation.hides or bool(federation.channels.mechanisms)
    if file is None and folder is not None and ranks > 1 and hides and run.trainer.state.fn == TrainerFn.FITTING:
        place = Path(folder).expanduser()
        place = place if place.is_absolute() else Path(run.trainer.log_dir or "", place)
        # placed on more or fewer processes, clients have other keys: all of them, and none is pinned
        file = str(place / f"{local[0].name}-of-{ranks}.releases") if local else None
    if file is not None:
        federation.journal = Journal(file, identity_of(run))
