"""What a fixed network makes of all samples, computed once, for ``fedlit features``."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import yaml
from filelock import FileLock, Timeout
from jsonargparse import ArgumentParser, Namespace
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from fedlit.callbacks.shared import write_whole
from fedlit.cli.arguments import normalise
from fedlit.cli.catalogue import load_plugins
from fedlit.cli.commands import PROG, make_parser
from fedlit.cli.lightning_cli import quieten
from fedlit.cli.parsed import in_plain_words
from fedlit.data import DomainDataModule
from fedlit.data.files import read_npz
from fedlit.federation.documents import fingerprint
from fedlit.federation.reading import BatchedDataset
from fedlit.models import Backbone
from fedlit.models.backbone import LITE0, TIMM

_CHUNK = 256
"""Samples that are computed between one file and the next, at least: what a killed run loses."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Of a function in a network's text, which is another in each run."""

_MARK = "made_of"
"""Entry of the file by which features of other data or another network are distinguished from these."""


def extract(args: list[str]) -> None:
    """Write the features of a data module's samples."""
    quieten()
    load_plugins()
    parser = make_parser(DomainDataModule)
    given = parser.parse_args([*_data_alone(normalise(args))])
    with in_plain_words(given):
        network = _network(given)
        _read_as_trained(given.data.get("init_args") or {}, network)
        data = parser.instantiate(given).data
    assert isinstance(data, DomainDataModule)
    out = Path(given.out)
    if out.suffix != ".npz":
        sys.exit(f"fedlit: out must end in .npz, got '{out}'")
    if not out.parent.is_dir():
        sys.exit(f"fedlit: out names the folder '{out.parent}', which is not there: make it first")
    if given.batch_size < 1:
        sys.exit(f"fedlit: batch_size must be at least 1, got {given.batch_size}")
    if data.task != "classification":
        sys.exit(f"fedlit: features are for classification, but {type(data).__name__} has numbers to predict")
    names = _names(data, given.clients)
    for name in names:
        data.labels(name)  # raises for what cannot be read, before there is a folder
    parts = Path(f"{out}.parts")
    parts.mkdir(exist_ok=True)
    try:
        with FileLock(parts / "lock", timeout=0):
            _Features(data, network.to(given.device), names, given.batch_size, out, parts).write()
    except Timeout:
        sys.exit(f"fedlit: another process writes '{out}': give another --out, or wait for it")


def _data_alone(args: Sequence[str]) -> Iterator[str]:
    """The words, with configurations cut down to their data: they may be those of runs."""
    previous = ""
    for arg in args:
        key, is_assigned, value = arg.partition("=")
        if previous in ("--config", "-c"):
            yield _data_of(arg)
        elif key in ("--config", "-c") and is_assigned:
            yield f"{key}={_data_of(value)}"
        else:
            yield arg
        previous = arg


def _data_of(path: str) -> str:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        sys.exit(f"fedlit: config '{path}' cannot be read: {' '.join(str(error).split())}")
    if not isinstance(content, dict) or "data" not in content:
        sys.exit(f"fedlit: config '{path}' has no data: give one such as data/office_caltech_images")
    return yaml.safe_dump({"data": content["data"]})


def _network(given: Namespace) -> nn.Module:
    name, weights = given.extractor, given.weights
    if not (name[:1].isupper() or "." in name.removeprefix(TIMM)) or name.startswith(TIMM):
        if given.extractor_args:
            sys.exit(f"fedlit: extractor_args are for classes, and {name!r} is a network by its name: leave them out")
        if weights is None and name != LITE0:
            sys.exit(
                f"fedlit: weights must name a file with the state dict of {name!r}: without one its weights would be "
                "random, and nothing is downloaded"
            )
        network: nn.Module = Backbone(name, weights, freeze=True)
    else:
        single = ArgumentParser(prog=PROG)
        single.add_subclass_arguments(nn.Module, "extractor", required=True)
        made = single.parse_object({"extractor": {"class_path": name, "init_args": given.extractor_args}})
        network = single.instantiate(made).extractor
        if weights is not None:
            try:
                network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
            except Exception as error:  # at bytes of another format, torch raises errors of any kind
                raise ValueError(
                    f"weights '{weights}' is not a state dict of {type(network).__name__}: {error}"
                ) from error
    return network.eval().requires_grad_(False)


