"""One iterable per process that yields ``{client: batch}``, with an order that no process count changes.

Lightning's own `CombinedLoader` hangs when ranks hold different numbers of loaders or loaders of different length
(every step is a collective). A `FederatedLoader` has one length, agreed from the sizes of *all* clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from fedlit.federation.client import Facts
from fedlit.federation.errors import RosterError, SampleError
from fedlit.federation.labels import guard
from fedlit.federation.nested import layout, sample_shape, take
from fedlit.federation.samples import check_entries, check_map_style, reads_tensors
from fedlit.federation.streams import enter_stream, global_seed, stable_seed, torch_streams


@runtime_checkable
class BatchedDataset(Protocol):
    """A dataset that fetches many samples at once, which spares one Python call per sample.

    One whose ``augments`` attribute is False draws no random numbers, and is read without a random stream.
    """

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> Any:
        """Samples at ``indices`` (int64, shape (b,)), collated.

        Augmentations draw from the global generators of torch, numpy (``numpy.random.rand``) or Python (``random``).
        """


_FIRST = torch.tensor([0])


class SampleCheck(Protocol):
    """Looks at samples when they are read for the first time."""

    def due(self, client: str) -> bool:
        """Whether some of a client's samples have not been looked at."""

    def __call__(self, client: str, samples: Any, positions: Tensor) -> None:
        """Raise an error if a batch has samples that the run cannot take; positions are theirs in the dataset."""

    def fail(self, client: str, error: SampleError) -> None:
        """Raise an error here, or have the next exchange raise it on every process: until then others go on."""


@dataclass(frozen=True)
class RoundPlan:
    """How a `FederatedLoader` cuts a client's samples into rounds.

    Args:
        sizes: Training samples of every client of the federation, also of those hosted elsewhere.
        learners: Names of clients that train in a round, by round index; batches of the others are not fetched.
        position: The round and the batch within it at which the next epoch starts.
        local_steps: Batches per client and round; ``None`` is one local epoch.
        rounds_per_epoch: Rounds in one epoch of the Trainer.
        accumulate: Batches per optimiser step; the batches of a round are padded to a multiple of it.
        labelled_only: Clients that train on their labelled samples alone.
    """

    sizes: Mapping[str, int]
    learners: Callable[[int], Collection[str]]
    position: Callable[[], tuple[int, int]]
    local_steps: int | None = None
    rounds_per_epoch: int = 1
    accumulate: int = 1
    labelled_only: Collection[str] = ()


