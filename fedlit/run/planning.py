"""Planning: training data of local clients are checked and cut into rounds."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from fedlit.checks import refuse
from fedlit.federation import FederatedLoader, Pace, RosterError, RoundPlan
from fedlit.federation.nested import mapped
from fedlit.federation.streams import torch_streams
from fedlit.run.clock import is_share, warmup_of
from fedlit.run.label_shift import warn_of_unequal_classes
from fedlit.run.replicas import check_local_norm
from fedlit.run.run import Run
from fedlit.run.sample_check import SampleCheck
from fedlit.run.tasks import Classification


def plan_rounds(run: Run, loader: FederatedLoader, local_steps: int | None = None, rounds_per_epoch: int = 1) -> None:
    """Cut training data of local clients into rounds; the strategy or `Rounds` calls it on all processes.

    Raises:
        RosterError: On every process, if clients' data do not fit together or are not those of the checkpoint, or
            BatchNorm would train on a batch of one sample.
        ValueError: If clients would keep normalisation layers that never saw data, or a warm-up is a share of a run
            without a planned end.
    """
    federation, target, trainer = run.federation, run.target, run.trainer
    loader.guarded = None if target.labelled else target.name
    labelled_only = () if run.requires.unlabelled_target or not target.labelled else (target.name,)
    loader.check = check = SampleCheck(run, loader)
    federation.all_gather("training samples", check.start)
    facts = loader.facts(labelled_only)
    federation.introduce(facts)
    endless = trainer.max_epochs is None or trainer.max_epochs < 0
    num_rounds = 1000 if endless else int(trainer.max_epochs or 0) * rounds_per_epoch
    if is_share(run.clock.warmup) and trainer.max_steps > 0 and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        rule = f"a number of rounds beside max_steps={trainer.max_steps}, which may end the run before"
        refuse("warmup_rounds", rule, run.clock.warmup, "or leave max_steps out: it is a share of max_epochs' rounds")
    samples = {client.name: client.num_samples or 0 for client in federation.clients}
    kept = run.record.of_checkpoint("warmup_rounds") if is_share(run.clock.warmup) else None
    if kept is None:
        steps = _warmup_steps(run, loader, samples, local_steps)
        run.clock.warmup_rounds = warmup_of(run.clock.warmup, None if endless else num_rounds, max(1, steps))
    else:
        run.clock.warmup_rounds = kept
    if 0 < num_rounds <= run.clock.warmup_rounds and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        rank_zero_warn(
            f"{run.name} never starts: all of {num_rounds} rounds (max_epochs) are of its warm-up, FedAvg "
            f"over the sources: raise max_epochs, or lower warmup_rounds ({run.clock.warmup_rounds})"
        )
    ever = {client.name for round_idx in range(num_rounds) for client in run.learners(round_idx)}
    ever |= {client.name for client in run.sources} if run.clock.warmup_rounds else set()
    if run.weights.averaging.local_norm:
        check_local_norm(run.originals, [client.name for client in run.clients if client.name not in ever])
    resumes = run.record.resumes
    plan: dict[str, Any] = {
        "seed": loader.seed,
        "local_steps": local_steps,
        "rounds_per_epoch": rounds_per_epoch,
        "samples": samples,
    }
    paces = paces_of(run, local_steps)
    if len(paces) > 1:
        if rounds_per_epoch > 1:
            way_out = f"leave it out, or give the phases of {run.name} one batch_size and one local_steps"
            refuse("rounds_per_epoch", "1 where the rounds of phases differ in length", rounds_per_epoch, way_out)
        plan |= {"paces": [astuple(each) for each in paces]}
    run.record.plan_(plan | ({"warmup_rounds": run.clock.warmup_rounds} if is_share(run.clock.warmup) else {}))

    warn_of_unequal_classes(run, loader)
    if isinstance(run.task, Classification) and run.task.balanced:
        for client in federation.local_clients:
            if client.labelled and client.name in loader.datasets:
                run.task.balance_(client.name, count_labels(loader, client.name, run.task.num_classes))

    run.outputs.scale_labels_(loader, resumes)

    sizes = {name: size for name, size in samples.items() if name in ever}
    federation.check("batches", check_batches(run, loader, sizes, paces, num_rounds) if facts else None)

    def learners(round_idx: int) -> Collection[str]:
        return {client.name for client in run.present_learners(round_idx)}

    loader.plan(
        RoundPlan(
            sizes=sizes,  # the largest sets a round's length
            learners=learners,
            position=lambda: (federation.round_idx, federation.batch_idx),
            paces=paces,
            rounds_per_epoch=rounds_per_epoch,
            accumulate=trainer.accumulate_grad_batches,
            labelled_only=labelled_only,
        )
    )


def count_labels(loader: FederatedLoader, client: str, num_classes: int) -> torch.Tensor:
    """Count a local client's labelled training samples of each class, shape (num_classes,)."""
    labels = torch.cat([batch[client][1] for batch in loader.in_order([client])])
    return torch.bincount(labels, minlength=num_classes)


