"""FederatedStrategy: places the clients of a federation on the processes of a Trainer."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from fedlit.checks import check, check_at_least, check_positive, refuse
from fedlit.federation import FederatedLoader, Federation, Participation, RosterError
from fedlit.federation.choices import Reports, check_choices
from fedlit.federation.client import names_of, place
from fedlit.federation.errors import LostClientsError, public_text
from fedlit.federation.leaks import sentences
from fedlit.federation.transport import OneProcess, ProcessGroup, Transport
from fedlit.module import FederatedModule
from fedlit.privacy import GaussianMechanism, PrivacyWarning, SecureAggregation, TwoPartyAffine
from fedlit.remote import Seat
from fedlit.remote.star import PROTOCOL, ServerStar, SiteStar
from fedlit.run.agreement import arguments, facts_of, plain, trained_with
from fedlit.run.checkpoint_files import StreamedCheckpointIO, part_of, read, stale
from fedlit.run.ending import missing_from, skip_nothing
from fedlit.run.gathering import unite, warn_of_gathered
from fedlit.run.journals import keep_journal
from fedlit.run.offload import DiskOffload
from fedlit.run.planning import plan_rounds
from fedlit.run.sample_check import check_evaluation
from fedlit.run.trainer_checks import check_reported

_START_UP = timedelta(minutes=10)
"""Processes may start at different times (imports, data); the federation's timeout applies afterwards."""

_joined: dict[timedelta, tuple[Transport, Transport]] = {}
"""Process groups for the federation and for Lightning, which outlive a Trainer, as scripts run several."""


