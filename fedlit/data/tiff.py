"""Grey values of TIFF files that Pillow does not know, such as floats of 64 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedlit.data.samples import check_data

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_OFFSETS, _ORIENTATION, _SAMPLES, _COUNTS, _SAMPLE_FORMAT = 273, 274, 277, 279, 339
_TYPES = {1: "u", 2: "i", 3: "f"}
"""Of NumPy, by sample format."""


def read_tiff(path: Path) -> tuple[npt.NDArray[Any], bool, int] | None:
    """Return values, whether white is 0, and the orientation, of a file without compression; ``None`` of no TIFF."""
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    with path.open("rb") as content:
        head = content.read(8)
        if head[:4] not in (b"II*\0", b"MM\0*"):
            return None
        tags: Any = ImageFileDirectory_v2(head)
        content.seek(tags.next)
        tags.load(content)
        (bits, *_), (kind, *_) = (np.atleast_1d(tags.get(tag, 1)) for tag in (_BITS, _SAMPLE_FORMAT))
        form = f"{_TYPES.get(kind, '?')}{bits}, compression {tags.get(_COMPRESSION, 1)}"
        shown = f"{tags.get(_SAMPLES, 1)} channels of {form}{' and further pages' if tags.next else ''}"
        is_plain = tags.get(_SAMPLES, 1) == tags.get(_COMPRESSION, 1) == 1 and not tags.next
        fits = is_plain and kind in _TYPES and bits in (8, 16, 32, 64) and _OFFSETS in tags
        rule = "a TIFF that Pillow reads, or one of grey values without compression"
        check_data(fits, str(path), rule, shown, "save it as such, or with 16 bits or floats of 32 bits")
        parts = []
        for offset, count in zip(tags[_OFFSETS], tags[_COUNTS], strict=True):
            content.seek(offset)
            parts.append(content.read(count))
    dtype = np.dtype(f"{'<' if head[:1] == b'I' else '>'}{_TYPES[kind]}{bits // 8}")
    size = tags[_HEIGHT] * tags[_WIDTH] * dtype.itemsize
    stored = b"".join(parts)
    check_data(len(stored) >= size, str(path), "a whole file", f"{len(stored)} of {size} bytes", "mend or remove it")
    values = np.frombuffer(stored[:size], dtype).reshape(tags[_HEIGHT], tags[_WIDTH])
    return values, tags.get(_PHOTOMETRIC, 1) == 0, tags.get(_ORIENTATION, 1)