class FederatedLoader:
    """Batches of several clients at a time: ``{client: batch}``.

    In training, the samples of client c in pass p are ordered by a permutation that depends on (seed, c, p) alone, so
    the order survives a resume and does not depend on where c is hosted. A client that has run out of samples within
    a round (local epochs differ in length) is missing from the later batches of that round.

    Args:
        datasets: A map-style dataset per local client. One with a ``batch(indices)`` method, or a `TensorDataset`, is
            read a batch at a time; others sample by sample, through ``num_workers`` processes.
        batch_size: Samples per client and batch; a mapping sets it by client.
        training: Permute the samples in each pass and cut them into rounds; ``False`` for evaluation, in order.
        drop_last: Leave out a pass's last batch if it is smaller (networks with BatchNorm cannot train on 1 sample).
        num_workers: Worker processes per client for datasets that are read sample by sample.
        guarded: Client whose labels are kept behind the label guard: `GuardedLabels` take their place, empty in
            training, and readable for ``oracle/...`` metrics in evaluation. The strategy sets it to the target where
            the target is unlabelled or evaluated.
        least_batches: Length of an evaluation loader without clients, whose process must step along with the others.
        seed: Of the permutations; ``None`` takes the one given to ``seed_everything``.

    Attributes:
        check: Looks at samples when they are first read; a run sets it.

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
        guarded: str | None = None,
        least_batches: int = 0,
        seed: int | None = None,
    ) -> None:
        self.datasets = dict(datasets)
        self.training = training
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.guarded = guarded
        self.least_batches = least_batches
        self.seed = global_seed() if seed is None else seed
        self.batch_size = batch_size
        self.check: SampleCheck | None = None
        for name, dataset in self.datasets.items():
            check_map_style(name, dataset)
            if self.batch_size_of(name) < 1:
                raise ValueError(f"batch_size must be at least 1, got {self.batch_size_of(name)} for client {name!r}")
            if len(dataset) == 0:  # type: ignore[arg-type]
                raise RosterError(f"client {name!r} has no samples: leave it out of the federation or give it data")
        self._plan: RoundPlan | None = None
        self._readers: dict[str, _Reader] = {}

    def batch_size_of(self, client: str) -> int:
        """Samples per batch of ``client``."""
        if not isinstance(self.batch_size, Mapping):
            return self.batch_size
        if client not in self.batch_size:
            raise ValueError(f"batch_size must name every client of the federation, missing {client!r}: add it")
        return self.batch_size[client]

    def sizes(self, labelled_only: Collection[str] = ()) -> dict[str, int]:
        """Samples per local client; for those in ``labelled_only``, of the labelled ones."""
        return {name: len(self._pool(name, labelled_only)) for name in self.datasets}

    def keep(self, local: Collection[str], roster: Collection[str]) -> None:
        """Forget the data of clients that are hosted by other processes.

        Raises:
            RosterError: If there are data of a client that is not in the roster, or of others than the clients hosted
                here: in training in place of one of them, in evaluation of none of them.
        """
        unknown = [name for name in self.datasets if name not in roster]
        if unknown:
            raise RosterError(f"the loader has data of {unknown}, who are not among the clients {list(roster)}")
        given = list(self.datasets)
        self.datasets = {name: dataset for name, dataset in self.datasets.items() if name in local}
        lacking = any(name not in given for name in local)
        if self.training:
            swapped = lacking and len(self.datasets) < max(1, len(given))
        else:  # a process may have nothing to evaluate
            swapped = bool(lacking and given and not self.datasets and not self.least_batches)
        if swapped:
            way_out = "" if self.training else ", or an empty one where there is nothing to evaluate"
            raise RosterError(
                f"this process hosts {list(local)}, its loader has {given}: give each process a loader of the clients "
                f"that it hosts, which federation.local_clients names and placement of the strategy chooses{way_out}"
            )

    def facts(self, labelled_only: Collection[str] = ()) -> dict[str, Facts]:
        """Size and shape of each local client's data."""
        sizes = self.sizes(labelled_only)
        return {name: Facts(sizes[name], sample_shape(self.samples(name, _FIRST)[0])) for name in self.datasets}

    def samples(self, client: str, positions: Tensor = _FIRST) -> Any:
        """A local client's samples at some positions, as one batch; a transform is applied.

        Args:
            client: Its name.
            positions: In its dataset, int64, shape (batch,).

        Raises:
            TypeError: If samples are no tuples of inputs and labels.
            SampleError: If they cannot be put in one batch.
        """
        dataset, fetch = self.datasets[client], _fetch(self.datasets[client])
        with torch_streams():  # looking at a sample may draw an augmentation
            items = [] if fetch is not None else [(row, _read(client, dataset, row)) for row in positions.tolist()]
            for _, sample in items:
                check_entries(client, sample)
            found = _Collate(client)(items) if fetch is None else fetch(positions)
        check_entries(client, found)
        return found

    def plan(self, plan: RoundPlan) -> None:
        """Cut the data into rounds; called by the strategy before the first epoch."""
        if plan.local_steps is not None and plan.local_steps < 1:
            raise ValueError(f"local_steps must be at least 1 optimiser step, got {plan.local_steps}")
        for name, size in plan.sizes.items():
            if self.num_batches(size, name) == 0:
                raise RosterError(
                    f"client {name!r} has {size} samples, fewer than one batch of {self.batch_size_of(name)}, and "
                    "drop_last leaves it none: lower batch_size or set drop_last=False"
                )
        self._plan = plan
        self._readers.clear()

    @property
    def planned(self) -> bool:
        """Whether a strategy has cut the data into rounds."""
        return self._plan is not None

    def num_batches(self, size: int, client: str) -> int:
        """Batches of one pass over so many samples of ``client``."""
        batches = size / self.batch_size_of(client)
        return math.floor(batches) if self.drop_last else math.ceil(batches)

    def batches_per_pass(self, client: str) -> int:
        """Batches of one pass over what a client trains on; before a strategy has cut rounds, of a local client."""
        sizes = self.sizes() if self._plan is None else self._plan.sizes
        return self.num_batches(sizes[client], client)

    def batches_of(self, client: str) -> int:
        """Batches of a client in a round that it takes part in, wherever it is hosted: the first of its steps."""
        endless = self._plan is not None and self._plan.local_steps is not None
        return self.batches_per_round if endless else self.batches_per_pass(client)

    def samples_in(self, client: str, round_idx: int, batch_idx: int) -> int:
        """Samples in one batch of a client in a round that it takes part in, wherever it is hosted.

        Args:
            client: Its name.
            round_idx: The round.
            batch_idx: One of the client's batches in it: see `batches_of`.
        """
        sizes = self.sizes() if self._plan is None else self._plan.sizes
        number = round_idx * self.batches_of(client) + batch_idx
        position = number % self.batches_per_pass(client)
        size = self.batch_size_of(client)
        return min(size, sizes[client] - position * size)

    @property
    def batches_per_round(self) -> int:
        """Batches that each process goes through in one round; equal on all of them."""
        plan = self._plan
        if plan is not None and plan.local_steps is not None:
            return plan.local_steps * plan.accumulate
        sizes = self.sizes() if plan is None else plan.sizes
        longest = max((self.num_batches(size, name) for name, size in sizes.items()), default=self.least_batches)
        accumulate = 1 if plan is None else plan.accumulate
        return math.ceil(longest / accumulate) * accumulate

    def __len__(self) -> int:
        return self.batches_per_round * (1 if self._plan is None else self._plan.rounds_per_epoch)

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
        """A loader that goes once through the training samples of ``clients``, the same way every time.

        Args:
            clients: Names of local clients.
            batch_size: Samples of a client in a batch.
            labelled_only: Whether samples without a label are left out.
        """
        datasets = {name: self.datasets[name] for name in clients}
        once = FederatedLoader(
            datasets, batch_size, training=False, num_workers=self.num_workers, guarded=self.guarded, seed=self.seed
        )
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
        """Where the samples of a local client's batch are in its dataset, int64, shape (batch,).

        Args:
            client: Its name.
            round_idx: Round of the batch.
            batch_idx: Of the batch within the round.
        """
        reader = self._reader(client)
        return reader.positions(reader.number(round_idx, batch_idx, self.batches_per_round))

    def state_dict(self) -> dict[str, Any]:
        """Nothing: where to go on is in the federation's state. Shows Lightning that a resume within an epoch works."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `state_dict`."""

    def _batches(self, round_idx: int, start: int, clients: Collection[str]) -> Iterator[dict[str, Any]]:
        steps = self.batches_per_round
        readers = {name: self._reader(name).read(round_idx, start, steps) for name in clients}
        for batch_idx in range(start, steps):
            step = {}
            for name, reader in readers.items():
                batch = self._next(name, reader, round_idx, batch_idx)
                if batch is not None:
                    step[name] = batch
            yield step if self.guarded is None else dict(guard(step, self.guarded, keep=not self.training))

    def _next(self, client: str, reader: Iterator[Any], round_idx: int, batch_idx: int) -> Any:
        """A client's next batch, which is looked at; ``None`` if it has run out of samples.

        In one that is refused before other processes know of it, the client's first sample replaces all samples: this
        process steps along with the others to the exchange that ends the run.
        """
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
        first = self.samples(client)
        return [take(entry, torch.zeros(len(positions), dtype=torch.int64)) for entry in first]

    def _pool(self, client: str, labelled_only: Collection[str]) -> Tensor:
        dataset = self.datasets[client]
        if client in labelled_only:
            labelled = getattr(dataset, "labelled_indices", None)
            if labelled is not None:
                return labelled  # type: ignore[no-any-return]
        return torch.arange(len(dataset))  # type: ignore[arg-type]

    def _reader(self, client: str) -> _Reader:
        if client not in self._readers:
            plan = self._plan
            pool = self._pool(client, () if plan is None else plan.labelled_only)
            endless = plan is not None and plan.local_steps is not None
            self._readers[client] = _Reader(self, client, pool, endless)
        return self._readers[client]


