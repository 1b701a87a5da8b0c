"""A look at all image files of a client before anything is trained: by their headers, and whether their ends are there.

A file whose end is not where its format has it is decoded, and only those are: reading headers takes less than 1 ms
a file (of DICOM a few). What is damaged in the middle is found when it is decoded.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedlit.checks import check, check_one_of
from fedlit.data import dicom
from fedlit.data.decoding import check_size, form_of, read_image, read_unidentified, refuse_unreadable
from fedlit.data.intensities import Reading
from fedlit.data.samples import DatasetLayoutError, check_data, refuse_data
from fedlit.data.tables.values import some

_NAMED = 20
"""Files that are named in one error, of those with the same fault."""

_OFFSETS, _COUNTS = ((273, 324), (279, 325))
"""Tags of TIFF, of strips and of tiles."""


class Header(NamedTuple):
    """What is known of a file before it is decoded.

    Attributes:
        path: Of the file.
        depth: How the values that are read are stored, in words.
        colours: Whether it has several channels.
    """

    path: Path
    depth: str
    colours: bool


def check_images(client: str, paths: Sequence[Path], reading: Reading, resized_side: int) -> list[Header]:
    """Return the headers of a client's files; refuse those that cannot be read, by name."""
    headers, failures = [], []
    for path in paths:
        status = path.stat()
        try:
            headers.append(_header(path, status.st_size, status.st_mtime_ns, reading, resized_side))
        except DatasetLayoutError as error:
            failures.append((path, str(error)))
    refuse_images(client, failures)
    return headers


def refuse_images(client: str, failures: Sequence[tuple[Path, str]]) -> None:
    """Raise a `DatasetLayoutError` with what is wrong with each of a client's files, if anything is."""
    if not failures:
        return
    by_reason: dict[str, list[str]] = {}
    for path, text in failures:
        by_reason.setdefault(text.removeprefix(str(path)), []).append(str(path))
    reasons = [f"{_first(paths, ', ')}{reason}" for reason, paths in by_reason.items()]
    shown = f"{len(failures)} that cannot:\n- " + _first(reasons, "\n- ")
    refuse_data(f"images of client {client!r}", "files that can be read", shown)


def _first(texts: Sequence[str], between: str) -> str:
    more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return between.join(texts[:_NAMED]) + more


def check_published(published: Mapping[str, int], domains: Sequence[str]) -> None:
    """Refuse published numbers of domains that there are none of, which would check nothing."""
    rule = "numbers of images by domain"
    fits = isinstance(published, Mapping) and all(isinstance(number, int) for number in published.values())
    check(fits, "published", rule, published, error=TypeError)
    for name in published:
        check_one_of("published", name, tuple(dict.fromkeys(domains)))


def check_number(domain: str, number: int, published: Mapping[str, int]) -> None:
    """Refuse a domain with another number of images than the published one, where that is given."""
    rule, way_out = f"{published.get(domain)}", "get the published archive, or set published=None, as for some classes"
    check_data(published.get(domain, number) == number, f"published (images of {domain!r})", rule, number, way_out)


