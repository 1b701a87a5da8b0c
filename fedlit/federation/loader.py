"""One iterable per process that yields ``{client: batch}``, with an order that no process count changes.

Lightning's own `CombinedLoader` hangs when ranks hold different numbers of loaders or loaders of different length
(every step is a collective). A `FederatedLoader` has one length, agreed from the sizes of *all* clients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedlit.checks import check, check_at_least, check_count, check_one_of, refuse
from fedlit.federation.batch_parts import Entry, Parts
from fedlit.federation.client import Facts
from fedlit.federation.data_loaders import ClientLoader, ClientSamples, Cut, Stage, open_loader
from fedlit.federation.errors import RosterError, SampleError
from fedlit.federation.labels import guard
from fedlit.federation.nested import any_size, sample_shape, take
from fedlit.federation.paces import Pace, RoundPlan
from fedlit.federation.reading import Collate, Reader, fetch_of, read_sample
from fedlit.federation.samples import check_entries, check_map_style, reads_tensors
from fedlit.federation.streams import global_seed, torch_streams

_FIRST = torch.tensor([0])


class SampleCheck(Protocol):
    """Checks samples when they are read for the first time."""

    def due(self, client: str) -> bool:
        """Return whether some of a client's samples have not been checked."""

    def __call__(self, client: str, samples: Any, positions: Tensor) -> None:
        """Raise an error if a batch has samples that the run cannot take; positions are theirs in the dataset."""

    def fail(self, client: str, error: SampleError) -> None:
        """Raise an error here, or have the next exchange raise it on every process: until then others go on."""


