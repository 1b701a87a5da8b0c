"""Weights and optimiser states of local clients in files, so that memory holds those of the client whose turn it is."""

from __future__ import annotations

import errno
import mmap
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlit.checks import check, refuse

_PAGE = mmap.ALLOCATIONGRANULARITY
_LEAST = 16 << 20
"""Bytes by which files are extended, so that small clients share a mapping: a process may have some 65,000."""

_ALIGNED = 64


@dataclass(frozen=True)
class _Extent:
    """Pages of a file that are one client's."""

    memory: mmap.mmap
    start: int
    size: int


class DiskOffload:
    """Keep tensors of local clients in mapped files, in place: their pages leave memory when they are released.

    The files have no names, and their space is free again when the run's process ends. Blocks are allocated before
    anything is written, as a process that writes to a mapping without space is killed.

    Args:
        folder: On a disk of this machine; made if it is not there.

    Raises:
        ValueError: If no file can be written in it, or the system is not Linux.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        check(sys.platform == "linux", "state_dir", "left out on this system, as it needs Linux", str(folder))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._folder).close()
        except OSError as error:
            way_out = f"give a folder on a local disk ({error.strerror})"
            refuse("state_dir", "a folder that can be written in", str(folder), way_out)
        self._free: _Extent | None = None  # what is left of the last mapping
        self._extents: dict[str, list[_Extent]] = {}
        self._slots: dict[str, dict[Hashable, Tensor]] = {}
        self._full = False

    def __reduce__(self) -> tuple[type[DiskOffload], tuple[str]]:
        """Copies and pickles of a module have their tensors in memory, and files of their own."""
        return DiskOffload, (str(self._folder),)

    def keep_weights_(self, client: str, network: nn.Module) -> None:
        """Move parameters and buffers of a client's network into files, as far as they are not there.

        Raises:
            OSError: If there is no space; the network is as it was.
        """
        tensors = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
        users = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
        alone = [(key, each) for key, each in tensors.items() if users[each.untyped_storage().data_ptr()] == 1]
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
                warnings.warn(f"{error}: states of optimisers stay in memory from now on", stacklevel=2)
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
        slots = self._slots.setdefault(client, {})
        moved = [(key, tensor) for key, tensor in tensors if _is_movable(tensor) and not _is_in(slots.get(key), tensor)]
        new = [(key, tensor) for key, tensor in moved if not _fits(slots.get(key), tensor)]
        sizes = [-(-tensor.untyped_storage().nbytes() // _ALIGNED) * _ALIGNED for _, tensor in new]
        if new:
            extent = self._allocate(sum(sizes), client)
            self._extents.setdefault(client, []).append(extent)
            place = extent.start
            for (key, tensor), size in zip(new, sizes, strict=True):
                slots[key] = torch.frombuffer(extent.memory, dtype=tensor.dtype, count=tensor.numel(), offset=place)
                place += size
        for key, tensor in moved:
            mapped = slots[key].as_strided(tensor.size(), tensor.stride())
            mapped.copy_(tensor.detach())
            tensor.data = mapped

    def _allocate(self, size: int, client: str) -> _Extent:
        size = -(-size // _PAGE) * _PAGE
        if self._free is None or self._free.size < size:
            length = max(size, _LEAST)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, length)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                        raise
                    text = f"state_dir {str(self._folder)!r} has no space for {length >> 20} MiB of client {client!r}"
                    raise OSError(error.errno, text) from error
                self._free = _Extent(mmap.mmap(file.fileno(), length), 0, length)
        extent = _Extent(self._free.memory, self._free.start, size)
        self._free = _Extent(self._free.memory, self._free.start + size, self._free.size - size)
        return extent


def _is_movable(tensor: Tensor) -> bool:
    """Whether a tensor has its memory to itself: it is no view, and has no views beside it that would lose it."""
    return bool(
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )


def _is_in(slot: Tensor | None, tensor: Tensor) -> bool:
    return slot is not None and slot.data_ptr() == tensor.data_ptr()


def _fits(slot: Tensor | None, tensor: Tensor) -> bool:
    return slot is not None and slot.dtype == tensor.dtype and slot.numel() == tensor.numel()
