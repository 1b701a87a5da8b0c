"""One run of a federation on one of its processes, which tests start, stall, kill and feed with bad input."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import SGD

import fedlit.methods
import fedlit.privacy
import method_table
from faults import Fault
from fedlit import Client, Component, Federated, PhaseSettings, Run
from fedlit.callbacks import ClinicMetrics, ConformalIntervals, OracleAccuracy
from fedlit.data import Digits, FeatureDomains
from fedlit.data.base import DomainDataset
from fedlit.federation import Everyone, FederatedLoader, Fraction, Schedule, Summed
from fedlit.methods import FedAvg, FedRFTCA
from fedlit.models import MLP
from fedlit.privacy import PrivacyWarning
from fedlit.remote import AheadOfServerError, DismissedError, LostClientsError, Server, ServerLostError, Site
from helpers import QUIET, STATEFUL, build, digits, fingerprint, normalised_head, trainer, weights
from own_modules import Net
from processes import LAUNCHED
from relay import relayed

SITES = ["clean", "blended", "fonts"]

ARGUMENTS: dict[str, dict[str, Any]] = {
    name: given | ({"warmup_rounds": 0} if "warmup_rounds" in given else {})
    for name, given in method_table.ARGUMENTS.items()
} | {
    "FedAvg, refined": {"refine": "network"},
    "FedAvg, moments": {"classifier": normalised_head(), "batchnorm_average": "moments"},
    "Voting": {"num_frequencies": 16, "num_components": 8, "classifier_period": None},
    "FedCORAL, pairwise": {"match": "pairwise", "every": "round", "average": "classifier"},
    "FedGP by layer": {"granularity": "layer"},
    "FedGP auto, one batch": {"beta": "auto"},
    "FedDANN, groups": {
        "schedule_rounds": 2,
        "param_groups": [
            {"part": "extractor", "lr": 0.003},
            {"part": "discriminator", "lr": 0.03, "weight_decay": 0.01},
            {"client": "fonts", "part": "classifier", "lr": 0.02},
        ],
    },
    "FedDaDiL, phases": {
        "num_atoms": 2,
        "atom_size": 20,
        "penalty": 0.1,
        "warmup_rounds": 2,
        "encoder": PhaseSettings(partial(SGD, lr=0.1), batch_size=16, local_steps=3),
    },
    "FedDaDiL, phases, random": {
        "num_atoms": 2,
        "atom_size": 20,
        "penalty": 0.1,
        "warmup_rounds": 2,
        "atom_start": "random",
    },
    "FedMMD, phases": {"degree": 1, "warmup_rounds": 2, "classifier_period": None},
    "FedMMD, pairwise": {"degree": 1, "exchange": "pairwise", "warmup_rounds": 0},
    "CoMDA, groups": {"warmup_rounds": 0, "param_groups": [{"part": "peer", "lr": 0.02}]},
}
"""What methods are given, by the name under which they are asked for."""


class Trouble(pl.Callback, Component):
    """Something that happens to one process in round 1."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_round_start(self, run: Run) -> None:
        if run.clock.round_idx != 1 or run.trainer.global_rank != 1:
            return
        if self.kind == "nan":
            with torch.no_grad():
                client = run.federation.local_clients[0]
                next(run.replicas[client].parameters()).fill_(float("nan"))
        elif self.kind == "stall":
            time.sleep(2.5)
        elif self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "raise":
            raise ValueError("something went wrong at this site")


class OutOfStep(FedAvg):
    """Rank 1 communicates on another channel than the others."""

    channels = (Summed("weights", up="learners"), Summed("gossip", up="learners"))

    def on_round_end(self, run: Run) -> None:
        rank = self.federation.transport.rank
        self.run.weights.average_("gossip" if rank == 1 else "weights", among=run.learners())