def paces_of(run: Run, local_steps: int | None) -> tuple[Pace, ...]:
    """Return batch size and local steps of the phases' rounds; phases that follow each other with equal ones are one.

    ``local_steps`` are those of phases without a setting.
    """
    paces, first_round = list[Pace](), 0
    for phase in run.phases:
        pace = Pace(first_round, phase.settings.batch_size, phase.settings.local_steps or local_steps)
        if phase.rounds != 0 and (not paces or replace(pace, first_round=paces[-1].first_round) != paces[-1]):
            paces.append(pace)
        if phase.rounds is None:
            break
        first_round += phase.rounds
    return tuple(paces)


def _warmup_steps(run: Run, loader: FederatedLoader, samples: Mapping[str, int], local_steps: int | None) -> int:
    """Return the local steps of the largest source in a round of the warm-up."""
    settings = run.phases[0].settings
    if settings.local_steps or local_steps:
        return settings.local_steps or local_steps or 0
    batch_sizes = {source.name: settings.batch_size or loader.batch_size_of(source.name) for source in run.sources}
    batches = [loader.whole(samples[name] / batch_size) for name, batch_size in batch_sizes.items()]
    return math.ceil(max(batches) / run.trainer.accumulate_grad_batches)


def check_batches(
    run: Run, loader: FederatedLoader, sizes: Mapping[str, int], paces: Sequence[Pace], num_rounds: int
) -> RosterError | None:
    """Return an error if BatchNorm would train on a batch of one sample, from which it has no variance."""
    warmup = run.clock.warmup_rounds
    for pace, end in zip(paces, [*(each.first_round for each in paces[1:]), num_rounds], strict=True):
        names = list(sizes)
        if run.spec.frozen_statistics:
            names = [client.name for client in run.sources if pace.first_round < warmup]
        num_batches = math.inf  # of each client in all rounds of the pace
        if pace.local_steps is not None:
            num_batches = (end - pace.first_round) * pace.local_steps * run.trainer.accumulate_grad_batches
        for name in names:
            size, batch_size = sizes[name], pace.batch_size or loader.batch_size_of(name)
            alone = 1 in (batch_size, size % batch_size) and (batch_size == 1 or not loader.drop_last)
            reached = batch_size == 1 or math.ceil(size / batch_size) <= num_batches
            if alone and reached and _fails_on_one(run.originals, loader):
                cure = "raise batch_size"
                if batch_size > 1:
                    cure = "set drop_last=True, which leaves the last batch out, or another batch_size"
                return RosterError(
                    f"client {name!r} trains on {size} samples with batch_size={batch_size}, which makes a batch of 1 "
                    f"sample, and BatchNorm cannot be trained on that: {cure}, or use GroupNorm"
                )
    return None


def _fails_on_one(networks: tuple[nn.Module, nn.Module], loader: FederatedLoader) -> bool:
    """Return whether torch refuses to train BatchNorm on one sample; an image is many values, and passes."""
    norms = [any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in n.modules()) for n in networks]
    if not any(norms):
        return False
    try:
        extractor, classifier = (network.cpu() for network in copy.deepcopy(networks))
        with torch.no_grad(), torch_streams():
            dtype = next((param.dtype for param in extractor.parameters()), torch.float32)
            inputs = loader.samples(next(iter(loader.datasets)))[0]
            features = extractor(mapped(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, inputs))
            if norms[1]:
                classifier(features)
    except Exception as error:  # of inputs of another kind, on which a network cannot be tried so
        return "more than 1 value per channel" in str(error)
    return False
