"""Planning: training data of local clients are checked and cut into rounds, which may differ between phases."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedlit.checks import refuse
from fedlit.federation import FederatedLoader, Pace, RosterError, RoundPlan, Summed
from fedlit.federation.labels import UNLABELLED
from fedlit.federation.nested import mapped
from fedlit.federation.streams import torch_streams
from fedlit.run.clock import is_share, limited, warmup_of
from fedlit.run.replicas import check_local_norm
from fedlit.run.run import Run
from fedlit.run.sample_check import SampleCheck
from fedlit.run.tasks import Classification


def plan_rounds(
    run: Run,
    loader: FederatedLoader,
    local_steps: int | None = None,
    rounds_per_epoch: int = 1,
    max_share: float | None = None,
) -> None:
    """Cut training data of local clients into rounds; the strategy or `Rounds` calls it on all processes.

    Raises:
        RosterError: On every process, if clients' data do not fit together or are not those of the checkpoint, a client
            weighs more than ``max_share``, or BatchNorm would train on a batch of one sample.
        ValueError: If clients would keep normalisation layers that never saw data, or a warm-up is a share of a run
            without a planned end.
    """
    federation, target, trainer = run.federation, run.target, run.trainer
    loader.guarded = None if target.labelled else target.name
    labelled_only = () if run.requires.unlabelled_target or not target.labelled else (target.name,)
    loader.check = check = SampleCheck(run, loader)

    def checked(client: str) -> Any:
        check.start(client)
        return loader.announced_cut(client)

    loader.receive_cuts(federation.all_gather("training samples", checked))
    facts = loader.facts(labelled_only)
    federation.introduce(facts)
    endless = trainer.max_epochs is None or trainer.max_epochs < 0
    num_rounds = 1000 if endless else int(trainer.max_epochs or 0) * rounds_per_epoch
    if is_share(run.clock.warmup) and trainer.max_steps > 0 and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        rule = f"a number of rounds beside max_steps={trainer.max_steps}, which may end the run before"
        refuse("warmup_rounds", rule, run.clock.warmup, "give one, or leave max_steps out, as shares are of max_epochs")
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

    if max_share is not None:
        run.weights.max_share = max_share
        sums = any(isinstance(channel, Summed) for phase in run.phases for channel in phase.channels)
        federation.check("max_share", run.weights.too_heavy(run.sources) if sums else None)
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
    batches = [loader.cut(samples[each.name], each.name, settings.batch_size).batches for each in run.sources]
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
            cut = loader.cut(sizes[name], name, pace.batch_size)
            size, batch_size = cut.rows, cut.batch_size
            reached = batch_size == 1 or cut.batches <= num_batches
            if cut.least == 1 and reached and _fails_on_one(run.originals, loader):
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


def change_optimizer(run: Run, round_idx: int) -> bool:
    """Make the current round's optimiser, if that of round ``round_idx`` was another; return whether it was."""
    if run.phase(round_idx).settings.optimizer is run.phase().settings.optimizer:
        return False
    run.trainer.strategy.setup_optimizers(run.trainer)
    return True


def set_epoch_length(run: Run) -> None:
    """Set the length of the epoch that begins, which Lightning reads once in a run."""
    trainer, loader = run.trainer, run.samples.loader
    loop = trainer.fit_loop
    if loader is None or (batches := limited(trainer, len(loader))) == loop.max_batches:
        return
    loop.max_batches = batches
    assert loop._combined_loader is not None
    loop._combined_loader.limits = [batches]
    if not isinstance(trainer.val_check_interval, int) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))


UNEQUAL = 0.2
"""Total variation beyond chance from which class shares count as unequal. Hospitals differ by 0.1 to 0.6; digits,
photographs and drawings, where matching helps, by less than 0.2.
"""


def warn_of_unequal_classes(run: Run, loader: FederatedLoader) -> None:
    """Warn if local sources differ in class shares (a single one: from equal shares); nothing is sent.

    Only labels in memory are counted, as others would mean reading all samples.
    """
    task, weight = run.task, run.requires.adaptation_weight
    is_off = weight and not getattr(run.module, weight)
    if is_off or not (run.requires.matches_distributions and isinstance(task, Classification)):
        return
    counts = {}
    for client in run.sources:
        found = (
            count_classes(loader.datasets[client.name], task.num_classes) if client.name in loader.datasets else None
        )
        if found is not None:
            counts[client.name] = found
    distance, words = most_unequal(counts)
    if distance > UNEQUAL:
        warnings.warn(
            f"classes are shared out unequally ({words}), and {run.name} makes the features of all "
            "clients alike as a whole. If the target's shares differ too, samples of one class are moved onto another: "
            "in the four hospitals that cost up to 23 points against SourceOnly. Compare with SourceOnly (--compare), "
            "or take KD3A, FedAvg or recipes/tables, which hold there",
            stacklevel=2,
        )


def count_classes(dataset: Any, num_classes: int) -> Tensor | None:
    """Count a dataset's samples by class, shape (num_classes,), float64; ``None`` without class labels in memory."""
    tensors = dataset.tensors[1:2] if isinstance(dataset, TensorDataset) else [getattr(dataset, "y", None)]
    for labels in tensors:
        if isinstance(labels, Tensor) and labels.dim() == 1 and not labels.is_floating_point():
            known = labels.long()[labels.long() != UNLABELLED]
            if len(known) and int(known.min()) >= 0 and int(known.max()) < num_classes:
                return torch.bincount(known, minlength=num_classes).double()
    return None


def most_unequal(counts: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the maximum difference of two clients' class shares (of a single one: from equal shares) and a text.

    It is total variation less that of chance, in [0, 1]; ``counts`` are samples of each class, shape (C,), not all 0.
    """
    if not counts:
        return 0.0, ""
    table = dict(counts)
    if len(table) == 1:
        (own,) = table.values()
        table["equal shares"] = torch.full_like(own, 1e12)
    names, rows = [*table], torch.stack([*table.values()])
    distances = torch.stack([beyond_chance(row, rows) for row in rows])
    one, two = divmod(int(distances.argmax()), len(names))
    (p, q), others = (rows[place] / rows[place].sum() for place in (one, two)), names[two]
    label = int((p - q).argmax())  # of which the first has more
    other = others if len(counts) == 1 else repr(others)
    return float(
        distances[one, two]
    ), f"{p[label]:.0%} of {names[one]!r} and {q[label]:.0%} of {other} are of class {label}"


def beyond_chance(a: Tensor, b: Tensor) -> Tensor:
    """Return the total variation of class shares less its expectation under equal ones, shape (...), at least 0.

    The expectation is that of normal distributions: the mean of |x| is sqrt(2 / pi) of its deviation. Counts have
    shapes (C,) and (..., C).
    """
    sizes = a.sum(), b.sum(dim=-1, keepdim=True)
    total = (a + b) / (sizes[0] + sizes[1])
    chance = (2 / math.pi * total * (1 - total) * (1 / sizes[0] + 1 / sizes[1])).sqrt()
    apart = (a / sizes[0] - b / sizes[1]).abs()
    return ((apart - chance).sum(dim=-1) / 2).clamp(min=0)