class OwnDataOnly(pl.LightningDataModule):
    """A site's data module: it has the data of the clients hosted here, and knows of the others but their names.

    Args:
        batch_size: Of the target.
        numbers: Whether labels are numbers around a million, a thousand for each class.
    """

    def __init__(self, batch_size: int = 64, numbers: bool = False) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.numbers = numbers

    def train_dataloader(self) -> FederatedLoader:
        return FederatedLoader(
            self.parts("train"), {name: self.batch_size if name == "fonts" else 64 for name in SITES}
        )

    def val_dataloader(self) -> FederatedLoader:
        return FederatedLoader(self.parts("val"), training=False)

    def parts(self, stage: str) -> dict[str, Any]:
        parts: dict[str, Any] = {name: data.dataset(name, stage) for name, data in self.own().items()}
        if not self.numbers:
            return parts
        return {
            name: DomainDataset(
                part.x, torch.where(part.y >= 0, 1e6 + 1e3 * part.y.double(), torch.nan), part.transform
            )
            for name, part in parts.items()
        }

    def own(self) -> dict[str, Digits]:
        local = self.trainer.lightning_module.federation.local_clients
        return {client.name: digits(target_labels=30) for client in local}


def with_anothers_data(stage: str) -> None:
    """``fit``, ``validate`` or ``predict`` where each of two processes has the data of a client of the other."""
    data = digits(target_labels=30)
    fitted = trainer(1, devices=2)
    names = ["fonts"] if os.environ["LOCAL_RANK"] == "0" else ["clean"]
    part = "train" if stage == "fit" else "test"
    loader = FederatedLoader({name: data.dataset(name, part) for name in names}, 64, training=stage == "fit")
    getattr(fitted, stage)(build(FedAvg, data), loader)


def under_ddp(stage: str, ranks: int) -> str:
    """Fingerprint of a client's weights after two rounds, if so many processes of Lightning's own strategy run them."""
    torch.set_num_threads(1)
    data = digits()
    module = build(FedAvg, data)
    fitted = pl.Trainer(**QUIET, max_epochs=2, devices=ranks, strategy="ddp_find_unused_parameters_true")
    getattr(fitted, stage)(module, data)
    return fingerprint(weights(module, "clean"))


def on_features(folder: str, ranks: int) -> dict[str, str]:
    """Fingerprints of local clients' weights, trained on the files in ``folder``, or of several processes in its parts.

    Files are ``NAME.npz``; process r finds its own in ``folder/r``.
    """
    place = folder if ranks == 1 else f"{folder}/{os.environ['LOCAL_RANK']}"
    data = FeatureDomains(place, clients=["a", "b", "t"], target="t", classes=["no", "yes"], batch_size=8, seed=0)
    module = build(FedAvg, data, extractor=MLP(4, [6]))
    trainer(2, devices=ranks).fit(module, data)
    return {client.name: fingerprint(weights(module, client.name)) for client in module.federation.local_clients}


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """Train as ``arguments`` say; what this process has at the end.

    With ``--repeat`` it goes on from its checkpoint where `fedlit serve` and `fedlit join` do.
    """
    if "--repeat" not in arguments:
        return _run(arguments)
    environment = dict(os.environ)
    for _ in range(5):
        try:
            return _run([each for each in arguments if each != "--repeat"])
        except (AheadOfServerError, DismissedError, LostClientsError, ServerLostError) as error:
            print(error)
            os.environ.update(environment)
            time.sleep(0.2)
    raise AssertionError("it started again and again")


