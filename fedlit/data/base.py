"""Data modules: what every data set shares, from the roster of clients to the loaders of those that are here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedlit.checks import check, check_at_least
from fedlit.data.samples import DatasetLayoutError, DatasetNotFoundError, Domain, DomainDataset, check_data, pooled
from fedlit.data.source import DomainSource, check_common, check_same_clients, choose_clients
from fedlit.data.splits import Split, SplitRules
from fedlit.federation import Federation
from fedlit.federation.client import Client, make_roster
from fedlit.federation.errors import RosterError
from fedlit.federation.labels import UNLABELLED, known_labels
from fedlit.federation.loader import FederatedLoader
from fedlit.federation.names import check_list, check_texts
from fedlit.federation.nested import Shape, in_words, leaves, num_samples, sample_shape, take, tensors_of
from fedlit.federation.samples import check_labels
from fedlit.federation.streams import global_seed
from fedlit.run.component import Component

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Stage = Literal["train", "val", "test"]

POOLED = "sources"
"""Name of the client that all sources make together."""

_log = logging.getLogger("lightning.pytorch.fedlit.data")
"""Below Lightning's logger, whose handler prints on every rank: the target is seldom on rank 0."""


class DomainDataModule(DomainSource, L.LightningDataModule, Component):
    """One domain per client, and one loader over the clients that this process hosts.

    A subclass names its domains and classes and loads one domain at a time, whose samples do not depend on ``seed``.
    Splits are stratified by class (in regression there are none), with at least one training sample of each, and depend
    on the client's samples and the seed alone. Validation samples of a target without labels are drawn as if its labels
    were not there; which are tested on may depend on them.

    Args:
        clients: Domains that take part, in this order; ``None`` takes all.
        target: The domain that is adapted to; ``None`` takes the last of the clients.
        batch_size: Training samples per client and batch.
        target_batch_size: The same for the target, if it is to differ; ``None`` takes ``batch_size``.
        eval_batch_size: Validation, test and prediction samples per client and batch.
        val_fraction: Share of each client's samples held out for validation, in [0, 1); 0 means no validation.
        test_fraction: Share of each client's samples held out for testing, in [0, 1); 0 means no test.
        target_labels: Training samples of the target that keep their labels: a number (an integer from 1) or a share
            of those that have one (a float in (0, 1]); 1 is one sample, 1.0 all of them. 0 makes it unlabelled.
        target_label_draw: How they are chosen: at ``"random"``, as published experiments do (FedGP, Jiang et al., 2024,
            appendices C.3 and C.11), or ``"balanced"``, with class counts as equal as possible.
        transductive: Train and test on all samples of the target, as adaptation benchmarks do; its labels stay hidden
            in training. Samples whose labels are kept (``target_labels``) are left out of its test set.
        pool_sources: Let all sources be one client, ``"sources"``: the baseline of data that could be pooled. Each
            domain is split and normalised by itself as without it.
        drop_last: Leave out the last training batch of a pass if it is smaller.
        num_workers: Worker processes for data that are decoded from files.
        pin_memory: Put batches in pinned memory, from which they are copied to a GPU sooner.
        seed: Of splits, kept labels and order; ``None`` takes the one given to ``seed_everything``.

    Raises:
        RosterError: If a client or the target is unknown, a name occurs twice or differs from another's in capitals,
            blanks or Unicode normal form alone, or there are fewer than two clients.
    """

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
        pin_memory: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        check_list("clients", clients, RosterError)
        check_texts("target", target, RosterError)
        for name, value, minimum in (
            ("batch_size", batch_size, 1),
            ("target_batch_size", batch_size if target_batch_size is None else target_batch_size, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            is_whole = isinstance(value, Integral) and not isinstance(value, bool)
            check(is_whole, name, f"an integer, at least {minimum}", value, error=TypeError)
            check_at_least(name, value, minimum)
        self._rules = SplitRules(val_fraction, test_fraction, target_labels, target_label_draw, transductive)
        self.batch_size, self.target_batch_size, self.eval_batch_size = batch_size, target_batch_size, eval_batch_size
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.target_labels, self.target_label_draw = target_labels, target_label_draw
        self.transductive, self.pool_sources = transductive, pool_sources
        self.drop_last, self.num_workers, self.pin_memory = drop_last, num_workers, pin_memory
        self._client_names, self._target_name = clients, target
        self._seed = seed
        self._roster: tuple[Client, ...] | None = None
        self._domains: dict[str, Domain] = {}
        self._splits: dict[str, Split] = {}
        self._datasets: dict[tuple[str, str], Dataset[Any]] = {}

    @property
    def seed(self) -> int:
        """Seed of splits, kept labels and order; read when first needed and the same ever after."""
        if self._seed is None:
            self._seed = global_seed()
        return self._seed

    def check_roster(self) -> tuple[Client, ...]:
        """Return the domains that take part, checked; a subclass calls this at the end of its constructor."""
        if self._roster is None:
            fits = self.target_label_draw != "balanced" or self.task != "regression"
            check(fits, "target_label_draw", "left out with task='regression', which has no classes", "balanced")
            names, target = choose_clients(self, self._client_names, self._target_name)
            rule = f"left out with a domain called {POOLED!r}, as the client that it makes"
            check(not self.pool_sources or POOLED not in names, "pool_sources", rule, True, "rename it", RosterError)
            self._roster = make_roster(names, target)
        return self._roster

    @property
    def clients(self) -> list[Client]:
        """The clients in order; each announces its number of samples when training starts."""
        keeps_labels = bool(self.target_labels)
        return [replace(client, labelled=not client.is_target or keeps_labels) for client in self._roster_of_run()]

    def num_samples(self, client: str) -> int:
        """Return the training samples of a client that is here; of a target that keeps some labels, those with one."""
        split = self.split(client)
        return len(split.labelled if client != self.target or self.target_labels else split.train)

    def _names_here(self) -> list[str]:
        return [client.name for client in self.check_roster() if self.is_here(client.name)]

    def _roster_of_run(self) -> tuple[Client, ...]:
        return make_roster([POOLED, self.target], self.target) if self.pool_sources else self.check_roster()

    def _members(self, client: str) -> list[str]:
        """Domains of a client."""
        is_pooled = self.pool_sources and client == POOLED
        return [each.name for each in self.check_roster() if not each.is_target] if is_pooled else [client]

    def _local_names(self) -> list[str]:
        """Clients whose data this process reads: those that it hosts in a run, else all that are here."""
        names = [client.name for client in self._roster_of_run()]
        federation = self._model_of_run("federation")
        if federation is None:
            return [name for name in names if all(map(self.is_here, self._members(name)))] or names
        check_same_clients(federation, names, self.target)
        return [client.name for client in federation.local_clients]

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
        """Shape of one sample as a model sees it, from data that are here; a `TypeError` if it has several tensors."""
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

    # ---------------------------------------------------------------- samples

    def split(self, client: str) -> Split:
        """Return positions of the samples of ``client`` in each stage; those of pooled domains follow one another."""
        members = self._members(client)
        sizes = [len(self._domain(name).y) for name in members]
        if members == [client]:
            return self._splits[client]
        starts = torch.tensor([0, *sizes[:-1]]).cumsum(0).tolist()
        moved = [
            {stage: positions + start for stage, positions in vars(self._splits[name]).items()}
            for name, start in zip(members, starts, strict=True)
        ]
        return Split(**{stage: torch.cat([each[stage] for each in moved]) for stage in moved[0]})

    def dataset(self, client: str, stage: Stage) -> Dataset[Any]:
        """Return the samples of one client; in training, labels of the target that are not kept are -1 or NaN."""
        key = (client, stage)
        if key not in self._datasets:
            members = self._members(client)
            if members == [client]:
                positions: Tensor = getattr(self.split(client), stage)
                y = self._labels(client, stage)[positions]
                self._datasets[key] = self.make_dataset(client, positions, y, stage == "train")
            else:
                self._datasets[key] = pooled([self.dataset(name, stage) for name in members])
        return self._datasets[key]

    def _labels(self, client: str, stage: Stage) -> Tensor:
        """Labels of all samples of a client, hidden where a stage may not show them."""
        y = self.labels(client)
        if stage != "train" or client != self.target:
            return y
        visible = torch.full_like(y, torch.nan if y.is_floating_point() else UNLABELLED)
        labelled = self.split(client).labelled
        visible[labelled] = y[labelled]
        return visible

    def labels(self, domain: str) -> Tensor:
        """Return true labels of all samples of a domain that is here, -1 or NaN where there is none."""
        return self._domain(domain).y

    def all_samples(self, domain: str) -> Dataset[Any]:
        """Return all samples of a domain that is here, in the order of `labels`, as a model sees them in evaluation."""
        y = self.labels(domain)
        return self.make_dataset(domain, torch.arange(len(y)), y, training=False)

    def identity(self, domain: str) -> list[Any]:
        """Return plain data that identify the samples of a domain: by default, the samples themselves."""
        tensors = leaves(self._domain(domain).x)
        return [part for x in tensors.values() for part in (tuple(x.shape), x.numpy().tobytes())]

    def make_dataset(self, client: str, positions: Tensor, y: Tensor, training: bool) -> Dataset[Any]:
        """Return the samples of ``client`` at ``positions``, with the labels ``y`` that they may show."""
        return DomainDataset(take(self._domain(client).x, positions), y, self.transform(training))

    def _domain(self, name: str) -> Domain:
        """A domain that is here, checked, split and normalised."""
        if name not in self._domains:
            self.check_roster()
            self._check_here(name)
            domain = self.load(name)
            self._check_domain(name, domain)
            self._splits[name] = split = self._make_split(name, domain.y)
            self._domains[name] = replace(domain, x=self.finish(domain.x, split.train))
        return self._domains[name]

    def _make_split(self, name: str, y: Tensor) -> Split:
        return self._rules.split(name, y, self.task == "classification", name == self.target, self.seed)

    def _check_elsewhere(self, client: str) -> None:
        """Refuse to read data in a process that has nobody's."""
        if self.elsewhere:
            raise DatasetNotFoundError(
                f"the data of client {client!r} are not here, in a process without any, such as a server's: train, "
                "predict and export where they are, from the checkpoint of that process, or give them here, too"
            )

    def _check_here(self, client: str) -> None:
        """Refuse to read data that are elsewhere."""
        self._check_elsewhere(client)
        if not self.is_here(client):
            raise DatasetNotFoundError(
                f"there are no data of client {client!r} here, which has those of {self.domain_names()}: give each "
                "process the clients whose data it has (placement of the strategy), or mend the name in clients"
            )

    def _check_domain(self, name: str, domain: Domain) -> None:
        size = num_samples(domain.x)
        rule = f"as many as samples ({size})"
        check_data(size == len(domain.y), f"labels of domain {name!r}", rule, len(domain.y), "give each sample one")
        way_out = f"leave {name!r} out, or give it data"
        check(size > 0, "clients", "of domains with samples", name, way_out, RosterError)
        exact, may_lack = self.task == "regression", name == self.target
        check_labels(
            domain.y, name, self.task, self.num_classes, may_lack=may_lack, exact=exact, word="domain",
            error=DatasetLayoutError,
        )  # fmt: skip

    # ---------------------------------------------------------------- facts that clients announce before they train

    def setup(self, stage: str | None = None) -> None:
        """Announce facts of this process's data, and refuse data that do not fit together, on every process."""
        federation = self._federation()
        if federation is not None and stage == "fit":
            self._local_names()  # raises if these are the data of another model's clients
            self.check_facts(federation.all_gather("data", self.facts))

    def facts(self, client: str) -> dict[str, Any]:
        """Return what a client announces of its data: shape, and classes but of an unlabelled target."""
        domains = [self._domain(name) for name in self._members(client)]
        shapes = [sample_shape(domain.x) for domain in domains if tensors_of(domain.x)]
        has = self._classes_of(client, [domain.y for domain in domains])
        return {"shapes": list(dict.fromkeys(shapes)), "classes": self.class_names(), "has": has}

    def _classes_of(self, client: str, labels: Sequence[Tensor]) -> list[bool] | None:
        """Which classes a client with these labels has, as far as it may announce them."""
        if self.task == "regression" or (client == self.target and not self.target_labels):
            return None
        y = torch.cat([*labels])
        return [bool((y == label).any()) for label in range(self.num_classes)]

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Raise a `DatasetLayoutError` unless what clients announced, `facts` by client, fits together."""
        check_common(facts, self.unshared_classes)

    def _federation(self) -> Federation | None:
        federation = self._model_of_run("federation")
        return federation if isinstance(federation, Federation) else None

    def _model_of_run(self, attribute: str) -> Any:
        return getattr(getattr(self.trainer, "lightning_module", None), attribute, None)

    # ---------------------------------------------------------------- loaders

    def train_dataloader(self) -> FederatedLoader:
        """Return shuffled training batches of the local clients."""
        local = self._local_names()
        if self._federation() is None:
            self.check_facts({name: self.facts(name) for name in local})
        if self.target_labels and self.target in local:
            _log.info(self._kept_labels())
        sizes: int | dict[str, int] = self.batch_size
        if self.target_batch_size is not None:
            sizes = {c.name: self.target_batch_size if c.is_target else self.batch_size for c in self._roster_of_run()}
        guarded = None if self.target_labels else self.target
        datasets = {name: self.dataset(name, "train") for name in local}
        return FederatedLoader(
            datasets, sizes, training=True, drop_last=self.drop_last, num_workers=self.num_workers,
            pin_memory=self.pin_memory, guarded=guarded, seed=self.seed,
        )  # fmt: skip

    def _kept_labels(self) -> str:
        """How many of the target's labels are used in training: ``1`` and ``1.0`` are easily confused."""
        split, y = self.split(self.target), self.labels(self.target)
        number = len(split.labelled)
        how = "all that it has"
        if number < int(known_labels(y[split.train]).sum()):
            how = f"drawn {'at random' if self.target_label_draw == 'random' else 'balanced over classes'}"
        if self.task == "classification":
            how += f"; {len(torch.unique(y[split.labelled]))} of {self.num_classes} classes have one"
        return (
            f"target {self.target!r} keeps the labels of {number} of its {len(split.train)} training samples "
            f"(target_labels={self.target_labels!r}: {how})"
        )

    def val_dataloader(self) -> FederatedLoader | list[Any]:
        """Return validation batches of the local clients, in order; none if ``val_fraction`` is 0."""
        return self._eval_loader("val", self._local_names(), self.val_fraction > 0)

    def test_dataloader(self) -> FederatedLoader | list[Any]:
        """Return test batches of the local clients, in order; none if ``test_fraction`` is 0."""
        return self._eval_loader("test", self._local_names(), self.test_fraction > 0 or self.transductive)

    def predict_dataloader(self) -> FederatedLoader | list[Any]:
        """Return the target's test samples, in order."""
        local = [name for name in self._local_names() if name == self.target]
        return self._eval_loader("test", local, self.test_fraction > 0 or self.transductive)

    def _eval_loader(self, stage: Stage, names: Sequence[str], expected: bool) -> FederatedLoader | list[Any]:
        if not expected:
            return []  # Lightning's way to say that there is nothing to evaluate
        # without a share held out, only a transductive target has samples; otherwise every client does
        datasets = {name: self.dataset(name, stage) for name in names if len(getattr(self.split(name), stage)) > 0}
        return self._loader_of(datasets)

    def _loader_of(self, datasets: Mapping[str, Dataset[Any]]) -> FederatedLoader:
        """Evaluation batches of clients' samples, in order."""
        return FederatedLoader(
            datasets, self.eval_batch_size, training=False, num_workers=self.num_workers, pin_memory=self.pin_memory,
            guarded=self.target, seed=self.seed,
        )  # fmt: skip

    # ---------------------------------------------------------------- for people

    def __str__(self) -> str:
        # Lightning's own builds every loader, which decodes every image
        here = [] if self.elsewhere else self._local_names()
        sizes = {name: str(self.num_samples(name)) for name in here}
        clients = ", ".join(f"{each.name} ({each.role}, {sizes.get(each.name, 'elsewhere')})" for each in self.clients)
        outputs = "classes" if self.task == "classification" else "numbers to predict"
        shape = f", input {in_words(self._sample_shape())}" if here else ""
        return f"{type(self).__name__}: {clients}; {self.num_classes} {outputs}{shape}"

    def pixels(self, client: str, positions: Tensor) -> Tensor | None:
        """Return images to look at, in [0, 1], shape (n, channels, height, width); ``None`` for other data."""
        x = self._domain(client).x
        if not isinstance(x, Tensor) or x.dim() != 4:
            return None
        images = x[positions]
        return (images.float() / 255 if images.dtype == torch.uint8 else images.float()).clamp(0, 1)

    def plot(self, num_samples: int = 10) -> Figure:
        """Draw ``num_samples`` images per client, of all classes in turn, or features in two principal components.

        It is for people and shows the target's true classes as well.
        """
        from fedlit.data.plots import plot_features, plot_images

        check_at_least("num_samples", num_samples, 1)
        is_images = self.pixels(self.target, torch.tensor([0])) is not None
        return plot_images(self, num_samples) if is_images else plot_features(self)
