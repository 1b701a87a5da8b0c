"""Reading of one client's samples: a batch at a time, or sample by sample in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, default_collate

from fedlit.federation.data_loaders import ClientSamples
from fedlit.federation.errors import SampleError
from fedlit.federation.nested import layout
from fedlit.federation.samples import reads_tensors
from fedlit.federation.streams import enter_stream, stable_seed, torch_streams

if TYPE_CHECKING:
    from fedlit.federation.loader import FederatedLoader
    from fedlit.federation.paces import Pace


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


def fetch_of(dataset: Any) -> Callable[[Tensor], Any] | None:
    """Reads samples of a dataset a batch at a time; ``None`` if they are read one by one."""
    if reads_tensors(dataset):
        return lambda indices: tuple(tensor[indices] for tensor in dataset.tensors)
    return dataset.batch if isinstance(dataset, BatchedDataset) else None


class Reader:
    """Reads one client's batches of a round."""

    def __init__(self, loader: FederatedLoader, client: str, pool: Tensor, pace: Pace) -> None:
        self.client = client
        self.pool = pool
        self.pace = pace
        self.seed = loader.seed
        self.training = loader.training
        self.size = loader.batch_size_of(client, pace.first_round)
        self.per_pass = loader.num_batches(len(pool), client, pace.first_round)
        self.given = loader.loaders.get(client)
        dataset = loader.datasets[client]
        self.augments = getattr(dataset, "augments", True) and not reads_tensors(dataset)
        self.fetch = fetch_of(dataset)
        self.dataset = dataset
        has_gpu = torch.cuda.is_available()
        own = {"num_workers": loader.num_workers, "pin_memory": loader.pin_memory and has_gpu}  # else torch would warn
        self._workers: dict[str, Any] = own if self.given is None else self.given.workers
        self.pins = self._workers["pin_memory"] and has_gpu
        self.samples: DataLoader[Any] | None = None
        self._orders: dict[int, Sequence[Tensor]] = {}  # a sampler with a state would draw another if asked again

    def read(self, round_idx: int, start: int, steps: int) -> Iterator[Any]:
        """Batches of a round of so many steps, from batch ``start`` on."""
        end = steps if self.pace.local_steps is not None else self.per_pass
        numbers = range(self.number(round_idx, start, steps), self.number(round_idx, end, steps))
        first_pass = numbers.start // self.per_pass
        self._orders = {pass_idx: order for pass_idx, order in self._orders.items() if pass_idx >= first_pass}
        if self.fetch is None:
            if self.samples is None:
                self.samples = DataLoader(
                    _SeededItems(self.client, self.dataset),
                    batch_sampler=_RoundSampler(),
                    collate_fn=Collate(self.client, self.dataset),
                    persistent_workers=self._workers["num_workers"] > 0,
                    generator=torch.Generator(),  # its own: a DataLoader draws a seed from torch's generator otherwise
                    **self._workers,
                )
            sampler = cast(_RoundSampler, self.samples.batch_sampler)
            sampler.batches = [(self._stream(number), self.positions(number).tolist()) for number in numbers]
            try:
                yield from self.samples
            except RuntimeError as error:  # torch's of a process that was killed names none
                if "DataLoader worker" not in str(error):
                    raise
                raise RuntimeError(f"samples of client {self.client!r}: {error}") from error
            return
        for number in numbers:
            with torch_streams() if self.augments else nullcontext():
                if self.augments:
                    enter_stream(*self._stream(number))
                batch = self.fetch(self.positions(number))
            yield tree_map_only(Tensor, Tensor.pin_memory, batch) if self.pins else batch

    def rest(self) -> None:
        """End worker processes until the next round of the client."""
        self.samples = None

    def number(self, round_idx: int, batch_idx: int, steps: int) -> int:
        """Number of a batch among those of all rounds."""
        return self.pace.number(round_idx, batch_idx, steps, self.per_pass)

    def _stream(self, number: int) -> tuple[object, ...]:
        return (self.seed, "augment", self.client, number)

    def positions(self, number: int) -> Tensor:
        """Positions of a batch's samples in the dataset."""
        pass_idx, position = divmod(number, self.per_pass)
        if pass_idx not in self._orders:
            if self.given is not None:
                batches: Sequence[Tensor] = self.given.batches(pass_idx, self.size)
            else:
                order = self.pool
                if self.training:
                    generator = torch.Generator().manual_seed(stable_seed(self.seed, "order", self.client, pass_idx))
                    order = order[torch.randperm(len(order), generator=generator)]
                batches = order.split(self.size)  # type: ignore[no-untyped-call]
            self._orders[pass_idx] = batches
        return self._orders[pass_idx][position]