def _run(arguments: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="FedProx")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, help="of a round; all of an epoch if not given")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--save-steps", help="folder for checkpoints within rounds, after each 5 steps")
    parser.add_argument("--trouble", default="none")
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--own", action="store_true", help="each process knows its own clients' data alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--everyone", action="store_true", help="nobody is away")
    parser.add_argument("--values", action="store_true", help="tell the weights, and not their fingerprints alone")
    parser.add_argument("--privacy", default="None", help="an expression over fedlit.privacy")
    parser.add_argument("--noise", help="folder of the accounts of differential privacy")
    parser.add_argument("--placement", default="None", help="an expression: names of clients for each process")
    parser.add_argument("--keep", type=int, default=-1, help="checkpoints of --save-steps, of which the last stay")
    parser.add_argument("--gather", action="store_true", help="checkpoints have all clients whatever is hidden")
    parser.add_argument("--two-party", default="None", help="another one")
    parser.add_argument("--star", help="folder of certificates, for a server and a process for each client")
    parser.add_argument("--journal", help="folder of the journals of the processes of one job")
    parser.add_argument("--allow-rejoin", nargs="*")
    parser.add_argument("--patience", type=float, default=1.0)
    parser.add_argument("--wait-for", type=float, default=30.0)
    parser.add_argument("--latency", type=float, help="milliseconds that a relay adds between server and sites")
    parser.add_argument("--fault", help="see faults.py")
    parser.add_argument("--schedule", help="in JSON: who is there in each round")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each round")
    parser.add_argument("--checkpoints", help="folder for one of each round, by process; an earlier one is resumed")
    parser.add_argument("--numbers", action="store_true", help="regression, with --own")
    parser.add_argument("--measured", action="store_true", help="intervals with --numbers, else metrics of a clinic")
    parser.add_argument("--again", default="own", help="who comes back has its 'own' checkpoint, or 'none'")
    options = parser.parse_args(arguments)
    seat = seated(options.star, options.patience, options.latency, options.wait_for) if options.star else None
    pl.seed_everything(options.seed, verbose=False)
    # several steps in a round, whose variance auto-weights need
    small = {"target_batch_size": 8} if "auto" in options.method and "one batch" not in options.method else {}
    data: Any = digits(target_labels=30, **small)
    if options.own:
        names = ["clean", "blended", Client("fonts", role="target", labelled=True)]
        data = SimpleNamespace(clients=names, target="fonts", num_classes=1 if options.numbers else 10)
    given = {"OutOfStep": OutOfStep, "Voting": FedRFTCA, "Wrapped": Federated}
    method = given.get(options.method) or getattr(fedlit.methods, options.method.split()[0].rstrip(","))
    torch.manual_seed(options.seed)
    if options.method == "Wrapped":
        module = Federated(Net("step", 64, 10), data.clients, data.target, data.num_classes)
    else:
        task = {"task": "regression"} if options.numbers else {}
        module = build(method, data, **STATEFUL, **task, **ARGUMENTS.get(options.method, {}))
    if options.trouble == "init" and os.environ.get("LOCAL_RANK") == "1":
        next(module.originals[0].parameters()).data.add_(1)
    # written by the tests, nobody else
    privacy, two_party = (eval(text, vars(fedlit.privacy)) for text in (options.privacy, options.two_party))
    presence = Presence(options.pause)
    callbacks: list[pl.Callback] = [Trouble(options.trouble), presence]
    if options.measured:
        of_classes = ClinicMetrics("3", sensitivity=0.5, prevalence=0.2)
        callbacks += [ConformalIntervals() if options.numbers else of_classes, OracleAccuracy()]
    if options.fault and RANKS.get(seat, 0) <= len(SITES):
        callbacks.append(Fault(options.fault, options.star))
    if options.checkpoints:
        own = Path(options.checkpoints, RANKS_NAMED.get(seat, "all"))
        callbacks.append(ModelCheckpoint(own, "{epoch}", save_on_train_epoch_end=True, enable_version_counter=False))
    if options.save_steps:
        callbacks.append(ModelCheckpoint(options.save_steps, "{step}", every_n_train_steps=5, save_top_k=options.keep))
    fitted = trainer(
        options.rounds,
        callbacks,
        enable_checkpointing=bool(options.save_steps or options.checkpoints),
        devices=options.devices,
        gradient_clip_val=1.0,
        strategy={
            "participation": Everyone() if options.everyone else Fraction(0.5),
            "seat": seat,
            "timeout": options.timeout,
            "local_steps": options.steps,
            "privacy": privacy,
            "differential_privacy": options.noise and fedlit.privacy.GaussianMechanism(1.0, 1.0),
            "account": options.noise,
            "two_party": two_party,
            "placement": eval(options.placement),  # written by the tests, too
            "gather_checkpoints": True if options.gather else None,
            "journal": options.journal,
            "allow_rejoin": options.allow_rejoin,
        },
    )
    if options.schedule:
        fitted.strategy.participation = Schedule(json.loads(options.schedule))
    rank = str(RANKS.get(seat)) if seat is not None else os.environ.get("LOCAL_RANK", "0")
    resumed = options.resume and options.resume.replace("RANK", rank)
    if options.checkpoints and options.again == "own":
        found = sorted(own.glob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns)
        resumed = str(found[-1]) if found else resumed
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrivacyWarning)
        warnings.filterwarnings("always", "the run ends without")
        own = OwnDataOnly(small.get("target_batch_size", 64), options.numbers)
        fitted.fit(module, own if options.own or seat is not None else data, ckpt_path=resumed)
        if options.save:
            fitted.save_checkpoint(options.save.replace("RANK", rank))
    federation = module.federation
    return {
        "rank": fitted.global_rank,
        "warnings": [str(each.message) for each in caught if issubclass(each.category, PrivacyWarning)],
        "missing": [str(each.message) for each in caught if str(each.message).startswith("the run ends without")],
        "weights": {c.name: fingerprint(weights(module, c.name)) for c in federation.local_clients},
        "values": {
            c.name: torch.cat([value.double().flatten() for value in weights(module, c.name).values()]).tolist()
            for c in federation.local_clients
            if options.values
        },
        "ledger": [list(vars(entry).values()) for entry in federation.ledger],
        "metrics": {name: float(value) for name, value in sorted(fitted.callback_metrics.items())},
        "scales": {name: each.state() for name, each in module.task.scales.items()} if options.numbers else {},
        "round_idx": federation.round_idx,
        "lost": sorted(federation.transport.lost),
        "emptied": [tensor.is_meta for network in module.originals for tensor in network.state_dict().values()],
        "present": presence.rounds,
        "moments": presence.moments,
    }


