"""Images of DICOM files, through pydicom, which is the extra ``dicom``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedlit.data.intensities import NEEDS_RANGE, Reading, as_float32
from fedlit.data.samples import check_data, refuse_data

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIX = ".dcm"
"""Suffix of DICOM files, in lower case."""

_END = b"\xfe\xff\xdd\xe0\0\0\0\0"
"""Of compressed pixels: the delimiter of a sequence."""


def read_dicom(path: Path, reading: Reading) -> Image:
    """Read the image of a file: colours of 8 bits, or grey values in their unit (mode F), rescaled.

    White is the largest value, also where the file has it the other way round (MONOCHROME1): values are reflected about
    the level of a window that is given, else within the range of the bits that are stored.
    """
    _need_pydicom(path)
    from PIL import Image
    from pydicom import dcmread
    from pydicom.pixels.processing import apply_modality_lut
    from pydicom.pixels.utils import pixel_array

    file = dcmread(path)
    _check(file, path, reading)
    stored = pixel_array(file)
    if file.SamplesPerPixel == 3:
        return Image.fromarray(stored)
    values: npt.NDArray[np.float64] = np.asarray(apply_modality_lut(stored, file), dtype=np.float64)
    is_inverse = file.PhotometricInterpretation == "MONOCHROME1"
    if reading.window == "file":
        shown = _by_its_window(values, file, path)
        values = 1 - shown if is_inverse else shown
    elif is_inverse and reading.window is not None:
        values = 2 * float(reading.window[0]) - values
    elif is_inverse:
        low = -(1 << (file.BitsStored - 1)) if file.PixelRepresentation else 0
        limits = np.array([low, low + (1 << file.BitsStored) - 1], dtype=stored.dtype)
        ends = apply_modality_lut(limits, file)
        values = float(ends[0]) + float(ends[1]) - values
    return Image.fromarray(as_float32(values, path))


def read_header(path: Path, reading: Reading) -> tuple[str, bool]:
    """Return how values are stored, and whether they are colours, from the header; errors as of `read_dicom`."""
    _need_pydicom(path)
    from pydicom import dcmread

    with path.open("rb") as content:
        file = dcmread(content, stop_before_pixels=True)
        start = content.tell()
        size = content.seek(0, 2)
        content.seek(max(0, size - len(_END)))
        ends = content.read() == _END
    _check(file, path, reading)
    is_colour = file.SamplesPerPixel == 3
    number = file.Rows * file.Columns * file.SamplesPerPixel * file.BitsAllocated / 8
    # of a deflated file nothing is left at the start, so that it is read
    if not (ends if file.file_meta.TransferSyntaxUID.is_compressed else size - start >= number):
        read_dicom(path, reading)
    if is_colour:
        return "8 bits", True
    in_hu = file.get("Modality") == "CT" or file.get("RescaleType") == "HU"
    return "DICOM in HU" if in_hu else f"DICOM of {file.get('BitsStored')} bits", False


def _need_pydicom(path: Path) -> None:
    try:
        import pydicom  # noqa: F401
    except ImportError as error:
        raise ImportError(f"reading {str(path)!r} needs: pip install 'fedlit[dicom]'") from error


def _check(file: Any, path: Path, reading: Reading) -> None:
    """Refuse what is no single image, or has values that nothing here can read."""
    from PIL import Image
    from pydicom.pixels.decoders.base import get_decoder

    name = str(path)
    check_data("Rows" in file and "SamplesPerPixel" in file, name, "a DICOM file with an image", "none", "remove it")
    frames = int(file.get("NumberOfFrames") or 1)
    check_data(frames == 1, name, "one image", f"{frames} frames", "save one as a file, or a file for each")
    most = 2 * (Image.MAX_IMAGE_PIXELS or math.inf)  # as Pillow does with other files
    pixels = file.Rows * file.Columns
    check_data(pixels <= most, name, f"an image of up to {most} pixels", f"{pixels}", "save it smaller")
    kind, bits = file.PhotometricInterpretation, file.BitsAllocated
    is_grey = kind in ("MONOCHROME1", "MONOCHROME2")
    rule, way_out = "grey values (MONOCHROME1 or 2), or colours of 8 bits", "save it as PNG"
    is_known = is_grey or (file.SamplesPerPixel == 3 and bits == 8)
    check_data(is_known, name, rule, f"{kind} of {bits} bits", way_out)
    syntax = file.file_meta.TransferSyntaxUID
    if syntax.is_encapsulated:
        decoder = get_decoder(syntax)
        way_out = f"pip install one of: {'; '.join(decoder.missing_dependencies)}; or save it without compression"
        rule = f"compressed in a way that is installed (pydicom's plugins for {syntax.name})"
        check_data(decoder.is_available, name, rule, syntax.name, way_out)
    if is_grey and not reading.stored:
        refuse_data(name, "an image of 8 or 16 unsigned bits", "DICOM, whose range differs by device", NEEDS_RANGE)
    if is_grey and reading.window == "file":
        _window_of(file, path)


def _window_of(file: Any, path: Path) -> tuple[float, float]:
    """The first window that a file has: centre and width."""
    values = [file.get(name) for name in ("WindowCenter", "WindowWidth")]
    centre, width = (math.nan if each is None else float(np.atleast_1d(each)[0]) for each in values)
    rule, way_out = "with a window of its own (Window Center, Window Width), for window='file'", "give [level, width]"
    check_data(math.isfinite(centre) and width > 0, str(path), rule, f"{centre}, {width}", way_out)
    return centre, width


def _by_its_window(values: npt.NDArray[np.float64], file: Any, path: Path) -> npt.NDArray[np.float64]:
    """Values in [0, 1], by the formula that the file names (DICOM PS3.3, C.11.2.1.2 and C.11.2.1.3)."""
    centre, width = _window_of(file, path)
    function = file.get("VOILUTFunction") or "LINEAR"
    if function == "SIGMOID":
        sigmoid: npt.NDArray[np.float64] = 1 / (1 + np.exp(-4 * (values - centre) / width))
        return sigmoid
    if function == "LINEAR":
        centre, width = centre - 0.5, max(width - 1, 1e-6)
    return ((values - centre) / width + 0.5).clip(0, 1)
