"""Weights and optimiser states of local clients in files, so that memory holds those of the client whose turn it is."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import tempfile
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fedlit.checks import check, refuse
from fedlit.models.copies import is_whole

_PAGE = mmap.ALLOCATIONGRANULARITY
_LEAST = 16 << 20
"""Bytes by which files are extended, so that small clients share a mapping: a process may have some 65,000."""

_ALIGNED = 64


@dataclass(frozen=True)
class _Extent:
    """Pages of a file that are one client's."""

    memory: mmap.mmap
    address: int  # of the first byte of the mapping
    start: int
    size: int

    def has(self, tensor: Tensor) -> bool:
        return self.start <= tensor.data_ptr() - self.address < self.start + self.size


@dataclass
class _Slot:
    """Bytes of an extent for a tensor, which another may have once no tensor has them."""

    extent: _Extent
    start: int
    size: int
    user: Callable[[], memoryview | None]

    def tensor(self, like: Tensor) -> Tensor:
        """Return a tensor of these bytes, in the layout of another."""
        view = memoryview(self.extent.memory)[self.start : self.start + self.size]
        self.user = weakref.ref(view)  # the storage of tensors has the view until the last of them goes
        return torch.frombuffer(view, dtype=like.dtype, count=like.numel()).as_strided(like.size(), like.stride())


_MORE = ": give a folder on a disk with more"


class DiskOffload:
    """Keep tensors of local clients in mapped files, in place: their pages leave memory when they are released.

    The files have no names, and their space is free again when the run's process ends; processes that it forks share
    them, and so the weights. Blocks are allocated before anything is written, as a process that writes to a mapping
    without space is killed.

    Args:
        folder: On a disk of this machine; made if it is not there.

    Attributes:
        folder: As given, with the home folder in the place of ``~``.

    Raises:
        ValueError: If it is no path, no file can be written in it, or the system is not Linux.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        is_path = isinstance(folder, str | os.PathLike) and bool(os.fspath(folder))
        check(is_path, "state_dir", "the path of a folder", folder, "give '.' for the current one")
        self.folder = Path(folder).expanduser()
        check(sys.platform == "linux", "state_dir", "left out on this system, as it needs Linux", str(folder))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            way_out = f"give a folder on a local disk ({error.strerror})"
            refuse("state_dir", "a folder that can be written in", str(folder), way_out)
        if _is_in_memory(self.folder):
            warnings.warn(
                f"state_dir {str(self.folder)!r} is on a file system in memory, where files save none: give a folder "
                "on a local disk",
                stacklevel=2,
            )
        self._free: _Extent | None = None  # what is left of the last mapping
        self._extents: dict[str, list[_Extent]] = {}
        self._slots: dict[str, dict[Hashable, list[_Slot]]] = {}
        self._full = False

    def __reduce__(self) -> tuple[type[DiskOffload], tuple[str]]:
        """Copies and pickles of a module have their tensors in memory, and files of their own."""
        return DiskOffload, (str(self.folder),)

    def keep_weights_(self, client: str, network: nn.Module) -> None:
        """Move parameters and buffers of a client's network into files, as far as they are not there.

        Raises:
            OSError: If there is no space; the network is as it was.
        """
        tensors = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
        found = [each for module in network.modules() for each in tree_leaves(vars(module)) if isinstance(each, Tensor)]
        beside = {each.untyped_storage().data_ptr() for each in found if id(each) not in tensors and _is_plain(each)}
        alone = [
            (key, each)
            for key, each in tensors.items()
            if _is_plain(each) and each.untyped_storage().data_ptr() not in beside
        ]
        self._keep_(client, alone)
        self.release(client)

    def keep_states_(self, optimizer: Optimizer) -> None:
        """Move what an optimiser remembers of its clients' parameters into files; without space, warn and leave it."""
        for group in optimizer.param_groups if not self._full else ():
            states = [
                ((id(param), name), value)
                for param in group["params"]
                for name, value in optimizer.state.get(param, {}).items()
                if isinstance(value, Tensor) and value.dim()
            ]
            try:
                self._keep_(group["client"], states)
            except OSError as error:
                self._full = True
                what = str(error.strerror).removesuffix(_MORE)
                where = "" if str(self.folder) in what else f"state_dir {str(self.folder)!r}: "
                warnings.warn(f"{where}{what}: states of optimisers stay in memory from now on", stacklevel=2)
                return

    def release(self, client: str) -> None:
        """Let a client's pages leave memory; they are read again when something uses them."""
        for extent in self._extents.get(client, ()):
            extent.memory.madvise(mmap.MADV_DONTNEED, extent.start, extent.size)

    def release_all(self) -> None:
        """Let the pages of all clients leave memory."""
        for client in self._extents:
            self.release(client)

    def _keep_(self, client: str, tensors: Iterable[tuple[Hashable, Tensor]]) -> None:
        """Move tensors, but for those that share memory, and would not any more."""
        slots, extents = self._slots.setdefault(client, {}), self._extents.setdefault(client, [])
        plain = [(key, each) for key, each in tensors if _is_plain(each)]
        users = Counter(each.untyped_storage().data_ptr() for _, each in plain)
        moved = [
            (key, each)
            for key, each in plain
            if is_whole(each)
            and users[each.untyped_storage().data_ptr()] == 1
            and not any(extent.has(each) for extent in extents)
        ]
        taken: dict[Hashable, _Slot] = {}
        for key, each in moved:
            free = (slot for slot in slots.get(key, ()) if slot.size == _bytes(each) and slot.user() is None)
            if slot := next(free, None):
                taken[key] = slot
        new = [(key, _bytes(each)) for key, each in moved if key not in taken]
        if new:
            padded = [-(-size // _ALIGNED) * _ALIGNED for _, size in new]
            extent = self._allocate(sum(padded), client)
            extents.append(extent)
            for (key, size), start in zip(new, accumulate(padded, initial=extent.start), strict=False):
                taken[key] = _Slot(extent, start, size, _nobody)
                slots.setdefault(key, []).append(taken[key])
        for key, tensor in moved:
            tensor.data = taken[key].tensor(tensor).copy_(tensor.detach())
        if new:
            _give_back()

    def _allocate(self, size: int, client: str) -> _Extent:
        size = -(-size // _PAGE) * _PAGE
        if self._free is None or self._free.size < size:
            length = max(size, _LEAST)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, length)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                        raise
                    text = f"state_dir {str(self.folder)!r} has no space for {length >> 20} MiB of client {client!r}"
                    raise OSError(error.errno, f"{text}{_MORE}", str(self.folder)) from error
                memory = mmap.mmap(file.fileno(), length)
            self._free = _Extent(memory, torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), 0, length)
        extent = replace(self._free, size=size)
        self._free = replace(self._free, start=self._free.start + size, size=self._free.size - size)
        return extent


def _is_in_memory(folder: Path) -> bool:
    """Whether a folder's file system has its files in memory, as the system's list of mounts says."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return False
    kinds = {Path(place): kind for _, place, kind, *_ in mounts}
    place = folder.resolve()
    return next((kinds[each] for each in (place, *place.parents) if each in kinds), "") in ("tmpfs", "ramfs")


def _give_back() -> None:
    """Give memory that is free again to the system: what lies between small pieces in use would stay, by client."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def _nobody() -> None:
    """Return the user of a slot that has had none."""


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
