"""FederatedStrategy: puts the clients of a federation on the processes of a Trainer."""

from __future__ import annotations

import atexit
import hashlib
import os
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from fedlit.federation import FederatedLoader, Federation, FederationError, Participation
from fedlit.federation.channel import declared_by
from fedlit.federation.choices import check_choices
from fedlit.federation.client import names_of, place
from fedlit.federation.transport import OneProcess, ProcessGroup, Transport
from fedlit.module import FederatedModule
from fedlit.privacy import GaussianMechanism, SecureAggregation, TwoPartyAffine
from fedlit.training.checkpoints import class_path, gather
from fedlit.training.rounds import plan_rounds

_START_UP = timedelta(minutes=10)
"""Processes may start at different times (imports, data); only then is the federation's own timeout in force."""

_joined: dict[timedelta, Transport] = {}
"""Process groups made so far: they outlive a Trainer, and a script may run several."""


class FederatedStrategy(DDPStrategy):
    """Hosts the clients on ``devices`` processes, or all of them on one; neither wraps nor syncs the module.

    Every process trains its own clients; they meet in exchanges only. Results do not depend on the number of
    processes: to the last bit on CPU with `Plain` sums and the same ``num_threads``.

    Args:
        local_steps: Optimiser steps per client and round; ``None`` is one local epoch, in which clients with less
            data take fewer steps.
        rounds_per_epoch: Rounds in one epoch of the Trainer. With 1, validation, patience and checkpoints count
            rounds; raise it for rounds of few steps, as Lightning spends milliseconds on each epoch.
        participation: Who is present in a round; ``None`` is the method's choice, which is everyone unless its
            documentation says otherwise.
        heard: Per channel, who of those present is heard, nested in the order given.
        nested_heard: ``False`` draws each channel's subset independently of the others'.
        privacy: Backend for secure sums, one for all channels, or one for each channel that is summed over; default
            `Plain`.
        two_party: Protocol for what pairs of clients compute together, one for all such channels or one for each;
            default in the clear.
        differential_privacy: Clips and blurs what each client sends, one mechanism for all channels or one per channel;
            composes with every backend.
        placement: Client names per process; ``None`` deals out contiguous shares.
        timeout: Seconds that a process waits for the others before it gives up.
        num_threads: CPU threads per process; ``None`` leaves Lightning's choice, which depends on the number of
            processes. Fix it (1) to compare runs bit by bit.
        start_method: How ``devices=N`` starts processes: as torch.distributed and Lightning's DDP name it.
        drops: Old name of ``heard``.
        nested_drops: Old name of ``nested_heard``.

    Raises:
        RosterError: When a run starts, if there are more processes than clients.
        ChannelError: When a run starts, if a choice does not fit the channels that the method declares.
        ValueError: If a number is out of range, or, when a run starts, if ``drops`` is given beside ``heard``.
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
        placement: list[list[str]] | None = None,
        timeout: float = 600.0,
        num_threads: int | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        drops: dict[str, Participation] | None = None,
        nested_drops: bool = True,
    ) -> None:
        if local_steps is not None and local_steps < 1:
            raise ValueError(
                f"local_steps must be at least 1 optimiser step or None for a local epoch, got {local_steps}"
            )
        if rounds_per_epoch < 1:
            raise ValueError(f"rounds_per_epoch must be at least 1, got {rounds_per_epoch}")
        if timeout <= 0:
            raise ValueError(f"timeout must be positive seconds, got {timeout}")
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        check_choices(privacy, two_party, differential_privacy)
        super().__init__(process_group_backend="gloo", timeout=timedelta(seconds=timeout), start_method=start_method)
        self.local_steps = local_steps
        self.rounds_per_epoch = rounds_per_epoch
        self.participation = participation
        self.heard, self.drops = heard, drops
        self.nested_heard, self.nested_drops = nested_heard, nested_drops
        self.privacy = privacy
        self.two_party = two_party
        self.differential_privacy = differential_privacy
        self.placement = placement
        self.num_threads = num_threads
        self._federation: Federation | None = None
        self._trained: FederatedModule | None = None

    @property
    def federation(self) -> Federation | None:
        """The clients on their processes; ``None`` before a run has started."""
        return self._federation

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """No sampler splits a client's data between processes."""
        return {"num_replicas": 1, "rank": 0}

    # ---------------------------------------------------------------- starting up

    def setup_environment(self) -> None:
        """Join the processes and put the clients on them; ranks are known only from here on."""
        super().setup_environment()
        module = self._federated_module()
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        previous = self._federation
        federation = module.make_federation(
            channels=declared_by(module.trainer.callbacks),  # type: ignore[attr-defined]
            transport=self._transport(),
            placement=self.placement,
            participation=module.default_participation if self.participation is None else self.participation,
            heard=self.heard,
            nested_heard=self.nested_heard,
            drops=self.drops,
            nested_drops=self.nested_drops,
            privacy=self.privacy,
            two_party=self.two_party,
            differential_privacy=self.differential_privacy,
        )
        if previous is None or self._trained is not module:  # fit, then test: the same federation goes on
            self._federation, self._trained = federation, module
        assert self._federation is not None
        self._federation.device = self.root_device
        federation.agree("roster", [(client.name, client.role) for client in federation.clients])
        federation.agree("method", class_path(module))
        federation.agree("rounds", (self.local_steps, self.rounds_per_epoch))
        federation.agree("seed (call seed_everything before building the module)", federation.seed)
        if self.world_size > 1:
            federation.agree("the initial network (call seed_everything before building it)", _digest(module))

    def setup_distributed(self) -> None:
        """Join the processes, on CPU tensors; one process needs no process group."""
        self.set_world_ranks()
        place(self._federated_module().clients, self.world_size, self.placement)  # too many processes: say so early
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
        """As the base strategy: DDP would wrap the module and overwrite every client by rank 0's."""
        Strategy.setup(self, trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        return model

    def process_dataloader(self, dataloader: object) -> object:
        """Cut training data into rounds, and give all processes the same number of batches.

        Raises:
            TypeError: If the data are not a `FederatedLoader`.
            ValueError: If a training loader is given for evaluation, or the other way round.
            RosterError: If it has a client that is not in the roster.
        """
        module = self._federated_module()
        if dataloader == [] and not module.trainer.training:  # as of a data module that keeps no validation samples
            return dataloader
        if not isinstance(dataloader, FederatedLoader):
            raise TypeError(
                f"FederatedStrategy needs a FederatedLoader, got {type(dataloader).__name__}: use a "
                "fedlit.data.DomainDataModule, or FederatedLoader({client: dataset}) from fedlit.data"
            )
        training = bool(module.trainer.training)
        if dataloader.training != training:
            raise ValueError(
                f"a FederatedLoader for {'training' if training else 'evaluation'} needs training={training}, got "
                f"training={dataloader.training}"
            )
        dataloader.keep(names_of(module.federation.local_clients), names_of(module.clients))
        if training:
            plan_rounds(module, dataloader, self.local_steps, self.rounds_per_epoch)
        else:
            dataloader.guarded = module.target.name
        return dataloader

    def _configure_launcher(self) -> None:
        """No launcher for one process: Lightning's would leave variables behind that mislead the next Trainer."""
        environment = self.cluster_environment
        assert environment is not None
        if self.num_processes * self.num_nodes > 1 or environment.creates_processes_externally:
            super()._configure_launcher()

    def _transport(self) -> Transport:
        if self.world_size == 1:
            return OneProcess()
        assert self._timeout is not None
        if self._timeout not in _joined:
            _joined[self._timeout] = ProcessGroup(self._timeout)
        return _joined[self._timeout]

    def _federated_module(self) -> FederatedModule:
        module = self.lightning_module
        if not isinstance(module, FederatedModule):
            raise TypeError(f"FederatedStrategy trains a FederatedModule, got {type(module).__name__}")
        return module

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write one file for all clients, from rank 0; every process must call it.

        Raises:
            FederationError: On every process, if processes differ in what is no client's: see `gather`.
        """
        module, federation = self._federated_module(), self._federation
        assert federation is not None
        if self.world_size > 1:
            if module.trainer.state.status == TrainerStatus.INTERRUPTED:
                # Another process may be gone: waiting for its part would hide the error that stopped this one.
                rank_zero_warn(f"no checkpoint written to {filepath}: the run was interrupted by an error")
                return
            for state in checkpoint["clients"].values():  # views drag their whole storage along: see `StackedReplicas`
                state["weights"] = {name: tensor.clone() for name, tensor in state["weights"].items()}
            parts, error = federation.transport.gather_object(checkpoint), None
            if parts is not None:
                data = type(module.trainer.datamodule)  # type: ignore[attr-defined]
                own = (data.__qualname__, LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY)
                try:
                    checkpoint = gather(parts, names_of(federation.clients), own)
                except FederationError as found:
                    error = found
            federation.check("checkpoint", error)
        super().save_checkpoint(checkpoint, filepath, storage_options)


def _digest(module: FederatedModule) -> str:
    """Fingerprint of the networks that clients start from."""
    digest = hashlib.sha256()
    for network in module.originals:
        for name, tensor in network.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _leave() -> None:
    with suppress(Exception):
        dist.destroy_process_group()


StrategyRegistry.register(
    "federated", FederatedStrategy, description="Clients of a federation on the processes of a Trainer"
)