def _fetch(dataset: Any) -> Callable[[Tensor], Any] | None:
    """Reads samples of a dataset a batch at a time; ``None`` if they are read one by one."""
    if reads_tensors(dataset):
        return lambda indices: tuple(tensor[indices] for tensor in dataset.tensors)
    return dataset.batch if isinstance(dataset, BatchedDataset) else None


class _Reader:
    """Reads one client's batches of a round."""

    def __init__(self, loader: FederatedLoader, client: str, pool: Tensor, endless: bool) -> None:
        self.client = client
        self.pool = pool
        self.endless = endless
        self.seed = loader.seed
        self.training = loader.training
        self.size = loader.batch_size_of(client)
        self.per_pass = loader.num_batches(len(pool), client)
        dataset = loader.datasets[client]
        self.augments = getattr(dataset, "augments", True) and not reads_tensors(dataset)
        self.fetch = _fetch(dataset)
        if self.fetch is None:
            self.sampler = _RoundSampler()
            self.workers = DataLoader(
                _SeededItems(client, dataset),
                batch_sampler=self.sampler,
                collate_fn=_Collate(client),
                num_workers=loader.num_workers,
                persistent_workers=loader.num_workers > 0,
                generator=torch.Generator(),  # its own: a DataLoader draws a seed from torch's generator otherwise
            )
        self._order: tuple[int, Tensor] | None = None

    def read(self, round_idx: int, start: int, steps: int) -> Iterator[Any]:
        numbers = range(self.number(round_idx, start, steps), self.number(round_idx + 1, 0, steps))
        if self.fetch is None:
            self.sampler.batches = [(self._stream(number), self.positions(number).tolist()) for number in numbers]
            yield from self.workers
            return
        for number in numbers:
            indices = self.positions(number)
            if self.augments:
                with torch_streams():
                    enter_stream(*self._stream(number))
                    batch = self.fetch(indices)
            else:
                batch = self.fetch(indices)
            yield batch

    def number(self, round_idx: int, batch_idx: int, steps: int) -> int:
        """Of a batch among all, where a round has so many steps."""
        # local steps go on where the last round stopped; a local epoch is the pass of its round
        return round_idx * (steps if self.endless else self.per_pass) + batch_idx

    def _stream(self, number: int) -> tuple[object, ...]:
        return (self.seed, "augment", self.client, number)

    def positions(self, number: int) -> Tensor:
        pass_idx, position = divmod(number, self.per_pass)
        if self._order is None or self._order[0] != pass_idx:
            order = self.pool
            if self.training:
                generator = torch.Generator().manual_seed(stable_seed(self.seed, "order", self.client, pass_idx))
                order = order[torch.randperm(len(order), generator=generator)]
            self._order = (pass_idx, order)
        return self._order[1][position * self.size : (position + 1) * self.size]


