"""What every data set shares: splits per client, hidden target labels, one loader over the clients of a process."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, cast

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from fedlit.data.raw_inputs import RawInputs
from fedlit.data.splits import balanced_choice, random_choice, stratified_split
from fedlit.data.transforms import may_draw
from fedlit.federation import Federation
from fedlit.federation.client import Client, make_roster
from fedlit.federation.errors import RosterError
from fedlit.federation.labels import UNLABELLED, TaskName, known_labels
from fedlit.federation.loader import FederatedLoader
from fedlit.federation.names import alike, check_list, check_texts, difference, shown
from fedlit.federation.nested import (
    Inputs,
    Rows,
    Shape,
    concatenate,
    in_words,
    leaves,
    mapped,
    num_samples,
    sample_shape,
    take,
    tensors_of,
)
from fedlit.federation.samples import check_labels
from fedlit.federation.streams import global_seed, stable_seed
from fedlit.run.component import Component

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Stage = Literal["train", "val", "test"]
Transform = Callable[[Tensor], Tensor]


_SHOWN = 5
"""Positions that a message has of many."""

POOLED = "sources"
"""Name of the client that all sources make together."""

_log = logging.getLogger("lightning.pytorch.fedlit.data")
"""Below Lightning's logger, whose handler prints on every rank: the target is seldom on rank 0."""


class DatasetNotFoundError(FileNotFoundError):
    """The data are not where they were looked for; the message states where that was and where to get them."""


class DatasetLayoutError(ValueError):
    """Data were found but are laid out in another way than the data module reads."""


class DomainDataset(Dataset[tuple[Inputs, Tensor]]):
    """Samples of one client, in memory and read a batch at a time.

    Args:
        x: Samples, shape (n, ...); or several tensors of n samples, such as a dictionary of them.
        y: Class of each sample, int64, shape (n,), -1 (`UNLABELLED`) where it is hidden; or numbers, floating, of shape
            (n,) or (n, k), NaN where they are hidden.
        transform: Applied to each batch of samples: conversion to floats, normalisation, augmentation. It may draw from
            the global random generators of torch, numpy and Python (``random``), which the loader points at a stream
            of its own for each batch: numbers depend on seed, client and batch alone. A generator that the transform
            holds depends on processes and resumes.
        augments: Whether ``transform`` draws random numbers for certain. ``False`` takes it for one that may, unless it
            is one of fedlit's or has an attribute ``draws`` that is false.

    Attributes:
        labelled_indices: Positions whose label is known, or ``None`` when all are.

    Raises:
        ValueError: If ``x`` and ``y`` differ in length.
    """

    def __init__(self, x: Inputs, y: Tensor, transform: Transform | None = None, augments: bool = False) -> None:
        if num_samples(x) != len(y):
            raise ValueError(f"x and y must hold the same number of samples, got {num_samples(x)} and {len(y)}")
        self.x = x
        self.y = y if y.is_floating_point() else y.long()
        self.transform = transform
        self.augments = augments or may_draw(transform)
        self.labelled_indices = labelled_positions(self.y)

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, indices: Tensor) -> tuple[Inputs, Tensor]:
        """Transformed samples and classes at ``indices`` (int64, shape (b,))."""
        x, y = self.stored(indices)
        return (x if self.transform is None else self.transform(x)), y

    def stored(self, rows: Rows) -> tuple[Inputs, Tensor]:
        """Samples before they are transformed, and classes."""
        return take(self.x, rows), self.y[rows]

    def __getitem__(self, index: int) -> tuple[Inputs, Tensor]:
        return single(self.batch(torch.tensor([index])))


def single(batch: tuple[Inputs, Tensor]) -> tuple[Inputs, Tensor]:
    """The sample of a batch of one."""
    x, y = batch
    return mapped(lambda leaf: leaf[0], x), y[0]


def labelled_positions(y: Tensor) -> Tensor | None:
    """Positions of known labels in ``y``, or ``None`` when all are."""
    known = known_labels(y)
    return None if bool(known.all()) else known.nonzero().squeeze(1)


@dataclass(frozen=True)
class Domain:
    """All samples of one domain, before they are split.

    Args:
        x: Samples: a tensor of shape (n, ...), a dictionary or other structure of such tensors, or whatever
            `DomainDataModule.dataset` of the subclass reads.
        y: Class of each sample, int64, shape (n,); where the task is regression, its numbers, floating, of shape (n,)
            or (n, k).
    """

    x: Any
    y: Tensor