def _read_as_trained(arguments: Namespace | dict[str, Any], network: nn.Module) -> None:
    """Set arguments of the data that were not given to what a pretrained network was trained on, and print it."""
    found = (getattr(part, "preprocessing", None) for part in network.modules())
    trained = next(({**each} for each in found if isinstance(each, Mapping) and each), {})
    size = arguments.get("image_size")
    if size is not None and {"image_size", "resized_side"} <= trained.keys():  # the same share is cut off
        whole, side = trained.pop("resized_side"), trained["image_size"]
        if 7 * whole != 8 * side:  # the share by default, which the data round
            trained["resized_side"] = size * whole // side
    left_out = ("mean", "std") if arguments.get("normalise") == "client" else ()  # whose places it takes
    trained = {name: value for name, value in trained.items() if name in arguments and name not in left_out}
    differ = {name: value for name, value in trained.items() if arguments[name] not in (None, value)}
    for name in trained.keys() - differ.keys():
        arguments[name] = trained[name]
    taken = [f"{name}={value}" for name, value in trained.items() if name not in differ]
    given = [f"{name}={arguments[name]}, not {value}" for name, value in differ.items()]
    if taken:
        print(f"images as the network was trained on: {', '.join(taken)}", flush=True)
    if given:
        print(f"images as data gives them: {'; '.join(given)}, which the network was trained on", flush=True)


def _names(data: DomainDataModule, wanted: list[str] | None) -> list[str]:
    roster = [client.name for client in data.check_roster()]
    unknown = [name for name in wanted or () if name not in roster]
    if unknown:
        sys.exit(f"fedlit: clients {unknown} are not among the clients of the data, {roster}")
    names = [name for name in roster if (data.is_here(name) if wanted is None else name in wanted)]
    if not names:
        sys.exit(f"fedlit: clients must name at least one of {roster}")
    return names