class _RoundSampler:
    """Yields the batches that a reader has set for the coming round, each sample with its own random stream."""

    def __init__(self) -> None:
        self.batches: Sequence[tuple[tuple[object, ...], list[int]]] = ()

    def __iter__(self) -> Iterator[list[tuple[int, tuple[object, ...]]]]:
        for stream, indices in self.batches:
            yield [(index, (*stream, place)) for place, index in enumerate(indices)]

    def __len__(self) -> int:
        return len(self.batches)


class _SeededItems(Dataset[Any]):
    """Gives each sample a random stream of its own, so that augmentation does not depend on the worker count."""

    def __init__(self, client: str, dataset: Dataset[Any]) -> None:
        self.client, self.dataset = client, dataset

    def __getitem__(self, item: tuple[int, tuple[object, ...]]) -> Any:
        index, stream = item
        with torch_streams():
            enter_stream(*stream)
            return index, _read(self.client, self.dataset, index)


def _read(client: str, dataset: Any, row: int) -> Any:
    """A sample of a client; an error of its dataset notes which one."""
    try:
        return dataset[row]
    except Exception as error:
        error.add_note(f"(row {row} of client {client!r}: mend the sample, or leave it out of the dataset)")
        raise


@dataclass(frozen=True)
class _Collate:
    """Puts a client's samples, each with its row, in one batch, and names a row that does not fit."""

    client: str

    def __call__(self, items: Sequence[tuple[int, Any]]) -> Any:
        try:
            return default_collate([sample for _, sample in items])
        except (RuntimeError, TypeError, KeyError, AttributeError) as error:
            row, first = items[0]
            for other, sample in items[1:]:
                for (path, one), (_, two) in zip(layout(first), layout(sample), strict=False):
                    if one != two:
                        raise SampleError(
                            f"samples of client {self.client!r} must have one shape, got {one} in row {row} and {two} "
                            f"in row {other}{path and f' (entry {path})'}: bring them to one shape in the dataset"
                        ) from error
            raise SampleError(
                f"samples of client {self.client!r} cannot be put in one batch ({error}), from row {row} on: let the "
                "dataset give tensors, arrays or numbers, alike in all samples"
            ) from error