@dataclass(frozen=True)
class Split:
    """Positions of a client's samples, each ascending; ``labelled`` are those of ``train`` with labels in training."""

    train: Tensor
    val: Tensor
    test: Tensor
    labelled: Tensor


class DomainDataModule(L.LightningDataModule, Component, ABC):
    """One domain per client, and one loader over the clients that this process hosts.

    A subclass names its domains and classes and loads one domain at a time; everything else is here. What a data set
    *is* (which samples, which noise) never depends on ``seed``: the seed rules splits, kept labels and order.

    Splits are stratified by class (in regression there are none), and a client's split depends on its own samples and
    the seed alone, not on who else takes part. At least one sample of each of a client's classes stays in its training
    split.

    Args:
        clients: Domains that take part, in this order; ``None`` takes all.
        target: The domain that is adapted to; ``None`` takes the last of the clients.
        batch_size: Training samples per client and batch.
        target_batch_size: The same for the target, if it is to differ; ``None`` takes ``batch_size``.
        eval_batch_size: Validation, test and prediction samples per client and batch.
        val_fraction: Share of each client's samples held out for validation, in [0, 1); 0 means no validation.
        test_fraction: Share of each client's samples held out for testing, in [0, 1); 0 means no test.
        target_labels: Training samples of the target that keep their labels: a number (an integer from 1) or a share
            of those that have one (a float in (0, 1]). 0 makes the target unlabelled. Note that 1 is one sample and
            1.0 is all of them.
        target_label_draw: How these samples are chosen: at ``"random"``, so that their classes have the target's
            shares up to chance, or ``"balanced"``, with class counts as equal as possible. Published experiments draw
            at random (FedGP, Jiang et al., 2024, appendices C.3 and C.11). Balanced labels of a target whose classes
            are unequal are a label shift of their own.
        transductive: Train and test on all samples of the target, as adaptation benchmarks do; its labels stay hidden
            in training. Samples whose labels are kept (``target_labels``) are left out of its test set.
        pool_sources: Let all sources be one client, ``"sources"``: the baseline of data that could be pooled. Each
            domain is split and normalised by itself as without it.
        drop_last: Leave out the last training batch of a pass if it is smaller.
        num_workers: Worker processes for data that are decoded from files.
        seed: Of splits, kept labels and order; ``None`` takes the one given to ``seed_everything``.

    Raises:
        RosterError: If a client or the target is unknown, a name occurs twice or differs from another's in capitals,
            blanks or Unicode normal form alone, or there are fewer than two clients.
        ValueError: If a number is out of its range.
    """

    unshared_classes = False
    """Whether a class may occur at one client only, which is an error unless the data set makes such shifts."""

    spread = False
    """Whether clients' data may lie on different machines, where this one knows the names of others' clients alone."""

    elsewhere: bool = False
    """Whether this process has nobody's data, as that of a server apart."""

    task: TaskName = "classification"
    """What is to be predicted: classes, or numbers."""

    def __init__(
        self,
        *,
        clients: list[str] | None = None,
        target: str | None = None,
        batch_size: int = 32,
        target_batch_size: int | None = None,
        eval_batch_size: int = 512,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        target_labels: int | float = 0,
        target_label_draw: Literal["random", "balanced"] = "random",
        transductive: bool = False,
        pool_sources: bool = False,
        drop_last: bool = False,
        num_workers: int = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        check_list("clients", clients, RosterError)
        check_texts("target", target, RosterError)
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("target_batch_size", batch_size if target_batch_size is None else target_batch_size, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, at least {least}, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for name, fraction in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            if not isinstance(fraction, Real):
                raise TypeError(f"{name} must be a number in [0, 1), got {fraction!r}")
            if not 0 <= fraction < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {fraction}: it is a share of each client's samples")
        if val_fraction + test_fraction >= 1:
            raise ValueError(
                f"val_fraction ({val_fraction}) and test_fraction ({test_fraction}) must leave samples to train on: "
                "their sum must stay below 1"
            )
        rule = (
            "target_labels must be a number of samples (an integer, at least 0) or a share of them (a float in "
            f"(0, 1]), got {target_labels!r}"
        )
        if not isinstance(target_labels, (Integral, float)):
            raise TypeError(rule)
        if (
            isinstance(target_labels, bool)
            or target_labels < 0
            or (isinstance(target_labels, float) and not target_labels <= 1)
        ):
            raise ValueError(rule)
        if target_label_draw not in ("random", "balanced"):
            raise ValueError(f"target_label_draw must be 'random' or 'balanced', got {target_label_draw!r}")
        self.batch_size = batch_size
        self.target_batch_size = target_batch_size
        self.eval_batch_size = eval_batch_size
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.target_labels = target_labels
        self.target_label_draw = target_label_draw
        self.transductive = transductive
        self.pool_sources = pool_sources
        self.drop_last = drop_last
        self.num_workers = num_workers
        self._client_names = clients
        self._target_name = target
        self._given_seed = seed
        self._seed: int | None = None
        self._roster: tuple[Client, ...] | None = None
        self._domains: dict[str, Domain] = {}
        self._splits: dict[str, Split] = {}
        self._datasets: dict[tuple[str, str], Dataset[Any]] = {}

    # What a subclass states about its data.

    @abstractmethod
    def domain_names(self) -> list[str]:
        """Names of all domains, in the order in which they are the clients by default."""

    def is_here(self, domain: str) -> bool:
        """Whether this process can read the data of a domain; those that others host need not be there."""
        return domain in self.domain_names()

    @abstractmethod
    def class_names(self) -> list[str]:
        """Names of the classes, in the order of the labels; in regression, of the numbers to predict."""

    @abstractmethod
    def load(self, domain: str) -> Domain:
        """All samples of one domain, with their true labels."""

    def finish(self, x: Tensor, train: Tensor) -> Tensor:
        """Normalise a client's samples, with statistics of the samples at ``train`` (positions) only."""
        return x

    def transform(self, training: bool) -> Transform | None:
        """What is done to each batch of samples; ``None`` for nothing. For random numbers see `DomainDataset`."""
        return None

    # Who takes part.

    @property
    def seed(self) -> int:
        """Seed of splits, kept labels and order; read when first needed and the same ever after."""
        if self._seed is None:
            self._seed = global_seed() if self._given_seed is None else self._given_seed
        return self._seed

    def check_roster(self) -> tuple[Client, ...]:
        """The domains that take part, without sample counts; a subclass calls this at the end of its constructor."""
        if self._roster is None:
            if self.target_label_draw == "balanced" and self.task == "regression":
                raise ValueError(
                    "target_label_draw='balanced' needs classes, and task='regression' has none: leave it out"
                )
            known = self.domain_names()
            names = known if self._client_names is None else list(self._client_names)
            _check_alike(names if self._target_name is None else [*names, self._target_name], known)
            unknown = [name for name in names if name not in known]
            if unknown and not (self.elsewhere or (self.spread and len(unknown) < len(names))):
                raise RosterError(f"clients {unknown} are not among the domains of {type(self).__name__}: {known}")
            target = self._target_name
            if target is None:
                if not names:
                    raise RosterError(f"clients is empty: name at least 2 of the domains {known}")
                target = names[-1]
            elif target not in (names if self.spread else known):
                raise RosterError(f"target {target!r} is not among the domains of {type(self).__name__}: {known}")
            if self.pool_sources and POOLED in names:
                raise RosterError(f"pool_sources makes a client {POOLED!r}, as a domain is called already: rename it")
            self._roster = make_roster(names, target)
        return self._roster

    def ids(self, client: str, stage: str) -> list[str] | None:
        """Names of a client's samples in one stage, in their order, such as file names; ``None`` if they have none.

        Args:
            client: Whose data are here.
            stage: "train", "val", "test", or "predict" for what `predict_dataloader` gives.
        """
        return None

    @property
    def clients(self) -> list[Client]:
        """The clients in order; each announces its number of samples when training starts."""
        kept = bool(self.target_labels)
        return [replace(client, labelled=not client.is_target or kept) for client in self._roster_of_run()]

    def num_samples(self, client: str) -> int:
        """Training samples of a client whose data are here: of the labelled ones, if it is a target that keeps some."""
        split = self.split(client)
        return len(split.labelled if client != self.target or self.target_labels else split.train)

    def _roster_of_run(self) -> tuple[Client, ...]:
        return make_roster([POOLED, self.target], self.target) if self.pool_sources else self.check_roster()

    def _members(self, client: str) -> list[str]:
        """Domains that a client has."""
        pooled = self.pool_sources and client == POOLED
        return [each.name for each in self.check_roster() if not each.is_target] if pooled else [client]

    @property
    def target(self) -> str:
        """Name of the client that is adapted to."""
        return next(client.name for client in self.check_roster() if client.is_target)

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of the labels; in regression, of the numbers to predict."""
        return self.class_names()

    @property
    def num_classes(self) -> int:
        """Number of classes, or of numbers to predict."""
        return len(self.class_names())

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample as a model sees it, from the data of a client that are here.

        Raises:
            TypeError: If a sample has several tensors.
        """
        shape = self._sample_shape()
        if not all(isinstance(size, int) for size in shape):
            raise TypeError(
                f"samples of {type(self).__name__} have several tensors ({in_words(shape)}) and no single input_shape: "
                "give the network its widths, and take target_model() in place of an export"
            )
        return shape  # type: ignore[return-value]

    def _sample_shape(self) -> Shape:
        sample = take(self._domain(self._members(self._local_names()[0])[0]).x, slice(0, 1))
        transform = self.transform(training=False)
        return sample_shape(sample if transform is None else transform(sample))

    @property
    def in_features(self) -> int:
        """Numbers in one sample: the width of a model that takes it flattened."""
        return int(torch.Size(self.input_shape).numel())

    # Samples.

    def split(self, client: str) -> Split:
        """Positions of the samples of ``client`` in each stage; those of pooled domains follow one another."""
        members = self._members(client)
        for name in members:
            self._domain(name)
        if members == [client]:
            return self._splits[client]
        starts = torch.tensor([0, *(len(self._domain(name).y) for name in members)]).cumsum(0).tolist()
        moved = [
            {stage: positions + start for stage, positions in vars(self._splits[name]).items()}
            for name, start in zip(members, starts, strict=False)
        ]
        return Split(**{stage: torch.cat([each[stage] for each in moved]) for stage in moved[0]})

    def dataset(self, client: str, stage: Stage) -> Dataset[Any]:
        """Samples of one client in one stage.

        Labels of the target are -1, or NaN, in training, except for those that ``target_labels`` keeps, and true in
        validation and testing.
        """
        key = (client, stage)
        members = self._members(client)
        if key not in self._datasets and members != [client]:
            self._datasets[key] = pooled([self.dataset(name, stage) for name in members])
        if key not in self._datasets:
            positions: Tensor = getattr(self.split(client), stage)
            y = self._labels(client, stage, positions)
            self._datasets[key] = self.make_dataset(client, positions, y, stage == "train")
        return self._datasets[key]

    def labels(self, domain: str) -> Tensor:
        """True labels of all samples of a domain that is here, -1 or NaN where there is none."""
        return self._domain(domain).y

    def all_samples(self, domain: str) -> Dataset[Any]:
        """All samples of a domain that is here, in the order of `labels`, as a model sees them in evaluation."""
        y = self.labels(domain)
        return self.make_dataset(domain, torch.arange(len(y)), y, training=False)

    def identity(self, domain: str) -> list[Any]:
        """Plain data that identify the samples of a domain: by default, the samples themselves."""
        tensors = leaves(self._domain(domain).x)
        return [part for x in tensors.values() for part in (tuple(x.shape), x.numpy().tobytes())]

    def make_dataset(self, client: str, positions: Tensor, y: Tensor, training: bool) -> Dataset[Any]:
        """The samples of ``client`` at ``positions``, with the labels ``y`` that they may show."""
        return DomainDataset(take(self._domain(client).x, positions), y, self.transform(training))

    def _labels(self, client: str, stage: Stage, positions: Tensor) -> Tensor:
        y = self._domain(client).y
        if stage != "train" or client != self.target:
            return y[positions]
        shown = torch.full_like(y, torch.nan if y.is_floating_point() else UNLABELLED)
        labelled = self.split(client).labelled
        shown[labelled] = y[labelled]
        return shown[positions]

    def _domain(self, name: str) -> Domain:
        if name not in self._domains:
            self.check_roster()
            if not self.is_here(name):
                self._check_here(name)
                raise DatasetNotFoundError(
                    f"there are no data of client {name!r} here, which has those of {self.domain_names()}: give each "
                    "process the clients whose data it has (placement of the strategy), or mend the name in clients"
                )
            domain = self.load(name)
            self._check_domain(name, domain)
            self._splits[name] = split = self._make_split(name, domain.y)
            self._domains[name] = replace(domain, x=self.finish(domain.x, split.train))
        return self._domains[name]

    def _check_here(self, client: str) -> None:
        if self.elsewhere:
            raise DatasetNotFoundError(
                f"the data of client {client!r} are not here: this process was given nobody's, as that of a server. "
                "Train, predict and export where they are, from the checkpoint of that process, or give them here, too"
            )

    def _check_domain(self, name: str, domain: Domain) -> None:
        size = num_samples(domain.x)
        if size != len(domain.y):
            raise DatasetLayoutError(
                f"domain {name!r} has {size} samples but {len(domain.y)} labels: give each sample one label"
            )
        if len(domain.y) == 0:
            raise RosterError(f"client {name!r} has no samples: leave it out of clients or give it data")
        check_labels(
            domain.y,
            name,
            self.task,
            self.num_classes,
            may_lack=name == self.target,
            exact=self.task == "regression",
            word="domain",
            error=DatasetLayoutError,
        )

    # Facts that clients announce before they train.

    def setup(self, stage: str | None = None) -> None:
        """Announce facts of this process's data to the others, and refuse data that do not fit together.

        Raises:
            DatasetLayoutError: On every process, if they do not.
        """
        federation = self._federation()
        if federation is not None and stage == "fit":
            self._local_names()  # raises if these are the data of another model's clients
            self.check_facts(federation.all_gather("data", self.facts))

    def facts(self, client: str) -> dict[str, Any]:
        """Return what a client announces of its data: shape and classes, never samples.

        An unlabelled target does not announce which classes it has.
        """
        members = self._members(client)
        shapes = [sample_shape(domain.x) for domain in map(self._domain, members) if tensors_of(domain.x)]
        facts: dict[str, Any] = {"shapes": list(dict.fromkeys(shapes)), "classes": self.class_names(), "has": None}
        if self.task == "classification" and (client != self.target or self.target_labels):
            y = torch.cat([self._domain(name).y for name in members])
            facts["has"] = [bool((y == label).any()) for label in range(self.num_classes)]
        return facts

    def check_facts(self, told: Mapping[str, Any]) -> None:
        """Raise a `DatasetLayoutError` unless what clients announced of their data fits together.

        Args:
            told: By client: what `facts` gave, or its own process took for it.
        """
        classes = agreed("classes", told, "name all classes, in one order, in the configuration of each client")
        shapes = {name: shape for name, each in told.items() for shape in each["shapes"]}
        if len(set(shapes.values())) > 1:
            raise DatasetLayoutError(
                f"samples of all clients must have one shape, got {shapes}: extract the same features at each client, "
                "or leave the odd one out of clients"
            )
        if self.unshared_classes or any(each["has"] is None for each in told.values()):
            return
        for label, class_name in enumerate(classes):
            who = [name for name, each in told.items() if each["has"][label]]
            if len(who) == 1:
                raise DatasetLayoutError(
                    f"class {class_name!r} occurs at client {who[0]!r} only, and at none of the "
                    "others: leave the class out of the data, or choose clients that share it"
                )

    def _federation(self) -> Federation | None:
        found = getattr(getattr(self.trainer, "lightning_module", None), "federation", None)
        return found if isinstance(found, Federation) else None

    def _make_split(self, name: str, y: Tensor) -> Split:
        generator = torch.Generator().manual_seed(stable_seed(self.seed, "split", name))
        known = known_labels(y)
        if self.task == "regression":
            y = torch.where(known, 0, UNLABELLED)  # one stratum, and one of samples without labels
        train, val, test = stratified_split(y, self.val_fraction, self.test_fraction, generator)
        for part, positions, fraction in (("val", val, self.val_fraction), ("test", test, self.test_fraction)):
            if fraction > 0 and len(positions) == 0:
                raise RosterError(
                    f"client {name!r} has {len(y)} samples, too few for a {part} split with {part}_fraction={fraction} "
                    f"and one training sample of each class: raise {part}_fraction, set it to 0, or leave the client "
                    "out of clients"
                )
        if name != self.target:
            return Split(train, val, test, train)
        candidates = train
        if self.transductive:
            train = test = torch.arange(len(y))
            candidates = train[~torch.isin(train, val)]
        candidates = candidates[known[candidates]]
        wanted = self._num_target_labels(len(train), int(known[train].sum()), len(candidates))
        generator = torch.Generator().manual_seed(stable_seed(self.seed, "target_labels", name))
        if self.target_label_draw == "balanced":
            labelled = balanced_choice(y, candidates, wanted, generator)
        else:
            labelled = random_choice(candidates, wanted, generator)
        if self.transductive:
            test = test[~torch.isin(test, labelled)]  # samples whose labels are trained on would score too high
        return Split(train, val, test, labelled)

    def _num_target_labels(self, num_train: int, num_known: int, num_candidates: int) -> int:
        wanted = self.target_labels
        number = max(1, round(wanted * num_known)) if isinstance(wanted, float) and wanted > 0 else int(wanted)
        if number > num_candidates:
            held_out = "; transductive holds out the validation samples" if self.transductive else ""
            whose = "training samples" if num_known == num_train else "training samples with labels"
            raise ValueError(
                f"target_labels={wanted!r} asks for {number} labelled samples, but target {self.target!r} has "
                f"{num_candidates} {whose} to choose from{held_out}: lower target_labels"
            )
        if self.transductive and number == num_train:
            raise ValueError(
                f"target_labels={wanted!r} keeps the labels of all {num_train} samples of target {self.target!r}, "
                "which leaves transductive none to test on: lower target_labels or set transductive=False"
            )
        return number

    def raw_inputs(self) -> RawInputs | None:
        """The target's samples as their owner has them, and the network that prepares them, for an exported model.

        ``None`` where models take samples as `load` gives them. A data module that overrides `finish`, or whose
        `transform` changes numbers in evaluation, overrides this too, or its models are exported for prepared samples
        alone.
        """
        return None

    # Checkpoints.

    # Loaders.

    def _local_names(self) -> list[str]:
        names = [client.name for client in self._roster_of_run()]
        federation = getattr(getattr(self.trainer, "lightning_module", None), "federation", None)
        if federation is None:
            return [name for name in names if all(map(self.is_here, self._members(name)))] or names
        members = [client.name for client in getattr(federation, "clients", self._roster_of_run())]
        if sorted(members) != sorted(names):
            raise RosterError(
                f"the model's clients {members} and the data module's {names} must be the same: give the model "
                "clients=data.clients"
            )
        target = getattr(getattr(federation, "target", None), "name", self.target)
        if target != self.target:
            raise RosterError(
                f"the model's target {target!r} and the data module's {self.target!r} must be the same: give the model "
                "target=data.target"
            )
        return [client.name for client in federation.local_clients]

    def _eval_loader(self, stage: Stage, names: Sequence[str], expected: bool) -> FederatedLoader | list[Any]:
        if not expected:
            return []  # Lightning's way to say that there is nothing to evaluate
        # Without a share held out, only a transductive target has samples; otherwise every client does.
        local = [name for name in names if len(getattr(self.split(name), stage)) > 0]
        return FederatedLoader(
            {name: self.dataset(name, stage) for name in local},
            self.eval_batch_size,
            training=False,
            num_workers=self.num_workers,
            guarded=self.target,
            seed=self.seed,
        )

    def train_dataloader(self) -> FederatedLoader:
        """Shuffled training batches of the local clients."""
        if self._federation() is None:
            self.check_facts({name: self.facts(name) for name in self._local_names()})
        if self.target_labels and self.target in self._local_names():
            _log.info(self._kept_labels())
        sizes: int | dict[str, int] = self.batch_size
        if self.target_batch_size is not None:
            sizes = {c.name: self.target_batch_size if c.is_target else self.batch_size for c in self._roster_of_run()}
        return FederatedLoader(
            {name: self.dataset(name, "train") for name in self._local_names()},
            sizes,
            training=True,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            guarded=None if self.target_labels else self.target,
            seed=self.seed,
        )

    def _kept_labels(self) -> str:
        """Say how many of the target's labels are used in training: ``1`` and ``1.0`` are easily taken for another."""
        split = self.split(self.target)
        labels, number = self.labels(self.target)[split.labelled], len(split.labelled)
        how = "all that it has"
        if number < int(known_labels(self.labels(self.target)[split.train]).sum()):
            how = f"drawn {'at random' if self.target_label_draw == 'random' else 'balanced over classes'}"
        if self.task == "classification":
            how += f"; {len(torch.unique(labels))} of {self.num_classes} classes have one"
        return (
            f"target {self.target!r} keeps the labels of {number} of its {len(split.train)} training samples "
            f"(target_labels={self.target_labels!r}: {how})"
        )

    def val_dataloader(self) -> FederatedLoader | list[Any]:
        """Validation batches of the local clients, in order; empty if ``val_fraction`` is 0."""
        return self._eval_loader("val", self._local_names(), self.val_fraction > 0)

    def test_dataloader(self) -> FederatedLoader | list[Any]:
        """Test batches of the local clients, in order; empty if ``test_fraction`` is 0."""
        return self._eval_loader("test", self._local_names(), self.test_fraction > 0 or self.transductive)

    def predict_dataloader(self) -> FederatedLoader | list[Any]:
        """The target's test samples, in order."""
        local = [name for name in self._local_names() if name == self.target]
        return self._eval_loader("test", local, self.test_fraction > 0 or self.transductive)

    def __str__(self) -> str:
        # Lightning's own builds every loader, which decodes every image.
        here = [] if self.elsewhere else self._local_names()
        sizes = {name: str(self.num_samples(name)) for name in here}
        clients = ", ".join(f"{each.name} ({each.role}, {sizes.get(each.name, 'elsewhere')})" for each in self.clients)
        what = "classes" if self.task == "classification" else "numbers to predict"
        shape = f", input {in_words(self._sample_shape())}" if here else ""
        return f"{type(self).__name__}: {clients}; {self.num_classes} {what}{shape}"

    # A look at the data.

    def pixels(self, client: str, positions: Tensor) -> Tensor | None:
        """Images of ``client`` to look at: floats in [0, 1], shape (n, channels, height, width).

        ``None`` for data that are not images.
        """
        x = self._domain(client).x
        if not isinstance(x, Tensor) or x.dim() != 4:
            return None
        images = x[positions]
        return (images.float() / 255 if images.dtype == torch.uint8 else images.float()).clamp(0, 1)

    def plot(self, num_samples: int = 10) -> Figure:
        """A look at the domains: their images by class, or their features in two principal components.

        It is for people and shows the target's true classes as well; of images, ``num_samples`` per client.

        Raises:
            ValueError: If ``num_samples`` is below 1.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        if self.pixels(self.target, torch.tensor([0])) is not None:
            return self._plot_images(num_samples)
        return self._plot_features()

    def _plot_images(self, num_samples: int) -> Figure:
        from matplotlib.figure import Figure

        clients, classes = self.check_roster(), self.class_names()
        figure = Figure(figsize=(1.1 * num_samples + 0.8, 1.3 * len(clients) + 0.3), layout="constrained")
        axes = figure.subplots(len(clients), num_samples, squeeze=False)
        for row, client in zip(axes, clients, strict=True):
            y = self._domain(client.name).y
            present = [label for label in range(len(classes)) if bool((y == label).any())] or [UNLABELLED]
            # One sample of each class, and more of each if there is room, from all over the class.
            labels = [present[place % len(present)] for place in range(num_samples)]
            positions = []
            for place, label in enumerate(labels):
                members = (y == label).nonzero().squeeze(1)
                positions.append(members[place // len(present) * len(members) // labels.count(label)])
            images = cast(Tensor, self.pixels(client.name, torch.stack(positions)))
            if images.shape[1] == 2:  # red and green, as in ColoredMNIST
                images = torch.cat([images, torch.zeros_like(images[:, :1])], dim=1)
            for axis, image, label in zip(row, images, labels, strict=True):
                axis.imshow(image.permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=1)
                axis.set_title(classes[label] if label >= 0 else "no label", fontsize=8)
                axis.set_xticks([])
                axis.set_yticks([])
            row[0].set_ylabel(f"{client.name}\n({client.role})", fontsize=9)
        return figure

    def _plot_features(self) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 5), layout="constrained")
        scatter, histogram = figure.subplots(1, 2, width_ratios=[1.2, 1])
        self._scatter(scatter)
        self._class_shares(histogram)
        return figure

    def _scatter(self, axis: Any, most: int = 500) -> None:
        """Two principal components of (at most ``most`` evenly picked samples of) all clients together."""
        samples = []
        for client in self.check_roster():
            x = self._domain(client.name).x
            number = num_samples(x)
            positions = torch.linspace(0, number - 1, min(number, most)).round().long()
            picked = leaves(take(x, positions)).values()
            samples.append(torch.cat([leaf.reshape(len(leaf), -1).double() for leaf in picked], dim=1))
        centred = torch.cat(samples)
        centred = centred - centred.mean(0)
        _, values, directions = torch.linalg.svd(centred, full_matrices=False)
        shares = values.square() / values.square().sum().clamp(min=1e-12)
        points = (centred @ directions[:2].T).split([len(sample) for sample in samples])
        for client, point in zip(self.check_roster(), points, strict=True):
            marker = "x" if client.is_target else "o"
            axis.scatter(*point.T.numpy(), s=14, alpha=0.6, marker=marker, label=f"{client.name} ({client.role})")
        axis.set_xlabel(f"component 1 ({shares[0]:.0%} of the variance)")
        axis.set_ylabel(f"component 2 ({shares[1]:.0%} of the variance)")
        axis.set_title("Two principal components of all clients' samples")
        axis.legend(fontsize=8)

    def _class_shares(self, axis: Any) -> None:
        if self.task == "regression":
            for client in self.check_roster():
                y = self._domain(client.name).y.reshape(len(self._domain(client.name).y), -1)[:, 0]
                axis.hist(y.numpy(), bins=20, density=True, histtype="step", label=f"{client.name} (n={len(y)})")
            axis.set_xlabel(self.class_names()[0])
            axis.set_ylabel("density")
            axis.set_title("What is to be predicted")
            axis.legend(fontsize=8)
            return
        clients, classes = self.check_roster(), self.class_names()
        width = 0.8 / len(clients)
        for place, client in enumerate(clients):
            y = self._domain(client.name).y
            counts = torch.bincount(y[known_labels(y)], minlength=len(classes)).double()
            where = torch.arange(len(classes)) + (place - (len(clients) - 1) / 2) * width
            number = counts.sum()
            axis.bar(
                where.numpy(), (counts / number.clamp(min=1)).numpy(), width, label=f"{client.name} (n={int(number)})"
            )
        slanted = {"rotation": 45, "ha": "right"} if len(classes) > 3 else {}
        axis.set_xticks(range(len(classes)), classes, **slanted)
        axis.set_ylim(0, 1.3 * axis.get_ylim()[1])  # room for the legend
        axis.set_ylabel("share of the client's samples")
        axis.set_title("Classes")
        axis.legend(fontsize=8, ncols=2)


def _check_alike(wanted: Sequence[str], known: Sequence[str]) -> None:
    """Raise a `RosterError` if a client has a name that a domain has, too, in other capitals, blanks or normal form."""
    for group in alike([*wanted, *known]):
        if set(group) & set(wanted):
            here = [name for name in group if name in known]
            raise RosterError(
                f"clients {shown(group)} differ in {difference(group)}, and the data here are of {shown(here)}: if "
                "they are one client, write its name alike everywhere, in data and configuration; if not, rename one"
            )


class PooledDataset(Dataset[Any]):
    """Samples of several domains, one domain after the other, read a batch at a time.

    The parts have a ``batch`` method, and all of their labels are known.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self.ends = torch.tensor([len(part) for part in self.parts]).cumsum(0)
        self.augments = any(part.augments for part in self.parts)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def batch(self, indices: Tensor) -> tuple[Inputs, Tensor]:
        """Transformed samples and labels at ``indices`` (int64, shape (b,))."""
        return self._gathered(indices, "batch")

    @property
    def stored(self) -> Callable[[Rows], tuple[Inputs, Tensor]] | None:
        """Reads samples before they are transformed, and labels; ``None`` if a part cannot."""
        able = all(hasattr(part, "stored") for part in self.parts)
        return (lambda rows: self._gathered(torch.arange(len(self))[rows], "stored")) if able else None

    @property
    def transform(self) -> Transform | None:
        """That of a part which has one."""
        found = (getattr(part, "transform", None) for part in self.parts)
        return next((transform for transform in found if transform is not None), None)

    def _gathered(self, indices: Tensor, how: Literal["batch", "stored"]) -> tuple[Inputs, Tensor]:
        owner = torch.searchsorted(self.ends, indices, right=True)
        order, found = [], []
        for place, part in enumerate(self.parts):
            mine = (owner == place).nonzero().squeeze(1)
            if len(mine):
                order.append(mine)
                found.append(getattr(part, how)(indices[mine] - (self.ends[place] - len(part))))
        back = torch.cat(order).argsort()
        return take(concatenate([x for x, _ in found]), back), torch.cat([y for _, y in found])[back]

    def __getitem__(self, index: int) -> tuple[Inputs, Tensor]:
        return single(self.batch(torch.tensor([index])))


def pooled(parts: Sequence[Dataset[Any]]) -> Dataset[Any]:
    """Datasets of several domains as one."""
    return PooledDataset(parts) if all(hasattr(part, "batch") for part in parts) else ConcatDataset(parts)


def agreed(what: str, facts: Mapping[str, Mapping[str, Any]], way_out: str) -> Any:
    """Return what all clients announced alike under one key; else raise an error with the first two that differ."""
    (first, own), *others = facts.items()
    for name, each in others:
        if each[what] != own[what]:
            raise DatasetLayoutError(
                f"{what} of the clients must be the same, but {first!r} has {own[what]} and {name!r} has {each[what]}: "
                f"{way_out}"
            )
    return own[what]
