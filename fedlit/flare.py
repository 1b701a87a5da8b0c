"""A controller and an executor of NVIDIA FLARE (the extra ``nvflare``), which train one run of fedlit across its sites.

FLARE admits jobs and connects the parties; its auxiliary messages carry those of the run, which is that of ``fedlit
serve`` and ``fedlit join``: same weights, checkpoints, ledger. ``fedlit flare`` writes the job that names the two.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import nvflare
from nvflare.apis.controller_spec import Task
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from fedlit.federation import FederationError
from fedlit.remote import Seat
from fedlit.remote.message_carrier import Message, MessageListener
from fedlit.remote.policy import REFUSED
from fedlit.remote.processes import await_end
from fedlit.remote.relay import KIT, OWN, POLICY, TIMES, Relay
from fedlit.remote.seats import KIT_FILES, STEP_TIMEOUT, CarriedServer

SUPPORTED = (2, 9)
"""The oldest version of FLARE that was tried, of the one major version that is supported."""

if not SUPPORTED <= tuple(int(part) for part in nvflare.__version__.split(".")[:2]) < (SUPPORTED[0] + 1,):
    raise ImportError(
        f"fedlit runs in NVIDIA FLARE {SUPPORTED[0]}.{SUPPORTED[1]} or a later {SUPPORTED[0]}.x, and this is "
        f"{nvflare.__version__}: pip install 'fedlit[nvflare]' at every party"
    )

_log = logging.getLogger("fedlit.remote")

TASK = "fedlit"
"""Name of the one task of a job: to take part in the run."""

TOPIC = "fedlit"
"""Topic of the messages."""

_MESSAGE, _KEY, _REFUSES = "message", "key", "refuses"

LOCAL = "fedlit.yaml"
"""File in the folder ``local`` of a party's workspace: the party's part of the configuration, such as its data."""

RULES = "policy.yaml"
"""File in the folder ``local`` of a site's workspace: what the site takes part in, see `fedlit.remote.Policy`."""

RUNS = "fedlit-runs"
"""Folder of a party's runs in its workspace; ``fedlit`` would be imported as the package where Python starts there."""

_MAX_STARTS = 5
"""Restarts of a site's process in one job."""

_PATIENCE = 30
"""Seconds to wait for the results of sites when the run has ended."""