class FederatedLoader:
    """Batches of several clients at a time: ``{client: batch}``.

    In training, the samples of client c in pass p are ordered by a permutation that depends on (seed, c, p) alone, so
    the order survives a resume and does not depend on where c is hosted. A client that has run out of samples within
    a round is missing from its later batches.

    Args:
        datasets: A map-style dataset per local client. A `BatchedDataset` or `TensorDataset` is read a batch at a
            time; others sample by sample, through ``num_workers`` processes.
        batch_size: Samples per client and batch; a mapping sets it by client.
        training: Permute the samples in each pass and cut them into rounds; ``False`` for evaluation, in order.
        drop_last: Leave out a pass's last batch if it is smaller (networks with BatchNorm cannot train on 1 sample).
        num_workers: Worker processes per client for datasets that are read sample by sample.
        pin_memory: Put batches in pinned memory, from which they are copied to a GPU sooner; without one, nothing.
        guarded: Client whose labels are kept behind the label guard (`GuardedLabels`): the target, where it is
            unlabelled or evaluated.
        least_batches: Length of an evaluation loader without clients, whose process must step along with the others.
        seed: Of the permutations; ``None`` takes the one given to ``seed_everything``.

    Attributes:
        check: Of samples when they are first read; a run sets it.
        loaders: What is kept of the DataLoaders of clients that have one; see `from_loaders`.

    Raises:
        RosterError: If a client has no samples, or too few for one batch with ``drop_last``.
        TypeError: If a dataset is not map-style.
        ValueError: If ``batch_size`` is below 1, or is a mapping that lacks a client.
    """

    def __init__(
        self,
        datasets: Mapping[str, Dataset[Any]],
        batch_size: int | Mapping[str, int] = 32,
        *,
        training: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        guarded: str | None = None,
        least_batches: int = 0,
        seed: int | None = None,
    ) -> None:
        check_count("num_workers", num_workers, 0)
        self.datasets = dict(datasets)
        self.training = training
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.guarded = guarded
        self.least_batches = least_batches
        self.seed = global_seed() if seed is None else seed
        self.batch_size = batch_size
        self.check: SampleCheck | None = None
        self.loaders: dict[str, ClientLoader] = {}
        self._cuts: dict[str, Cut] = {}  # of clients with a DataLoader, wherever they are hosted
        self._plan: RoundPlan | None = None
        self._lengths: dict[Pace, int] = {}  # in each of its rounds, asked for in every local step
        self._readers: dict[str, Reader] = {}
        for name, dataset in self.datasets.items():
            check_map_style(name, dataset)
            check_at_least("batch_size", self.batch_size_of(name), 1, way_out=f"give client {name!r} more")
            if len(dataset) == 0:  # type: ignore[arg-type]
                raise RosterError(f"client {name!r} has no samples: leave it out of the federation or give it data")

    @classmethod
    def from_loaders(
        cls,
        loaders: Mapping[str, Any],
        *,
        stage: Stage = "train",
        label: Entry | None = None,
        inputs: Entry | Sequence[Entry] | None = None,
        seed: int | None = None,
    ) -> FederatedLoader:
        """Return a loader of the clients' ordinary DataLoaders, with batches as these make them.

        Kept of each: ``dataset``, ``batch_size``, ``shuffle`` or ``sampler``, ``batch_sampler``, ``drop_last``,
        ``collate_fn``, ``pin_memory`` and what is about workers, which persist. Batches are tuples, dictionaries, named
        tuples or dataclasses; the ``training_step`` of a module in `fedlit.Federated` is given them as ``collate_fn``
        made them.
        Methods, the label guard and evaluation use the part that is ``label``, and the one that is ``inputs``.

        A sampler's order in pass p is random by (seed, client, p) alone, and by the seed of its ``generator`` if it has
        one; that of ``shuffle=True`` without one is the order of `FederatedLoader`. ``set_epoch(p)`` is called where
        there is one. So runs repeat, and go on from a checkpoint as if they had not stopped, in any number of
        processes, which all give loaders of this kind. That does not hold for samplers with a state of their own, such
        as a ``numpy.random.default_rng()``: they go on from the state that they have.

        A client's training samples, whose number weighs it in means, are the rows that its sampler draws, if pass 0 and
        pass 1 draw the same rows once each; otherwise all rows of its dataset.

        Args:
            loaders: A `torch.utils.data.DataLoader` of a map-style dataset by client, or a LightningDataModule: its
                ``prepare_data`` (where ``LOCAL_RANK`` is 0 or not set) and ``setup`` are called once, here, and not by
                the Trainer, in a random stream of the client; ``teardown`` is not called.
            stage: Loader of data modules: ``"train"`` or ``"val"`` after ``setup("fit")``, ``"test"`` or ``"predict"``
                after their own. All but ``"train"`` are for evaluation.
            label: Key of a dictionary, field, or index with the labels: one for each sample, -1 or in regression NaN
                where there is none. ``None`` takes the second entry of a tuple.
            inputs: Such an entry, or several, with what networks take; ``None`` takes all but the label. One entry is
                given by itself, several as a tuple or dictionary.
            seed: Of the order; ``None`` takes the one given to ``seed_everything``.

        Raises:
            SampleError: If something of a DataLoader cannot be kept: an iterable dataset, ``batch_size=None``, a
                DistributedSampler, an ``__iter__`` of its own, a sampler without a length. When samples are read, if a
                batch has no such label or inputs.
            TypeError: If a client has something else than one DataLoader.
        """
        check_one_of("stage", stage, ("train", "val", "test", "predict"))
        rule, kind = "a mapping from client to DataLoader", type(loaders).__name__
        check(isinstance(loaders, Mapping), "loaders", rule, loaders, "give {client: loader}", TypeError, f"a {kind}")
        seed, parts = global_seed() if seed is None else seed, Parts(label, inputs)
        taken = {
            name: ClientLoader(name, open_loader(name, each, stage, seed), parts, seed)
            for name, each in loaders.items()
        }
        made = cls(
            {name: each.dataset for name, each in taken.items()},
            {name: each.cut.batch_size for name, each in taken.items()},
            training=stage == "train",
            num_workers=max((each.workers["num_workers"] for each in taken.values()), default=0),
            seed=seed,
        )
        made.loaders = taken
        made._cuts = {name: each.cut for name, each in taken.items()}
        return made

    def batch_size_of(self, client: str, round_idx: int | None = None) -> int:
        """Samples per batch of ``client`` in a round; ``None`` is the next."""
        if (batch_size := self._pace(round_idx).batch_size) is not None:
            return batch_size
        if client in self._cuts:
            return self._cuts[client].batch_size
        if not isinstance(self.batch_size, Mapping):
            return self.batch_size
        if client not in self.batch_size:
            refuse("batch_size", "an entry for every client", self.batch_size, f"add {client!r}")
        return self.batch_size[client]

    def sizes(self, labelled_only: Collection[str] = ()) -> dict[str, int]:
        """Samples per local client; for those in ``labelled_only``, of the labelled ones."""
        return {name: len(self._pool(name, labelled_only)) for name in self.datasets}

    def keep(self, local: Collection[str], roster: Collection[str]) -> None:
        """Forget the data of clients that are hosted by other processes.

        Raises:
            RosterError: If there are data of a client that is not in the roster, or in place of a client hosted here.
        """
        unknown = [name for name in self.datasets if name not in roster]
        if unknown:
            raise RosterError(f"the loader has data of {unknown}, who are not among the clients {list(roster)}")
        names = list(self.datasets)
        self.datasets = {name: dataset for name, dataset in self.datasets.items() if name in local}
        lacking = any(name not in names for name in local)
        if self.training:
            swapped = lacking and len(self.datasets) < max(1, len(names))
        else:  # a process may have nothing to evaluate
            swapped = bool(lacking and names and not self.datasets and not self.least_batches)
        if swapped:
            way_out = "" if self.training else ", or an empty one where there is nothing to evaluate"
            raise RosterError(
                f"this process hosts {list(local)}, its loader has {names}: give each process a loader of the clients "
                f"that it hosts, which federation.local_clients names and placement of the strategy chooses{way_out}"
            )

    def facts(self, labelled_only: Collection[str] = ()) -> dict[str, Facts]:
        """Size and shape of each local client's data."""
        sizes, facts = self.sizes(labelled_only), {}
        for name, dataset in self.datasets.items():
            shape = sample_shape(self.samples(name, _FIRST)[0])
            pads = isinstance(dataset, ClientSamples) and dataset.pads
            facts[name] = Facts(sizes[name], any_size(shape) if pads else shape)
        return facts

    def announced_cut(self, client: str) -> tuple[Any, ...] | None:
        """Return how the DataLoader of a local client cuts its samples, for other processes; ``None`` without one."""
        return astuple(self._cuts[client]) if client in self._cuts else None

    def receive_cuts(self, announced: Mapping[str, Any]) -> None:
        """Take in what processes have announced, by client."""
        self._cuts = {name: Cut.received(name, each) for name, each in announced.items() if each is not None}

    def samples(self, client: str, positions: Tensor = _FIRST) -> Any:
        """Return a local client's samples at ``positions`` of its dataset, int64, as one batch, after its transform.

        Raises:
            TypeError: If samples are no tuples of inputs and labels.
            SampleError: If they cannot be put in one batch.
        """
        dataset, fetch = self.datasets[client], fetch_of(self.datasets[client])
        with nullcontext() if reads_tensors(dataset) else torch_streams():  # a look may draw an augmentation
            if fetch is not None:
                batch = fetch(positions)
            else:
                items = [(row, read_sample(client, dataset, row), ()) for row in positions.tolist()]
                for _, sample, _ in items if not isinstance(dataset, ClientSamples) else ():
                    check_entries(client, sample)
                batch = Collate(client, dataset)(items)
        check_entries(client, batch)
        return batch

    def plan(self, plan: RoundPlan) -> None:
        """Cut the data into rounds; called by the strategy before the first epoch."""
        self._plan = plan
        self._readers.clear()
        self._lengths.clear()
        for pace in plan.paces:
            if pace.local_steps is not None:
                check_at_least("local_steps", pace.local_steps, 1, "optimiser step")
            for name, size in plan.sizes.items():
                if self.num_batches(size, name, pace.first_round) == 0:
                    raise RosterError(
                        f"client {name!r} has {size} samples, fewer than one batch of "
                        f"{self.batch_size_of(name, pace.first_round)}, and drop_last leaves it none: lower batch_size "
                        "or set drop_last=False"
                    )
            self._lengths[pace] = self._batches_of_pace(plan, pace)

    @property
    def planned(self) -> bool:
        """Whether a strategy has cut the data into rounds."""
        return self._plan is not None

    def cut(self, size: int, client: str, batch_size: int | None = None, round_idx: int | None = None) -> Cut:
        """Return how so many samples of ``client`` are cut into batches; by default of the size in a round.

        Raises:
            ValueError: If ``batch_size`` is set for a client whose DataLoader has a ``batch_sampler``.
        """
        batch_size = batch_size or self._pace(round_idx).batch_size
        cut = self._cuts.get(client)
        if cut is None:
            return Cut(size, batch_size or self.batch_size_of(client, round_idx), self.drop_last)
        way_out = f"leave it out, as the batch_sampler of client {client!r} makes the batches"
        check(not (batch_size and cut.made), "batch_size of a phase", "None", batch_size, way_out)
        return replace(cut, batch_size=batch_size) if batch_size else cut

    def num_batches(self, size: int, client: str, round_idx: int | None = None) -> int:
        """Batches of one pass over so many samples of ``client``, as long as those of a round; ``None`` is the next."""
        return self.cut(size, client, round_idx=round_idx).batches

    def batches_per_pass(self, client: str, round_idx: int | None = None) -> int:
        """Batches of one pass over what a client trains on; before a strategy has cut rounds, of a local client."""
        sizes = self.sizes() if self._plan is None else self._plan.sizes
        return self.num_batches(sizes[client], client, round_idx)

    def batches_of(self, client: str, round_idx: int | None = None) -> int:
        """Batches of a client in a round that it takes part in, wherever it is hosted: the first of its steps."""
        if self._pace(round_idx).local_steps is None:
            return self.batches_per_pass(client, round_idx)
        return self.batches_in(round_idx)

    def samples_in(self, client: str, round_idx: int, batch_idx: int) -> int:
        """Samples in one of the `batches_of` a client in a round that it takes part in, wherever it is hosted."""
        sizes = self.sizes() if self._plan is None else self._plan.sizes
        per_pass = self.batches_per_pass(client, round_idx)
        position = self._pace(round_idx).number(round_idx, batch_idx, self.batches_in(round_idx), per_pass) % per_pass
        self.check_sized(client)
        cut = self.cut(sizes[client], client, round_idx=round_idx)
        return min(cut.batch_size, cut.rows - position * cut.batch_size)

    def check_sized(self, client: str) -> None:
        """Refuse a client whose batches have any size, as the ``batch_sampler`` of its DataLoader makes them."""
        made = client in self._cuts and self._cuts[client].made > 0
        rule, way_out = "None, where a method weighs batches", "give a sampler and batch_size, or take another method"
        check(not made, f"batch_sampler of the DataLoader of client {client!r}", rule, None, way_out, shown="one")

    def batches_in(self, round_idx: int | None = None) -> int:
        """Batches that each process goes through in a round, equal on all of them; ``None`` is the next."""
        if self._plan is None:
            return max((self.batches_per_pass(name) for name in self.datasets), default=self.least_batches)
        return self._lengths[self._pace(round_idx)]

    def _batches_of_pace(self, plan: RoundPlan, pace: Pace) -> int:
        if pace.local_steps is not None:
            return pace.local_steps * plan.accumulate
        batches = (self.num_batches(size, name, pace.first_round) for name, size in plan.sizes.items())
        return math.ceil(max(batches, default=self.least_batches) / plan.accumulate) * plan.accumulate

    @property
    def first_rounds(self) -> list[int]:
        """First rounds of spans whose rounds have equal lengths, in ascending order."""
        return [0] if self._plan is None else [pace.first_round for pace in self._plan.paces]

    @property
    def rounds_per_epoch(self) -> int:
        """Rounds in one epoch of the Trainer."""
        return 1 if self._plan is None else self._plan.rounds_per_epoch

    def __len__(self) -> int:
        """Batches of the next epoch."""
        return self.batches_in() * self.rounds_per_epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        plan = self._plan
        if plan is None:
            yield from self._batches(0, 0, self.datasets)
            return
        round_idx, start = plan.position()
        for _ in range(plan.rounds_per_epoch):
            learners = plan.learners(round_idx)
            yield from self._batches(round_idx, start, [name for name in self.datasets if name in learners])
            round_idx, start = round_idx + 1, 0

    def in_order(self, clients: Sequence[str], batch_size: int = 512, labelled_only: bool = True) -> FederatedLoader:
        """A loader that goes once through the training samples of local ``clients``, the same way every time."""
        datasets = {name: self.datasets[name] for name in clients}
        once = FederatedLoader(
            datasets, batch_size, training=False, num_workers=self.num_workers, pin_memory=self.pin_memory,
            guarded=self.guarded, seed=self.seed,
        )  # fmt: skip
        once.check = self.check
        chosen = clients if labelled_only else ()
        once.plan(
            RoundPlan(
                sizes=once.sizes(chosen),
                learners=lambda round_idx: clients,
                position=lambda: (0, 0),
                labelled_only=chosen,
            )
        )
        return once

    def positions(self, client: str, round_idx: int, batch_idx: int) -> Tensor:
        """Positions of the samples of a local client's batch in its dataset, int64, shape (batch,)."""
        reader = self._reader(client, round_idx)
        return reader.positions(reader.number(round_idx, batch_idx, self.batches_in(round_idx)))

    def state_dict(self) -> dict[str, Any]:
        """Empty, as the federation's state has the position; it shows Lightning that a resume within an epoch works."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `state_dict`."""

    def _batches(self, round_idx: int, start: int, clients: Collection[str]) -> Iterator[dict[str, Any]]:
        steps = self.batches_in(round_idx)
        for name in self._readers.keys() - set(clients):  # workers of all clients would add up over the rounds
            self._readers[name].rest()
        readers = {name: self._reader(name, round_idx).read(round_idx, start, steps) for name in clients}
        for batch_idx in range(start, steps):
            step = {}
            for name, reader in readers.items():
                batch = self._next(name, reader, round_idx, batch_idx)
                if batch is not None:
                    step[name] = batch
            yield step if self.guarded is None else dict(guard(step, self.guarded, keep=not self.training))

    def _next(self, client: str, reader: Iterator[Any], round_idx: int, batch_idx: int) -> Any:
        """A client's next batch, checked; ``None`` if it has run out of samples."""
        check = self.check
        if check is None or not check.due(client):
            return next(reader, None)
        positions = self.positions(client, round_idx, batch_idx)
        try:
            batch = next(reader, None)
            if batch is not None:
                check(client, batch, positions)
            return batch
        except SampleError as error:
            check.fail(client, error)
        first = self.samples(client)  # in place of all: this process goes on to the exchange that ends the run
        return [take(entry, torch.zeros(len(positions), dtype=torch.int64)) for entry in first]

    def _pool(self, client: str, labelled_only: Collection[str]) -> Tensor:
        dataset = self.datasets[client]
        if client in labelled_only:
            labelled = getattr(dataset, "labelled_indices", None)
            if labelled is not None:
                return labelled  # type: ignore[no-any-return]
        return torch.arange(len(dataset))  # type: ignore[arg-type]

    def _pace(self, round_idx: int | None) -> Pace:
        plan = self._plan
        if plan is None:
            return Pace()
        return plan.pace(plan.position()[0] if round_idx is None else round_idx)

    def _reader(self, client: str, round_idx: int) -> Reader:
        pace = self._pace(round_idx)
        if client not in self._readers or self._readers[client].pace != pace:
            pool = self._pool(client, () if self._plan is None else self._plan.labelled_only)
            self._readers[client] = Reader(self, client, pool, pace)
        return self._readers[client]
