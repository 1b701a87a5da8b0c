"""Requests and replies of a star: a head in JSON, in one piece, then a body of numbers; nothing is unpickled."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedlit.federation.errors import printable
from fedlit.federation.transport import SHORT, Outgoing, check_sizes
from fedlit.privacy import DecodeError
from fedlit.remote.carrier import PIECE_BYTES, Pieces

_log = logging.getLogger("fedlit.remote")

_T = TypeVar("_T")

PROTOCOL = 3
"""Version of the messages between star ends; raised where older ones would not understand."""

LONG = 64 << 20
"""Bytes from which on the progress of messages is logged, and they come one after the other."""

_HEAD_BYTES = 1 << 20
"""Maximum size of a head."""

_PROGRESS = 10.0
"""Seconds between two lines of progress."""


def make_head(**entries: Any) -> bytes:
    """The first piece of a request or reply."""
    return json.dumps(entries).encode()


def read_head(pieces: Pieces) -> dict[str, Any]:
    """The head of a request or reply."""
    piece = next(pieces, b"")
    if len(piece) > _HEAD_BYTES:
        raise DecodeError(f"a head of {len(piece)} bytes was sent, which must have at most {_HEAD_BYTES}")
    try:
        head = json.loads(piece)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"what should be a head in JSON is none: {str(error)[:100]}") from None
    if not isinstance(head, dict):
        raise DecodeError(f"a head must be a JSON object, got {str(head)[:100]}")
    return head


def entry(head: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    """An entry of a head that was received; a `DecodeError` if it has another type, or is a list of more than ints."""
    value = head.get(key)
    if type(value) is not kind or (isinstance(value, list) and not all(type(each) is int for each in value)):
        what = "a list of whole numbers" if kind is list else f"of type {kind.__name__}"
        raise DecodeError(f"{key} in a head must be {what}, got {str(value)[:200]}")
    return value


def cut(messages: Sequence[Outgoing]) -> Iterator[bytes]:
    """Messages of bytes, one after the other, in pieces."""
    for message in [part for each in messages for part in (each if isinstance(each, list) else [each])]:
        view: memoryview = message.numpy().data
        for start in range(0, len(view), PIECE_BYTES):
            yield bytes(view[start : start + PIECE_BYTES])


def read_body(pieces: Pieces, sizes: Sequence[int], doing: str) -> list[Tensor]:
    """Messages of these numbers of bytes; a `DecodeError` if they exceed the memory, or the body has another length."""
    check_sizes(dict(enumerate(sizes)), doing)
    messages = []
    rest = b""
    progress = _Progress(sum(sizes), doing)
    for size in sizes:
        message = torch.empty(size, dtype=torch.uint8)
        view, filled = message.numpy().data, 0
        while filled < size:
            piece = rest or next(pieces, b"")
            if not piece:
                raise DecodeError(f"{filled} bytes of a message of {size} came, and then no more, in {doing}")
            taken = min(len(piece), size - filled)
            view[filled : filled + taken] = piece[:taken]
            filled, rest = filled + taken, piece[taken:]
            progress.add(taken)
        messages.append(message)
    if rest or next(pieces, b""):
        raise DecodeError(f"more than the {sum(sizes)} bytes that are due came in {doing}")
    return messages


def check_enclosed(size: int, doing: str) -> None:
    """Raise a `DecodeError` unless so many bytes may travel with the frame of a meeting."""
    if not 0 <= size <= SHORT:
        raise DecodeError(f"{size} bytes are enclosed in {doing}, where 0 to {SHORT} may be")


class _Progress:
    """Logs every few seconds how far a long message is."""

    def __init__(self, size: int, doing: str) -> None:
        self._size, self._doing, self._done = size, doing, 0
        self._next = time.monotonic() + _PROGRESS

    def add(self, size: int) -> None:
        self._done += size
        if self._size >= LONG and time.monotonic() >= self._next:
            self._next = time.monotonic() + _PROGRESS
            share = 100 * self._done // self._size
            _log.info("%s: %d of %d MB have come (%d %%)", self._doing, self._done >> 20, self._size >> 20, share)


def bytes_of(frame: Tensor) -> Tensor:
    """A frame of a meeting as uint8, shape (bytes,)."""
    return frame.contiguous().reshape(-1).view(torch.uint8)


def frames(table: Tensor, frame: Tensor) -> list[Tensor]:
    """Frames in a meeting's table, uint8 of shape (ranks, bytes), shaped and typed like this process's ``frame``."""
    return [row.clone().view(frame.dtype).reshape(frame.shape) for row in table]


def one_line(text: object) -> str:
    """A text, such as a site's, on one line of a log, in bounds and without control characters."""
    return printable(str(text)[:500])