class FedlitController(Controller):  # type: ignore[misc]
    """The server's part: it has no client and no data, and takes the seat that ``fedlit serve`` takes.

    Args:
        sites: Clients of each site, by the site's name in FLARE; of a list, each site is the client of its name.
        arguments: Of ``fedlit fit``; configurations are files of the job's folder ``config``.
        wait_for: Seconds to wait for sites.
        patience: Seconds after which a disconnected site times out, and the others go on.
        step_timeout: Seconds after which one times out that is connected, and has not sent what is due from it.
    """

    def __init__(
        self,
        sites: list[str] | dict[str, list[str]],
        arguments: list[str],
        wait_for: float = 600.0,
        patience: float = 20.0,
        step_timeout: float = STEP_TIMEOUT,
    ) -> None:
        super().__init__()
        self.sites = dict(sites) if isinstance(sites, dict) else {name: [name] for name in sites}
        self.arguments, self.wait_for, self.patience = list(arguments), wait_for, patience
        self.step_timeout = step_timeout

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing: all is done in `control_flow`."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing."""

    def process_result_of_unknown_task(
        self, client: Any, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Ignore the result of a site that was started anew: its run has reported already."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Ask the sites to take part, and serve them until the run has ended."""
        keys = {name: secrets.token_hex(16) for name in self.sites}
        register = partial(_register, fl_ctx.get_engine(), keys)
        listener = MessageListener(register, f"FLARE job {fl_ctx.get_job_id()}")
        seat = CarriedServer(listener, self.sites, self.wait_for, self.patience, self.step_timeout)
        tasks = []
        for name, key in keys.items():
            data = Shareable()
            data[_KEY] = key
            tasks.append(Task(TASK, data, result_received_cb=partial(self._receive_result, seat)))
            self.broadcast(tasks[-1], fl_ctx, targets=[name], min_responses=1)
        over = threading.Event()
        threading.Thread(target=_end_with, args=(abort_signal, seat, over), daemon=True).start()
        try:
            reason = _attempt(partial(_serve, fl_ctx, self.arguments, seat))
        finally:
            over.set()
        if reason is not None and not abort_signal.triggered:
            self.system_panic(reason, fl_ctx)
            return
        ends = time.monotonic() + _PATIENCE  # a site that has dropped out has no result
        while any(task.completion_status is None for task in tasks):
            if abort_signal.triggered or time.monotonic() >= ends:
                break
            time.sleep(0.2)
        self.cancel_all_tasks()

    def _receive_result(self, seat: CarriedServer, client_task: Any, fl_ctx: FLContext) -> None:
        """Log why a site has ended by an error; before the first round the run ends, as none begins without it."""
        result = client_task.result
        code = result.get_return_code() if isinstance(result, Shareable) else ReturnCode.ERROR
        if code not in (ReturnCode.OK, ReturnCode.TASK_ABORTED):
            # a site's output may quote its data, and stays in its own file
            why = "its policy refuses the job" if result.get(_REFUSES) is True else code
            text = f"site {client_task.client.name!r} has ended ({why}): its own output says more"
            self.log_error(fl_ctx, text)
            if not seat.begun:
                seat.end(text)


class FedlitExecutor(Executor):  # type: ignore[misc]
    """A site's part: it trains its clients on local data, and takes the seat that ``fedlit join`` takes.

    It trains in another process, which is started again if it is killed, and takes part from the next round. The file
    ``fedlit.yaml`` in the folder ``local`` of the site's workspace, if there is one, overrides the job's configuration:
    the site's data are there. What ``policy.yaml`` beside it does not allow is refused before data are read. The output
    of that process is in a file of the site, as it may quote data, and FLARE sends a site's logs to its server. Where
    the site has a startup kit, its certificate vouches for the identity keys of its clients.

    Args:
        arguments: Of ``fedlit fit``; configurations are files of the job's folder ``config``.
        wait_for: Seconds to wait for the server.
        patience: Seconds for which the server may not answer before this site gives up.
    """

    def __init__(self, arguments: list[str], wait_for: float = 600.0, patience: float = 20.0) -> None:
        super().__init__()
        self.arguments, self.wait_for, self.patience = list(arguments), wait_for, patience

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Take part in the run."""
        if task_name != TASK:
            return make_reply(ReturnCode.TASK_UNKNOWN)
        relay = Relay(partial(_send, fl_ctx.get_engine(), str(shareable.get(_KEY))))
        environment = {**os.environ, **relay.environment, TIMES: f"{self.wait_for} {self.patience}"}
        local, output, kit = _places(fl_ctx)
        environment[OWN] = str(local / LOCAL)
        if os.path.lexists(local / RULES):
            environment[POLICY] = str(local / RULES)
        if all((kit / name).is_file() for name in KIT_FILES):
            environment[KIT] = str(kit)
        # -P: a folder of the workspace in which FLARE has started this process is not taken for a package
        command = [sys.executable, "-P", "-m", "fedlit.cli", "flare", "site", *_arguments(fl_ctx, self.arguments)]
        try:
            code = self._watch(command, environment, abort_signal, output)
            for _ in range(_MAX_STARTS):
                if code >= 0 or abort_signal.triggered:  # it has ended by itself, and its output states why
                    break
                self.log_warning(fl_ctx, f"the process of this site was killed (signal {-code}): it is started again")
                code = self._watch([*command, "--fresh=false"], environment, abort_signal, output)
        finally:
            relay.close()
        if abort_signal.triggered:
            return make_reply(ReturnCode.TASK_ABORTED)
        if code == 0:
            return make_reply(ReturnCode.OK)
        self.log_error(fl_ctx, f"this site has ended with code {code}: {RUNS}/{output.name} says why")
        reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
        reply[_REFUSES] = code == REFUSED
        return reply

    def _watch(self, command: list[str], environment: Mapping[str, str], abort_signal: Signal, output: Path) -> int:
        """Run a process to its end, or the job's, with its output at the end of a file; return its exit code."""
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "wb") as to:
            process = subprocess.Popen(
                command, env=environment, stdout=to, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        while process.poll() is None:
            if abort_signal.triggered:
                process.terminate()
                await_end(process)
                break
            time.sleep(0.1)
        return process.returncode


# ---------------------------------------------------------------- one run


def _arguments(fl_ctx: FLContext, arguments: Sequence[str]) -> list[str]:
    """A job's arguments at this party, with its local configuration, and the folder for its runs.

    That folder is the party's and not the job's: a job that is submitted again goes on from the checkpoints in it.
    """
    workspace, job = fl_ctx.get_engine().get_workspace(), fl_ctx.get_job_id()
    configs, local = Path(workspace.get_app_config_dir(job)), Path(workspace.get_file_path_in_site_config(LOCAL))
    key = "--config="
    here = [f"{key}{configs / each.removeprefix(key)}" if each.startswith(key) else each for each in arguments]
    here += [f"{key}{local}"] if local.is_file() else []
    return [*here, f"--trainer.default_root_dir={Path(workspace.get_root_dir()) / RUNS}"]


def _places(fl_ctx: FLContext) -> tuple[Path, Path, Path]:
    """Folder of a site's own configuration, file for the output of its process in a job, and its startup kit."""
    workspace = fl_ctx.get_engine().get_workspace()
    local = Path(workspace.get_file_path_in_site_config(RULES)).parent
    output = Path(workspace.get_root_dir()) / RUNS / f"{fl_ctx.get_identity_name()}-{fl_ctx.get_job_id()}.log"
    return local, output, Path(workspace.get_startup_kit_dir())


def _serve(fl_ctx: FLContext, arguments: Sequence[str], seat: Seat) -> None:
    """Take the server's seat in the job's run."""
    # at the server alone: a site's job process, which hands messages on, does without Lightning and starts sooner
    from fedlit.cli.arguments import normalise
    from fedlit.cli.seats import JOB, read_run, take_seat

    take_seat(read_run(normalise(["fit", *_arguments(fl_ctx, arguments)]), JOB), seat)


def _attempt(run: Callable[[], None]) -> str | None:
    """Run, and return why it failed; ``None`` if it did not."""
    try:
        run()
    except SystemExit as error:
        return None if not error.code else str(error.code)
    except Exception as error:
        if not isinstance(error, FederationError):
            _log.exception("the run failed")
        return f"{type(error).__name__}: {error}"
    return None


def _end_with(abort_signal: Signal, seat: CarriedServer, over: threading.Event) -> None:
    """End the run at the server when FLARE ends the job."""
    while not over.wait(0.2):
        if abort_signal.triggered:
            seat.end("the job was ended from outside")
            return


# ---------------------------------------------------------------- messages


def _register(engine: Any, keys: Mapping[str, str], handle: Callable[[str, Message], dict[str, Any]]) -> None:
    """Let FLARE's server pass the messages of sites to ``handle``.

    The name in a message is claimed by its sender. The key proves it: a site received it with its task, and FLARE gives
    a task only to the site that it is for, by the token that this site received when it was admitted.
    """

    def answer(topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        peer = fl_ctx.get_peer_context()
        name = "" if peer is None else str(peer.get_identity_name())
        message, key = request.get(_MESSAGE), request.get(_KEY)
        if not isinstance(message, Mapping) or not isinstance(key, str):
            return make_reply(ReturnCode.BAD_REQUEST_DATA)
        if name not in keys or not hmac.compare_digest(keys[name].encode(), key.encode()):
            return make_reply(ReturnCode.UNAUTHENTICATED)
        reply = make_reply(ReturnCode.OK)
        reply[_MESSAGE] = handle(name, message)
        return reply

    engine.register_aux_message_handler(TOPIC, answer)


def _send(engine: Any, key: str, message: Message, seconds: float) -> Message | None:
    """Send a message to FLARE's server, and return its answer.

    A call is cut into messages of 1 MB, as FLARE is slower at longer ones: one of 16 MB took 772 ms to the server and
    back, sixteen of 1 MB took 170 (FLARE 2.9, simulator, 2 busy cores).
    """
    request = Shareable()
    request[_MESSAGE], request[_KEY] = dict(message), key
    with engine.new_context() as fl_ctx:
        replies = engine.send_aux_request("server", TOPIC, request, seconds, fl_ctx)
    for reply in replies.values():
        if isinstance(reply, Shareable) and reply.get_return_code() == ReturnCode.OK:
            answer = reply.get(_MESSAGE)
            return answer if isinstance(answer, Mapping) else None
    return None