class _RoundSampler:
    """Yields the batches that a reader has set for the coming round, each sample with its own random stream."""

    def __init__(self) -> None:
        self.batches: Sequence[tuple[tuple[object, ...], list[int]]] = ()

    def __iter__(self) -> Iterator[list[tuple[int, tuple[object, ...]]]]:
        for stream, indices in self.batches:
            yield [(index, (*stream, position)) for position, index in enumerate(indices)]

    def __len__(self) -> int:
        return len(self.batches)


class _SeededItems(Dataset[Any]):
    """Gives each sample a random stream of its own, so that augmentation does not depend on the worker count."""

    def __init__(self, client: str, dataset: Dataset[Any]) -> None:
        self.client, self.dataset = client, dataset

    def __getitems__(self, items: Sequence[tuple[int, tuple[object, ...]]]) -> list[Any]:
        """Return a batch's samples, which torch asks for together: keeping the global streams is dear."""
        found = []
        with torch_streams():
            for index, stream in items:
                enter_stream(*stream)
                found.append((index, read_sample(self.client, self.dataset, index), stream[:-1]))
        return found


def read_sample(client: str, dataset: Any, row: int) -> Any:
    """A sample of a client; an error of its dataset notes which one."""
    try:
        return dataset[row]
    except Exception as error:
        error.add_note(f"(row {row} of client {client!r}: mend the sample, or leave it out of the dataset)")
        raise


@dataclass(frozen=True)
class Collate:
    """Puts a client's samples, each with its row and the batch's stream, in one batch; names a row that does not fit.

    Samples of a `ClientSamples` are put together by its ``collate_fn``, and taken apart again.
    """

    client: str
    dataset: Any

    def __call__(self, items: Sequence[tuple[int, Any, tuple[object, ...]]]) -> Any:
        """Collate rows and their samples."""
        if not isinstance(self.dataset, ClientSamples):
            return self._default(items)
        if self.dataset.collate_fn is default_collate:
            return self.dataset.parts.split(self.client, self._default(items))
        with torch_streams():  # it may draw random numbers
            enter_stream(*items[0][2], "collate")
            try:
                batch = self.dataset.collate_fn([sample for _, sample, _ in items])
            except Exception as error:
                error.add_note(f"(collate_fn of client {self.client!r}, of rows {[row for row, *_ in items]})")
                raise
        return self.dataset.parts.split(self.client, batch)

    def _default(self, items: Sequence[tuple[int, Any, tuple[object, ...]]]) -> Any:
        try:
            return default_collate([sample for _, sample, _ in items])
        except (RuntimeError, TypeError, KeyError, AttributeError) as error:
            row, first, _ = items[0]
            for other, sample, _ in items[1:]:
                for (path, one), (_, two) in zip(layout(first), layout(sample), strict=False):
                    if one != two:
                        raise SampleError(
                            f"samples of client {self.client!r} must have one shape, got {one} in row {row} and {two} "
                            f"in row {other}{path and f' (entry {path})'}: resize them in the dataset"
                        ) from error
            raise SampleError(
                f"samples of client {self.client!r} cannot be put in one batch ({error}), from row {row} on: let the "
                "dataset give tensors, arrays or numbers, alike in all samples"
            ) from error
