"""Ordinary DataLoaders, one per client: whose samples, order and batches a `FederatedLoader` takes over."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NoReturn, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from fedlit.checks import refuse
from fedlit.federation.batch_parts import Parts
from fedlit.federation.client import MOST_SAMPLES
from fedlit.federation.errors import SampleError
from fedlit.federation.streams import enter_stream, stable_seed, torch_streams
from fedlit.privacy import DecodeError

Stage: TypeAlias = Literal["train", "val", "test", "predict"]
"""Of a LightningDataModule's loaders: ``"train"`` is its ``train_dataloader``, and so on."""

_SETUP = {"train": "fit", "val": "fit", "test": "test", "predict": "predict"}

_set_up: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Stages for which data modules are ready. A second ``setup`` might split their samples in another way."""


@dataclass(frozen=True)
class Cut:
    """How a pass over a client's samples is cut into batches, which other processes have to know.

    Args:
        rows: Samples in a pass.
        batch_size: Samples in a batch, but the last.
        drop_last: Leave out the last batch if it is smaller.
        made: Number of batches, if a ``batch_sampler`` makes them, whose sizes differ; otherwise 0.
        smallest: Samples in the smallest of these.
    """

    rows: int
    batch_size: int
    drop_last: bool = False
    made: int = 0
    smallest: int = 0

    @classmethod
    def received(cls, client: str, sent: Any) -> Cut:
        """Return one that a process sent; a `DecodeError` of anything else."""
        kinds = [type(each) for each in sent] if isinstance(sent, tuple) else []
        if kinds != [int, int, bool, int, int] or min(sent) < 0 or sent[1] < 1 or max(sent) > MOST_SAMPLES:
            raise DecodeError(f"client {client!r} announces its batches by {str(sent)[:100]}")
        return cls(*sent)

    @property
    def batches(self) -> int:
        """Number of batches."""
        ratio = self.rows / self.batch_size
        return self.made or (math.floor(ratio) if self.drop_last else math.ceil(ratio))

    @property
    def least(self) -> int:
        """Samples in the smallest batch."""
        rest = 0 if self.drop_last else self.rows % self.batch_size
        return self.smallest if self.made else rest or self.batch_size


class ClientSamples(Dataset[Any]):
    """Samples of a client, which its ``collate_fn`` puts in batches that are then taken apart into inputs and labels.

    Args:
        client: Its name, for errors.
        dataset: Map-style.
        collate_fn: Makes a batch of a list of samples.
        parts: What in a batch is inputs and label.
    """

    def __init__(self, client: str, dataset: Any, collate_fn: Callable[[list[Any]], Any], parts: Parts) -> None:
        self.client, self.dataset, self.collate_fn, self.parts = client, dataset, collate_fn, parts

    @property
    def pads(self) -> bool:
        """Whether a batch's shape may depend on its samples."""
        return self.collate_fn is not default_collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class ClientLoader:
    """What a `FederatedLoader` keeps of a client's DataLoader.

    Args:
        client: Name of the client.
        loader: A `torch.utils.data.DataLoader` of a map-style dataset.
        parts: What in a batch is inputs and label.
        seed: Of the order of passes.

    Attributes:
        dataset: The client's samples: those rows that its sampler draws, if they are the same in each pass.
        cut: How a pass is cut into batches.
        workers: Arguments of the DataLoader about worker processes.
    """

    def __init__(self, client: str, loader: DataLoader[Any], parts: Parts, seed: int) -> None:
        self.client, self._loader, self._seed = client, loader, seed
        self._check()
        self._plain = type(loader.batch_sampler) is BatchSampler
        self._positions: dict[int, int] | None = None
        self.cut, rows = self._look()
        dataset: Any = loader.dataset if rows is None else Subset(loader.dataset, rows)
        named = parts.label is not None or loader.collate_fn is not default_collate
        self.dataset = ClientSamples(client, dataset, loader.collate_fn, parts) if named else dataset
        self.workers = {
            "num_workers": loader.num_workers,
            "worker_init_fn": loader.worker_init_fn,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout,
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
        }

    def batches(self, pass_idx: int, batch_size: int) -> list[torch.Tensor]:
        """Return positions in `dataset` of a pass's batches, int64, in order; a ``batch_sampler`` sets their sizes."""
        positions = self._positions
        try:
            drawn = [
                torch.tensor(each if positions is None else [positions[row] for row in each], dtype=torch.int64)
                for each in self._draw(pass_idx)
            ]
        except KeyError as error:
            way_out = "let it draw the same rows in each pass, or others from the start"
            self._refuse("sampler", f"one that draws the same rows in pass {pass_idx} as before", way_out, error)
        if self._plain:
            return list(drawn[0].split(batch_size))  # type: ignore[no-untyped-call]
        if len(drawn) != self.cut.made:
            way_out = "leave batch_sampler out, or give one whose __len__ is right in each pass"
            rule = f"one of {self.cut.made} batches in each pass"
            self._refuse("batch_sampler", rule, way_out, shown=f"{len(drawn)} in pass {pass_idx}")
        return drawn

    # ---------------------------------------------------------------- rows that are drawn

    def _look(self) -> tuple[Cut, list[int] | None]:
        """How passes are cut, and the rows of the dataset that they draw; ``None`` if these are all or differ."""
        loader: Any = self._loader
        size, drawn = len(loader.dataset), len(loader.sampler) if self._plain else 0
        whole = type(loader.sampler) in (SequentialSampler, RandomSampler) and drawn >= size
        first = [] if self._plain and whole else self._draw(0)
        rows = sorted({row for batch in first for row in batch})
        number = sum(map(len, first))
        partial = 0 < len(rows) == number < size and rows == sorted(row for each in self._draw(1) for row in each)
        if partial:
            self._positions = {row: position for position, row in enumerate(rows)}
        if self._plain:
            cut = Cut(drawn, loader.batch_sampler.batch_size, bool(loader.batch_sampler.drop_last))
        else:
            sizes = list(map(len, first)) or [0]
            cut = Cut(number, max(1, *sizes), made=len(first), smallest=min(sizes))
        if not cut.batches:
            way_out = "lower batch_size, set drop_last=False, or leave the client out"
            self._refuse("loader", "one with at least one batch", way_out, shown=f"0 of {drawn} rows")
        return cut, rows if partial else None

    def _draw(self, pass_idx: int) -> list[list[int]]:
        """Rows of the dataset in a pass: by batch of a ``batch_sampler``, otherwise in one list."""
        loader: Any = self._loader
        source = loader.sampler if self._plain else loader.batch_sampler
        samplers = [source, *([source.sampler] if hasattr(source, "sampler") else [])]
        stream = (self._seed, "order", self.client, pass_idx)
        with torch_streams(), ExitStack() as stack:
            enter_stream(*stream)
            for each in samplers:
                if callable(getattr(each, "set_epoch", None)):
                    each.set_epoch(pass_idx)
                stack.enter_context(_generator(each, stream))
            found = list(islice(source, len(source)))
        batches = [found] if self._plain else [list(batch) for batch in found]
        try:
            batches = [[*map(int, batch)] for batch in batches]
        except (TypeError, ValueError) as error:
            self._refuse("sampler", "one that draws rows", "let it draw numbers from 0", error)
        wrong = [row for batch in batches for row in batch if not 0 <= row < len(loader.dataset)][:5]
        if wrong:
            rule = f"one that draws rows from 0 to {len(loader.dataset) - 1}"
            self._refuse("sampler", rule, "give that of this dataset", shown=f"rows {wrong}")
        return batches

    # ---------------------------------------------------------------- what cannot be taken over

    def _check(self) -> None:
        loader: Any = self._loader
        samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
        if isinstance(loader.dataset, IterableDataset):
            way_out = "give a dataset with __len__ and __getitem__, such as one of the samples read into a list"
            kind = type(loader.dataset).__name__
            self._refuse(
                "dataset", "one whose samples are read by number: a loader needs a length", way_out, shown=kind
            )
        if type(loader).__iter__ is not DataLoader.__iter__:
            way_out = "give its dataset, sampler and collate_fn to a torch.utils.data.DataLoader"
            self._refuse("loader", "without an __iter__ of its own", way_out, shown=type(loader).__name__)
        if loader.batch_sampler is None:
            way_out = "give single samples and a batch_size, or a batch_sampler"
            self._refuse("batch_size", "a number, as the samples of a batch are counted and chosen", way_out)
        if any(isinstance(each, DistributedSampler) for each in samplers):
            way_out = "leave it out: each client has data of its own, which no other process shares"
            self._refuse("sampler", "one of all samples", way_out, shown="DistributedSampler")
        for name in ("sampler", "batch_sampler"):
            try:
                len(getattr(loader, name))
            except (TypeError, NotImplementedError) as error:
                if name == "batch_sampler" or type(loader.batch_sampler) is BatchSampler:
                    self._refuse(name, "one with a length (__len__), from which rounds have one", "give it one", error)

    def _refuse(
        self, argument: str, rule: str, way_out: str, error: Exception | None = None, shown: str = ""
    ) -> NoReturn:
        value = getattr(self._loader, argument, self._loader)
        try:
            refuse(
                f"{argument} of {'' if argument == 'loader' else 'the DataLoader of '}client {self.client!r}",
                rule,
                value,
                way_out,
                SampleError,
                shown or ("None" if value is None else type(value).__name__),
            )
        except SampleError as refused:
            raise refused from error