class Presence(pl.Callback, Component):
    """Notes who is there in each round in which this process takes part."""

    def __init__(self, pause: float) -> None:
        self.pause = pause
        self.rounds: dict[int, list[str]] = {}
        self.moments: list[float] = []

    def on_round_start(self, run: Run) -> None:
        self.moments.append(time.time())
        self.rounds[run.clock.round_idx] = [client.name for client in run.federation.present()]
        time.sleep(self.pause)


RANKS: dict[Any, int] = {}
RANKS_NAMED: dict[Any, str] = {}


def seated(folder: str, patience: float, latency: float | None = None, wait_for: float = 30.0) -> Server | Site:
    """The seat of this process, which its rank tells: the server's, or that of a site for each client."""
    rank, port = int(os.environ["LOCAL_RANK"]), os.environ["MASTER_PORT"]
    for name in LAUNCHED:  # no launcher has started it
        os.environ.pop(name, None)
    name = ["server", *SITES, *SITES][rank]
    if rank > len(SITES):  # comes back after it was struck
        while not Path(folder, "struck").exists():
            time.sleep(0.02)
    files = {"certificate": f"{folder}/{name}.crt", "key": f"{folder}/{name}.key", "ca": f"{folder}/ca.crt"}
    times = {"patience": patience, "wait_for": wait_for}
    if latency and rank:
        port = str(relayed(int(port), latency / 1000))
    seat = (
        Server(f"127.0.0.1:{port}", SITES, **files, **times)
        if rank == 0
        else Site(f"localhost:{port}", **files, **times, journal=f"{folder}/{name}.releases")
    )
    RANKS[seat], RANKS_NAMED[seat] = rank, name
    return seat