@dataclass
class _Features:
    """Writes features, a chunk at a time."""

    data: DomainDataModule
    network: nn.Module  # in evaluation mode, on its device
    names: list[str]  # of the clients, in order
    batch_size: int  # samples that go through the network at a time
    out: Path
    parts: Path  # folder of the chunks, which lie there until the file is whole

    def write(self) -> None:
        sets = {name: self.data.all_samples(name) for name in self.names}
        labels = {name: self.data.labels(name).numpy().astype(np.int64) for name in self.names}
        mark = self._mark(sets, labels)
        if self.out.exists():
            shutil.rmtree(self.parts, ignore_errors=True)
            if str(read_npz(self.out).get(_MARK)) == mark["all"]:
                print(f"'{self.out}' has these features already", flush=True)
                return
            sys.exit(
                f"fedlit: out '{self.out}' is there, with features of other data or another network, or decoded by "
                "another version of fedlit: give another --out, or remove it"
            )
        self._begin(mark)
        arrays: dict[str, npt.NDArray[Any]] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, disable=not sys.stdout.isatty()) as progress:
            for name in self.names:
                arrays[f"{name}_x"] = self._of(name, sets[name], progress)
                arrays[f"{name}_y"] = labels[name]
        arrays |= {"classes": np.array(self.data.class_names()), _MARK: np.array(mark["all"])}
        whole = self.parts / "whole.npz"
        with whole.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # its own flag is no name of ours
        os.replace(whole, self.out)
        shutil.rmtree(self.parts)
        width = arrays[f"{self.names[0]}_x"].shape[1]
        total = sum(map(len, labels.values()))
        whole_roster = len(self.names) == len(self.data.check_roster())
        where = str(self.out) if whole_roster else f"{self.out.parent}, a folder of such files,"
        print(
            f"features: {self.out}, {total} samples of {self.names}, {width} numbers each. Train on them with --data "
            f"FeatureDomains --data.path {where} --data.target NAME --config recipes/features",
            flush=True,
        )

    def _of(self, name: str, samples: Dataset[Any], progress: Progress) -> npt.NDArray[np.float32]:
        """Features of one client, shape (n, d): of chunks that are there, and of those that are not."""
        number = len(samples)  # type: ignore[arg-type]
        size = -(-_CHUNK // self.batch_size) * self.batch_size  # so that batches do not depend on where a run stopped
        task = progress.add_task(name, total=number)
        chunks: list[npt.NDArray[np.float32]] = []
        start, found = time.perf_counter(), 0
        for place in range(0, number, size):
            path = self.parts / f"{name}-{place:09d}.npy"
            if path.is_file():
                chunks.append(np.load(path, allow_pickle=False))
                found += len(chunks[-1])
            else:
                chunks.append(self._chunk(name, samples, range(place, min(place + size, number))))
                writing = path.with_suffix(".writing")
                with writing.open("wb") as file:
                    np.save(file, chunks[-1])
                os.replace(writing, path)
            progress.update(task, completed=place + len(chunks[-1]))
        before = f", {found} of them before" if found else ""
        print(f"{name}: {number} samples in {time.perf_counter() - start:.1f} s{before}", flush=True)
        return np.concatenate(chunks)

    @torch.inference_mode()
    def _chunk(self, name: str, samples: Dataset[Any], positions: range) -> npt.NDArray[np.float32]:
        device = next(self.network.parameters(), torch.empty(0)).device
        found = []
        for x in self._batches(samples, positions):
            try:
                y = self.network(x.to(device))
            except (AssertionError, RuntimeError, ValueError) as error:
                shape, words = tuple(x.shape), " ".join(str(error).split())
                sys.exit(f"fedlit: {type(self.network).__name__} fails at samples of shape {shape}: {words}")
            if not isinstance(y, Tensor) or y.dim() != 2 or len(y) != len(x):
                got = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
                sys.exit(
                    f"fedlit: extractor must give one vector per sample, (n, d), but {type(self.network).__name__} "
                    f"gives {got} for {len(x)}: pool and flatten in its forward"
                )
            if not bool(y.isfinite().all()):
                sys.exit(f"fedlit: features of {name!r} hold NaN or infinity: look at its samples and at the weights")
            found.append(y.float().cpu().numpy())
        return np.concatenate(found)

    def _batches(self, samples: Dataset[Any], positions: range) -> Iterator[Tensor]:
        if isinstance(samples, BatchedDataset):
            for part in torch.split(torch.tensor(positions), self.batch_size):
                yield samples.batch(part)[0]
            return
        chosen, generator = Subset(samples, positions), torch.Generator()
        for x, _ in DataLoader(chosen, self.batch_size, num_workers=self.data.num_workers, generator=generator):
            yield x

    def _mark(self, sets: dict[str, Dataset[Any]], labels: dict[str, npt.NDArray[np.int64]]) -> dict[str, str]:
        """Fingerprints of what features depend on."""
        state = [
            (key, _bytes(each) if isinstance(each, Tensor) else fingerprint(each))
            for key, each in self.network.state_dict().items()
        ]
        mark = {"network": _hash(_ADDRESS.sub("", repr(self.network)), *state), "batch_size": str(self.batch_size)}
        for name in self.names:
            first = next(self._batches(sets[name], range(1)))
            mark[f"data of {name}"] = _hash(*self.data.identity(name), _bytes(first), labels[name].tobytes())
        mark["classes"] = json.dumps(self.data.class_names())
        return mark | {"all": _hash(json.dumps(mark, sort_keys=True))}

    def _begin(self, mark: dict[str, str]) -> None:
        """Note what the chunks are made of, or refuse those of something else."""
        path = self.parts / "made_of.json"
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            differ = [key for key in mark | before if mark.get(key) != before.get(key) and key != "all"]
            if differ:
                sys.exit(
                    f"fedlit: '{self.parts}' has features that were begun with another {' and '.join(differ)}: remove "
                    "that folder to start afresh, or give another --out"
                )
            return
        write_whole(path, json.dumps(mark, indent=1))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _hash(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()