@contextmanager
def _generator(sampler: Any, stream: tuple[object, ...]) -> Iterator[None]:
    """Give a sampler a generator for one pass: of a generator of its own the seed counts, and not its state."""
    own = getattr(sampler, "generator", sampler)
    if own is not None and not isinstance(own, torch.Generator):
        yield
        return
    seeds = stream if own is None else (*stream, own.initial_seed())
    sampler.generator = torch.Generator().manual_seed(stable_seed(*seeds))
    try:
        yield
    finally:
        sampler.generator = own


def open_loader(client: str, given: Any, stage: Stage, seed: int) -> DataLoader[Any]:
    """Return a client's DataLoader: itself, or that of its data module for a stage."""
    found, where = given, f"loader of client {client!r}"
    if not isinstance(given, DataLoader) and callable(getattr(given, "train_dataloader", None)):
        with torch_streams():  # a split is random, and is not to depend on which clients are hosted here
            enter_stream(seed, "data module", client)
            try:
                _prepare(given, _SETUP[stage])
                found = getattr(given, f"{stage}_dataloader")()
            except Exception as error:
                error.add_note(f"(in the data module of client {client!r}, which has no Trainer yet)")
                raise
        where = f"{stage}_dataloader of the data module of client {client!r}"
    if not isinstance(found, DataLoader):
        kind = f"a {type(found).__name__}"
        if isinstance(found, Sequence) and not isinstance(found, str):
            kind += f" of {len(found)}"
        rule = "a torch.utils.data.DataLoader" + ("" if found is not given else ", or a LightningDataModule")
        way_out = "give one DataLoader per client; of a dataset, FederatedLoader({client: dataset})"
        refuse(where, rule, found, way_out, TypeError, kind)
    return found


def _prepare(module: Any, stage: str) -> None:
    """Prepare and set up a data module as a Trainer does, once for each stage."""
    ready = _set_up.setdefault(module, set())
    if not ready and os.environ.get("LOCAL_RANK", "0") == "0":
        module.prepare_data()
    if stage not in ready:
        module.setup(stage)
        ready.add(stage)