class FederatedStrategy(DDPStrategy):
    """Host the clients on ``devices`` processes, or all of them on one; neither wraps nor syncs the module.

    Every process trains its clients; they meet in exchanges only. Results do not depend on the number of processes: to
    the last bit on CPUs of one type, with the same libraries, `Plain` sums and the same ``num_threads``.

    Args:
        local_steps: Optimiser steps per client and round; ``None`` is one local epoch, in which clients with less data
            take fewer steps.
        rounds_per_epoch: Rounds in one epoch of the Trainer. With 1, validation, patience and checkpoints count rounds;
            raise it for rounds of few steps, as Lightning spends milliseconds on each epoch.
        participation: Clients that are present in a round; ``None`` is the method's choice, by default everyone.
        heard: Per channel, which of the present clients participate in it, nested in the order passed.
        nested_heard: ``False`` draws each channel's subset independently of the others'.
        privacy: Backend for secure sums, one for all channels or one for each channel; default `Plain`.
        two_party: Protocol for what pairs of clients compute together, one for all such channels or one for each;
            default in plaintext.
        differential_privacy: Clipping and noise on each client's messages, one mechanism for all channels or one per
            channel; composes with every backend.
        reports: How clients report losses, gradient norms and scores for logging: ``"exact"``, ``"off"``, or a
            mechanism with accounted noise; ``None`` is ``"exact"``, and beside ``differential_privacy`` ``"off"``.
        encrypted: Encrypt messages from client to client, so that neither the server nor a relay reads them; ``None``
            does where a backend or protocol protects other messages.
        epsilon_budget: Greatest epsilon (``privacy/epsilon_sum``) of a client hosted here; what exceeds it is not sent.
        account: Folder, or file by client, in which each release is written before it leaves, so that the budget is one
            of all runs that name the same. ``None`` counts one run; ``fedlit join`` has ``accounts`` beside its runs.
        placement: Client names per process; ``None`` deals out contiguous shares. The first list may be empty: process
            0 is then the server alone, as where clients do not trust it.
        timeout: Seconds that a process waits for the others.
        num_threads: CPU threads per process; ``None`` is Lightning's choice, which depends on the number of processes,
            and ``"auto"`` as few of these as are nearly as fast as any, tried before training on a copy of a client's
            network: checkpoints have the choice. Fix it (1) to compare runs bit by bit.
        start_method: How ``devices=N`` starts processes, as in torch.distributed and Lightning's DDP.
        gather_checkpoints: Let process 0 write one file for all clients, with weights and optimiser states in
            plaintext; otherwise each process writes a file (``NAME.ckpt``, ``NAME.ckpt.part1``, …), and resumes from
            the files on its disk. ``None`` gathers unless a backend protects single messages.
        seat: Endpoint of this process in a federation across organisations, `fedlit.remote.Server` or
            `fedlit.remote.Site`, with a Trainer of one device; ``None`` is none. Every process then writes its clients'
            checkpoint.
        max_share: Maximum of the weights in a mean that one of three clients or more may have (see ``weighting`` of the
            method), in (0, 1]. A run in which one has more is refused with its name: of the sources at the start, and
            of a mean that the target is in before the first one. Each process may have its own.
        journal: Folder in which each of several processes has a journal of what its clients release, as a site has
            (`fedlit.remote.Site`), where messages are hidden or noised; a relative one is in `Trainer.log_dir`, and a
            run that is resumed needs that of before. ``None`` keeps none, but for ``fedlit fit``: beside its runs.
        allow_rejoin: Clients whose identity key may be another one than in the journals, as theirs is lost.
        state_dir: Folder on a local disk for files in which weights and optimiser states of clients lie, so that memory
            holds those of the client whose turn it is, as long as networks are large and trained in turns; on CPUs,
            under Linux. The files have no names, and go with the process; those that are forked from it share them.
            ``None`` keeps all in memory.

    Attributes:
        stays_joined: Stay in a federation across organisations when a run ends, as for ``Trainer.test`` after ``fit``;
            then call `leave`.

    Raises:
        RosterError: When a run starts, if there are more processes than clients.
        ChannelError: When a run starts, if a choice does not fit the channels that the method declares.
        ValueError: If a number is out of range.
    """

    strategy_name = "federated"

    def __init__(
        self,
        local_steps: int | None = None,
        rounds_per_epoch: int = 1,
        participation: Participation | None = None,
        heard: dict[str, Participation] | None = None,
        nested_heard: bool = True,
        privacy: SecureAggregation | dict[str, SecureAggregation] | None = None,
        two_party: TwoPartyAffine | dict[str, TwoPartyAffine] | None = None,
        differential_privacy: GaussianMechanism | dict[str, GaussianMechanism] | None = None,
        reports: Reports | None = None,
        encrypted: bool | None = None,
        epsilon_budget: float | None = None,
        account: str | dict[str, str] | None = None,
        placement: list[list[str]] | None = None,
        timeout: float = 600.0,
        num_threads: int | Literal["auto"] | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        gather_checkpoints: bool | None = None,
        seat: Seat | None = None,
        max_share: float = 0.9,
        journal: str | None = None,
        allow_rejoin: list[str] | None = None,
        state_dir: str | None = None,
    ) -> None:
        if local_steps is not None:
            check_at_least("local_steps", local_steps, 1, "optimiser step", "None is a local epoch")
        check_at_least("rounds_per_epoch", rounds_per_epoch, 1)
        check(timeout > 0, "timeout", "positive seconds", timeout)
        check(0 < max_share <= 1, "max_share", "above 0 and at most 1", max_share, "1 allows everything")
        if num_threads is not None and num_threads != "auto":
            whole = type(num_threads) is int and num_threads >= 1
            check(whole, "num_threads", "a whole number of at least 1, or 'auto'", num_threads)
        check_choices(privacy, two_party, differential_privacy, reports)
        if epsilon_budget is not None:
            check_positive("epsilon_budget", epsilon_budget)
        super().__init__(process_group_backend="gloo", timeout=timedelta(seconds=timeout), start_method=start_method)
        self.local_steps, self.rounds_per_epoch = local_steps, rounds_per_epoch
        self.participation, self.heard, self.nested_heard = participation, heard, nested_heard
        self.privacy, self.two_party, self.differential_privacy = privacy, two_party, differential_privacy
        self.reports, self.encrypted, self.max_share = reports, encrypted, max_share
        self.epsilon_budget, self.account = epsilon_budget, account
        self.journal, self.allow_rejoin = journal, allow_rejoin
        self.placement, self.num_threads, self.gather_checkpoints = placement, num_threads, gather_checkpoints
        self.seat, self.stays_joined = seat, False
        self.state_dir = state_dir
        self._removed: _PATH | None = None
        self._star: ServerStar | SiteStar | None = None
        self._warned = False
        self._federation: Federation | None = None
        self._trained: FederatedModule | None = None

    @property
    def federation(self) -> Federation | None:
        """The federation of the run; ``None`` before a run has started."""
        return self._federation

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes checkpoints: a plugin of the Trainer, or by default tensor by tensor."""
        if self._checkpoint_io is None:
            self._checkpoint_io = StreamedCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO) and self._checkpoint_io.checkpoint_io is None:
            self._checkpoint_io.checkpoint_io = StreamedCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Keep samplers from splitting a client's data between processes."""
        return {"num_replicas": 1, "rank": 0}

    # ---------------------------------------------------------------- starting up

    def setup_environment(self) -> None:
        """Join the processes and place the clients on them; ranks are known only from here on."""
        super().setup_environment()
        module = self._federated_module()
        if self.num_threads is not None and self.num_threads != "auto":
            torch.set_num_threads(self.num_threads)
        previous = self._federation
        together = self._star is None and (self.world_size > 1 or self.seat is not None)  # a star has compared them
        self._offload(module)
        facts = facts_of(module.run, (self.local_steps, self.rounds_per_epoch)) if together else {}
        transport, placement = self._joined(facts)
        federation = module.run.make_federation(
            transport=transport,
            placement=placement,
            participation=module.requires.participation if self.participation is None else self.participation,
            heard=self.heard,
            nested_heard=self.nested_heard,
            privacy=self.privacy,
            two_party=self.two_party,
            differential_privacy=self.differential_privacy,
            reports=self.reports,
            encrypted=self.encrypted,
            epsilon_budget=self.epsilon_budget,
            account=self.seat.accounts if self.account is None and self.seat is not None else self.account,
        )
        apart = self.seat is not None and self._star is None  # predicts by itself
        if previous is None or self._trained is not module or apart:  # fit, then test: the same federation goes on
            self._federation, self._trained = federation, module
        assert self._federation is not None
        if self._federation is federation and not apart:
            keep_journal(module.run, federation, None if self.seat is None else self.seat.journal, self.journal)
        self._federation.device = self.root_device
        if self._federation is federation and federation.hides and federation.transport.world_size > 1:
            allowed = self.allow_rejoin if self.seat is None else self.seat.allow_rejoin
            federation.identify(None if self.seat is None else self.seat.voucher(), allowed or ())
        self._federation.stage = lambda: str(module.trainer.state.stage)
        self._federation.on_read = module.run.release
        for label, value in facts.items() if self._star is None else ():  # a server compares them before all else
            federation.agree(label, value)
        if previous is None:
            for sentence in sentences(federation.channels, federation.roster.rank_of):
                rank_zero_warn(sentence, category=PrivacyWarning)
        if federation.channels.reports == "off":
            check_reported(module.trainer)

    def _offload(self, module: FederatedModule) -> None:
        if self.state_dir is None:
            module.run.offload = None  # of an earlier run
            return
        device = self.root_device
        check(device.type == "cpu", "state_dir", f"left out on {device}", self.state_dir, "files are the CPU's memory")
        rule = "left out beside vectorize, which holds all networks in one tensor"
        check(not module.run.local.vectorize, "state_dir", rule, self.state_dir)
        offload = DiskOffload(self.state_dir)
        if module.run.offload is None or module.run.offload.folder != offload.folder:
            module.run.offload = offload

    def _joined(self, facts: dict[str, Any]) -> tuple[Transport, Sequence[Sequence[str]] | None]:
        """Return this process's transport, and the clients of each process."""
        module = self._federated_module()
        trainer = module.trainer
        if self._star is not None:
            return self._star, [[], *self._star.sites.values()]
        if self.seat is None or trainer.state.fn == TrainerFn.PREDICTING:
            return self._transports()[0], self.placement
        if trainer.state.fn != TrainerFn.FITTING:
            rule = "left out in an evaluation, as a process alone has some clients' data only"
            way_out = "predict at the target's site, or set stays_joined on the strategy of every process before fit"
            refuse("seat", rule, self.seat, way_out)
        for name in ("placement", "gather_checkpoints", "journal", "allow_rejoin"):
            value, rule = getattr(self, name), "left out beside a seat: it is for processes of one job"
            check(value is None, name, rule, value, "the seats have their own")
        check(self.world_size == 1, "devices", "1 beside a seat", self.world_size, "it trains all clients of a site")
        if any(isinstance(callback, Timer) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            refuse("max_time", "left out beside a seat, as each process has its own clock", True, "give max_epochs")
        if self.seat.policy is not None:
            self.seat.policy.check_run(module.run, privacy=self.privacy, two_party=self.two_party)
        trainer.num_sanity_val_steps = 0  # which those who come back do not run
        choices = (self.privacy, self.two_party, self.differential_privacy, self.reports, self.encrypted)
        self._star = self.seat.open(
            {
                "the version of fedlit": version("fedlit"),
                "the protocol": PROTOCOL,
                **facts,
                "the arguments of the method": arguments(module.run),
                "the Trainer's arguments": trained_with(trainer),
                "who takes part": plain([self.participation, self.heard, self.nested_heard]),
                "privacy": plain(choices),
            }
        )
        return self._star, [[], *self._star.sites.values()]

    def setup_distributed(self) -> None:
        """Join the processes, on CPU tensors; one process needs no process group."""
        self.set_world_ranks()
        place(self._federated_module().clients, self.world_size, self.placement)  # too many processes: raise early
        if self.world_size == 1 or dist.is_initialized():
            return
        environment = self.cluster_environment
        assert environment is not None
        elastic = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store: Store = TCPStore(
            environment.main_address,
            environment.main_port,
            None if elastic else self.world_size,
            is_master=self.global_rank == 0 and not elastic,
            timeout=_START_UP,
        )
        if elastic:  # a restarted job must not find the addresses of the one that failed
            store = PrefixStore(f"fedlit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(
            "gloo", store=store, rank=self.global_rank, world_size=self.world_size, timeout=self._timeout
        )
        atexit.register(_leave)

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up as the base strategy: DDP would wrap the module and overwrite every client by rank 0's."""
        Strategy.setup(self, trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        return model

    def process_dataloader(self, dataloader: object) -> object:
        """Cut training data into rounds, and give all processes the same number of batches.

        Raises:
            TypeError: If the data are not a `FederatedLoader`.
            ValueError: If a training loader is passed for evaluation, or the other way round.
            RosterError: On every process, if a loader's clients are not those that its process hosts.
        """
        module = self._federated_module()
        federation, training = module.federation, bool(module.trainer.training)
        if dataloader == [] and not training:  # as of a data module that keeps no validation samples
            federation.check("loaders", None)
            federation.transport.all_gather(0, "lengths of loaders")
            return dataloader
        if not isinstance(dataloader, FederatedLoader):
            way_out = "use a fedlit.data.DomainDataModule, FederatedLoader({client: dataset}) or its from_loaders"
            refuse("dataloaders", "a FederatedLoader", dataloader, way_out, TypeError, f"a {type(dataloader).__name__}")
        stage = "training" if training else "evaluation"
        check(dataloader.training == training, "training", f"{training} in a loader for {stage}", dataloader.training)
        error: RosterError | None = None
        try:
            dataloader.keep(names_of(federation.local_clients), names_of(module.clients))
        except RosterError as found:
            error = found
        federation.check("loaders", error)
        if training:
            plan_rounds(module.run, dataloader, self.local_steps, self.rounds_per_epoch, self.max_share)
            skip_nothing(module.run, dataloader)
        else:
            dataloader.guarded = module.target.name
            check_evaluation(module.run, dataloader)
            # a process without samples goes along with the others
            lengths = federation.transport.all_gather(len(dataloader), "lengths of loaders")
            dataloader.least_batches = max(length for length in lengths if isinstance(length, int))
        return dataloader

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a local step, of one client after the other if they are large, also where its gradients only add up."""
        module, step = self._federated_module(), partial(super().training_step, *args, **kwargs)
        trainer, turns = module.trainer, module.run.turns
        waits = trainer.fit_loop._should_accumulate() and module.automatic_optimization
        if not waits or turns.client is not None:
            return step()
        (optimizer,), batches = trainer.optimizers, trainer.accumulate_grad_batches
        is_first = trainer.fit_loop.batch_idx % batches == 0
        return turns.accumulate(optimizer, is_first, step, lambda loss: self.backward(loss / batches, optimizer))

    def _configure_launcher(self) -> None:
        """Launch nothing for one process: Lightning's would leave variables behind that mislead the next Trainer."""
        environment = self.cluster_environment
        assert environment is not None
        if self.num_processes * self.num_nodes > 1 or environment.creates_processes_externally:
            super()._configure_launcher()

    def _transports(self) -> tuple[Transport, Transport]:
        if self.world_size == 1:
            return OneProcess(), OneProcess()
        assert self._timeout is not None
        if self._timeout not in _joined:
            _joined[self._timeout] = ProcessGroup(self._timeout), ProcessGroup(self._timeout)
        return _joined[self._timeout]

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Return rank ``src``'s object, of plain data, as nothing that another process sends is unpickled.

        Raises:
            PayloadError: If it is something else, such as an object of a class.
        """
        if self.world_size == 1 or not dist.is_initialized():
            return obj
        self._settle()
        _, transport = self._transports()
        sent: TBroadcast = transport.all_gather(obj if self.global_rank == src else None, "a broadcast of Lightning's")[
            src
        ]
        return sent

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes."""
        self._settle()
        super().barrier(*args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over processes."""
        self._settle()
        return super().reduce(tensor, group, reduce_op)

    def _settle(self) -> None:
        """Raise failures of the last exchange before processes do something together that is no exchange."""
        if self._federation is not None:
            self._federation.settle()

    def on_exception(self, exception: BaseException) -> None:
        """Send the reason why this process leaves to the others across organisations."""
        super().on_exception(exception)
        stopped = isinstance(exception, KeyboardInterrupt | SIGTERMException | LostClientsError)
        self._leave(f"{type(exception).__name__}: {public_text(exception)}"[:500], stopped)

    def teardown(self) -> None:
        """Leave a federation across organisations, unless this process ``stays_joined``."""
        if not self.stays_joined:
            self.leave()
        super().teardown()

    def leave(self) -> None:
        """Leave a federation across organisations, once all have finished."""
        if self.seat and self._federation:
            self.seat.missing = missing_from(self._federation)
        self._leave(None)

    def _leave(self, why: str | None, stopped: bool = False) -> None:
        star, self._star = self._star, None
        if isinstance(star, ServerStar):
            star.close(why, stopped)
        elif star is not None:
            star.close(why or "done")

    def _federated_module(self) -> FederatedModule:
        module = self.lightning_module
        if not isinstance(module, FederatedModule):
            raise TypeError(
                f"FederatedStrategy trains a federated method, got {type(module).__name__}: to have every client train "
                "a LightningModule of your own, give the Trainer fedlit.Federated(module, clients, target, "
                "num_classes)"
            )
        return module

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write a checkpoint; every process must call it.

        Process 0 writes one file for all clients; or each process writes its clients', where a backend protects single
        messages, unless ``gather_checkpoints`` asks for one file.

        Raises:
            FederationError: On every process, if processes differ in public state.
            PayloadError: On every process, if a client's state is to be gathered and has what no message can hold.
        """
        run, path, writes_all = self._federated_module().run, str(filepath), True
        if self._star is None and self.world_size > 1:
            if run.trainer.state.status == TrainerStatus.INTERRUPTED:
                # Another process may be gone: waiting for its part would hide the error that stopped this one.
                rank_zero_warn(f"no checkpoint written to {filepath}: the run was interrupted by an error")
                return
            hides = any(channel.hides for channel in run.federation.channels.values())
            writes_all = not hides if self.gather_checkpoints is None else self.gather_checkpoints
            if hides and writes_all and not self._warned:
                self._warned = True
                warn_of_gathered(run.federation)
            checkpoint = unite(run, checkpoint, writes_all, self.global_rank)
        rank = self.global_rank
        if not writes_all or not rank:
            self.checkpoint_io.save_checkpoint(checkpoint, part_of(path, rank), storage_options)
        if not rank:
            for left in stale(path, 1 if writes_all else self.world_size):  # of a run that wrote here before
                self.checkpoint_io.remove_checkpoint(left)
        if run.offload is not None:
            run.offload.release_all()

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Read all files of a checkpoint that lie here; ``checkpoint_path`` may be any of them."""
        return read(str(checkpoint_path), lambda file: super(DDPStrategy, self).load_checkpoint(file, weights_only))

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove what this process wrote of a checkpoint.

        Beside a seat, the last one stays until another is removed: the server may come back a round earlier.
        """
        if self.seat is not None:
            before, self._removed = self._removed, filepath
            if before is None or not Path(before).is_file():
                return
            filepath = before
        path = part_of(str(filepath), self.global_rank)
        if not self.global_rank or Path(path).is_file():
            self.checkpoint_io.remove_checkpoint(path)


def _leave() -> None:
    with suppress(Exception):
        dist.destroy_process_group()


StrategyRegistry.register(
    "federated", FederatedStrategy, description="Clients of a federation on the processes of a Trainer"
)