def checked_colours(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """Check a mean or a deviation of red, green and blue."""
    fits = [0 <= value <= 1 if name == "mean" else value >= 1e-6 for value in values]
    bounds = "from 0 to 1" if name == "mean" else "above 0"
    check(len(values) == 3 and all(fits), name, f"3 numbers {bounds}, for colours in [0, 1]", [*values])
    return tuple(values)


def check_depths(client: str, headers: Sequence[Header], reading: Reading) -> dict[str, Path]:
    """Return bit depths of a client's images, each with its first file.

    Several are refused where values are scaled in one unit, and else warned of.
    """
    found: dict[str, Path] = {}
    for header in headers:
        found.setdefault(header.depth, header.path)
    if len(found) > 1 and reading.window != "file":
        shown = ", ".join(f"{depth} ({path})" for depth, path in found.items())
        way_out = "save them alike, or make each a client of its own"
        rule = "the same, as values are scaled in one unit"
        check_data(not reading.stored, f"bit depths of client {client!r}", rule, shown, way_out)
        warnings.warn(
            f"client {client!r} has images of several bit depths, each scaled by its own range: {shown}. Save them "
            "alike if their values are in one unit",
            stacklevel=2,
        )
    return found


def warn_of_depths(
    by_client: Mapping[str, Sequence[str]], here: Mapping[str, Mapping[str, Path]], reading: Reading
) -> None:
    """Warn if clients' images have other bit depths than others', with files of those ``here``."""
    by_depth: dict[str, list[str]] = {}
    for name, depths in by_client.items():
        by_depth.setdefault(" and ".join(depths), []).append(name)
    if len(by_depth) > 1 and reading.window != "file":
        shown = "; ".join(f"{depth} at {clients}" for depth, clients in by_depth.items())
        paths = [str(path) for depths in here.values() for path in depths.values()]
        files = f" (here {some(paths)})" if paths else ""
        warnings.warn(
            f"clients have images of several bit depths, scaled {'by one window' if reading.stored else 'by range'}: "
            f"{shown}{files}. See whether their values are in one unit: save them alike, or give "
            "normalise='client'",
            stacklevel=2,
        )


def warn_of_window(client: str, path: Path, values: Tensor, reading: Reading) -> None:
    """Warn if a window shows nothing of an image's values."""
    low, high, shown = float(values.min()), float(values.max()), reading.scale(values)
    if isinstance(reading.window, tuple) and low < high and bool(shown.min() == shown.max()):
        warnings.warn(
            f"window={[*reading.window]} shows nothing of {path} of client {client!r}, whose values go from {low:g} to "
            f"{high:g}: all of it becomes {'white' if float(shown.max()) else 'black'}. Give level and width in their "
            "unit",
            stacklevel=2,
        )


@cache  # for the runs of a sweep; errors are not kept
def _header(path: Path, size: int, time: int, reading: Reading, resized_side: int) -> Header:
    """The header of a file of a size, changed at a time."""
    from PIL import Image, UnidentifiedImageError

    try:
        if path.suffix.lower() == dicom.SUFFIX:
            return Header(path, *dicom.read_header(path, reading))
        try:
            with Image.open(path) as file:
                form = form_of(file, path, reading)
                check_size(file.size, resized_side, path)
                is_whole = _is_whole(file, path, size)
            if not is_whole:
                read_image(path, reading)
        except UnidentifiedImageError as error:
            form, image = read_unidentified(path, reading, error)
            check_size(image.size, resized_side, path)
        # of which the high 8 bits are read, whatever grey values have
        depth = "8 bits" if form.colours and reading.stored else form.depth
        return Header(path, depth, form.colours)
    except (DatasetLayoutError, ImportError):
        raise
    except Exception as error:  # at bytes of another format, Pillow raises errors of any kind
        refuse_unreadable(path, error)


def _is_whole(file: Any, path: Path, size: int) -> bool:
    """Whether a file open in Pillow has its end, as far as that is seen without decoding."""
    with path.open("rb") as content:
        head = content.read(12)
        content.seek(max(0, size - 64))
        tail = content.read()
    match file.format:
        case "JPEG" | "MPO":
            return tail.rstrip(b"\0\r\n ").endswith(b"\xff\xd9")
        case "PNG":
            return tail[-12:-4] == b"\0\0\0\0IEND"
        case "WEBP":
            return size >= 8 + int.from_bytes(head[4:8], "little")
        case "BMP":
            return size >= int.from_bytes(head[2:6], "little") > 0
        case "TIFF":
            offsets, counts = (next(filter(None, map(file.tag_v2.get, tags)), ()) for tags in (_OFFSETS, _COUNTS))
            return bool(offsets) and size >= max(map(sum, zip(offsets, counts, strict=True)))
    return False
