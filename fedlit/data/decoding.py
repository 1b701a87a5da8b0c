"""Image files in folders, and their pixels: 8-bit colours, by rules that depend on no other images of a client.

`ImageDomains` documents the rules. CMYK is converted by its plain formula, inverted where the file is a JPEG (Adobe's
convention); Lab by its definition. On request grey values are read as they are stored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedlit.data import dicom
from fedlit.data.files import check_names
from fedlit.data.intensities import NEEDS_RANGE, Reading, as_float32
from fedlit.data.samples import DatasetLayoutError, check_data, refuse_data
from fedlit.data.tables.values import some
from fedlit.data.tiff import read_tiff

if TYPE_CHECKING:
    from PIL.Image import Image

Interpolation = Literal["bilinear", "bicubic"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", dicom.SUFFIX)
"""Suffixes of image files, in lower case."""

VERSION = 3
"""Increased whenever some file is decoded to other pixels than before, so that features made earlier are not reused."""

_CLUTTER = ("thumbs.db", "desktop.ini")

_MAX_PIXELS = 1 << 27
"""Largest size of one image after it is resized."""

_OPAQUE = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
_DEEP_GREY = ("I;16", "I;16B", "I;16L", "I;16N")

# tags of TIFF, the last one of EXIF too
_PAGE_TYPE, _BITS, _PHOTOMETRIC, _PLANAR, _SAMPLE_FORMAT, _ORIENTATION = 254, 258, 262, 284, 339, 274

_dark_folders: set[Path] = set()
"""Folders whose dark images of 16 bits have been warned of, so that one warning stands for all of them."""


@dataclass(frozen=True)
class Form:
    """How a file stores values.

    Args:
        bits: Of one value, at least 8.
        type: ``"u"`` of integers without a sign, ``"i"`` with one, ``"f"`` of floats.
        colours: Whether there are several channels, or transparent pixels of 8 bits.
    """

    bits: int
    type: str
    colours: bool

    @property
    def depth(self) -> str:
        """In words."""
        return f"{'floats of ' * (self.type == 'f')}{self.bits} bits{' with a sign' * (self.type == 'i')}"

    @property
    def has_range(self) -> bool:
        """Whether all files of this form have values in one range that is known."""
        return self.type == "u" and self.bits <= 16


READING = Reading()
"""8 bits of red, green and blue."""


def decode(
    path: Path,
    resized_side: int,
    side: int,
    interpolation: Interpolation = "bilinear",
    reading: Reading = READING,
    shape: Callable[[Image], Image] | None = None,
) -> Tensor:
    """Read an image, scale its shorter side to ``resized_side`` and cut out the middle square of ``side`` pixels.

    Or let ``shape`` make such a square of it. Returns red, green and blue, uint8, shape (3, side, side); where
    ``reading`` is of values as they are stored, float32, and of grey values shape (1, side, side). Scaling is
    antialiased.

    Raises:
        DatasetLayoutError: If the file is no image, is damaged or too large, or has values without a known range.
        ImportError: If it is a DICOM file, and pydicom is not installed.
    """
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    image = read_image(path, reading)
    if shape is None:
        check_size(image.size, resized_side, path)
        image = F.resize(image, [resized_side], interpolation=InterpolationMode(interpolation))
        image = F.center_crop(image, [side, side])
    else:
        image = shape(image)
    if image.mode == "F":
        return torch.from_numpy(np.array(image))[None]
    pixels: Tensor = F.pil_to_tensor(image)
    if reading.stored:
        return pixels.float() / (255 if reading.window == "file" else 1)
    return pixels


def check_size(size: tuple[int, int], resized_side: int, path: Path) -> None:
    """Refuse a strip of pixels, which becomes large if its shorter side does."""
    fits = max(size) * resized_side**2 <= min(size) * _MAX_PIXELS
    shown = f"a strip of {size[0]}x{size[1]} pixels"
    check_data(fits, str(path), "an image that is not too narrow", shown, "mend or remove it")


def read_image(path: Path, reading: Reading = READING) -> Image:
    """Read an image as 8-bit red, green and blue, upright and without transparency; errors as of `decode`.

    Where ``reading`` is of stored values, grey ones are read as such, in mode F.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        if path.suffix.lower() == dicom.SUFFIX:
            return dicom.read_dicom(path, reading)
        try:
            # by an open file: given its name, Pillow maps grey TIFFs to memory, and scrambles those that it turns
            with path.open("rb") as content, Image.open(content) as file:
                if file.format == "PNG":  # whose checksums Pillow does not look at when it decodes
                    content.seek(0)
                    Image.open(content).verify()
                    content.seek(0)
                form = form_of(file, path, reading)
                file.load()
                return _converted(_upright(file, path), form, path, file, reading)
        except UnidentifiedImageError as error:
            return read_unidentified(path, reading, error)[1]
    except (DatasetLayoutError, ImportError):
        raise
    except Exception as error:  # at bytes of another format, Pillow raises errors of any kind
        refuse_unreadable(path, error)


def refuse_unreadable(path: Path, error: Exception) -> NoReturn:
    """Refuse a file at which a library raised an error."""
    from PIL import UnidentifiedImageError

    # whose text has the path in it
    is_unknown = isinstance(error, UnidentifiedImageError)
    shown = "another format" if is_unknown else str(error) or type(error).__name__
    refuse_data(str(path), "an image", shown, "mend or remove it")


def form_of(file: Any, path: Path, reading: Reading) -> Form:
    """Go to the page of a file, open in Pillow, that is read, and return its form from the header; or refuse it."""
    _choose_page(file, path)
    tags = file.tag_v2 if file.format == "TIFF" else {}
    bits, type_ = {"I": (32, "i"), "F": (32, "f")}.get(file.mode, (16 if file.mode in _DEEP_GREY else 8, "u"))
    if file.mode == "I" and file.format in ("PNG", "PPM"):
        bits, type_ = 16, "u"
    elif file.format == "PNG" and file.mode in ("RGB", "LA", "RGBA"):
        bits = _bits_of_png(path)
    elif file.format == "TIFF":
        bits, kind = (int(np.atleast_1d(tags.get(tag, 1))[0]) for tag in (_BITS, _SAMPLE_FORMAT))
        type_ = {2: "i", 3: "f"}.get(kind, "u")
    is_grey = file.mode in (*_DEEP_GREY, "I", "F") or (file.mode in ("1", "L") and "transparency" not in file.info)
    form = Form(max(bits, 8), type_, not is_grey)
    known = is_grey or (file.mode in _OPAQUE + _ALPHA and form.has_range)
    rule = "grey values, or an image of 8 or 16 unsigned bits"
    way_out = "save it as PNG, or one grey channel of it"
    check_data(known, str(path), rule, f"Pillow's mode {file.mode} of {form.depth}", way_out)
    # which Pillow reads as if bytes of 16 bits were pixels
    is_split = form.colours and form.bits > 8 and tags.get(_PLANAR) == 2
    rule, way_out = "with channels side by side", "save it as PNG, or with planar configuration 1"
    check_data(not is_split, str(path), rule, "planes of 16 bits", way_out)
    _check_range(form, tags.get(_PHOTOMETRIC) == 0, path, reading)
    return form


def _check_range(form: Form, white_is_0: bool, path: Path, reading: Reading) -> None:
    """Refuse values that ``reading`` gives no range."""
    name, shown = str(path), f"{form.depth}, whose range is not known"
    check_data(form.has_range or reading.stored, name, "an image of 8 or 16 unsigned bits", shown, NEEDS_RANGE)
    rule = "a DICOM file, which may have a window, for window='file'"
    check_data(reading.window != "file", name, rule, form.depth, "give [level, width]")
    is_cut = form.colours and form.bits > 8 and reading.window is not None
    rule, way_out = "grey for a window, as of colours the high 8 bits are read", "save one channel of it, or 8 bits"
    check_data(not is_cut, name, rule, f"colours of {form.depth}", way_out)
    rule, way_out = "with black as the smallest value", "save it as such (photometric interpretation 1)"
    check_data(form.has_range or not white_is_0, name, rule, f"white, in {form.depth}", way_out)


def _bits_of_png(path: Path) -> int:
    with path.open("rb") as content:
        return content.read(25)[24]  # of the header, which is the first part of all


def read_unidentified(path: Path, reading: Reading, error: Exception) -> tuple[Form, Image]:
    """Return the form and the image of a TIFF that Pillow does not know; raise its error of anything else."""
    found = read_tiff(path)
    if found is None:
        raise error
    values, white_is_0, orientation = found
    form = Form(8 * values.dtype.itemsize, values.dtype.kind, False)
    _check_range(form, white_is_0, path, reading)
    return form, _turned(_grey(values, form, white_is_0, path, reading), orientation)


def _choose_page(file: Any, path: Path) -> None:
    """Go to the one page of a file, which may have previews and masks beside it.

    Further images in a JPEG (format MPO of cameras and telephones) are previews, depths or other views of the first.
    """
    number = getattr(file, "n_frames", 1)
    if number == 1 or file.format == "MPO":
        return
    pages = list(range(number))
    if file.format == "TIFF":
        pages = [page for page in pages if _is_full(file, page)]
    if len(pages) != 1:
        way_out = "save one as a file, such as im = PIL.Image.open(FILE); im.seek(0); im.save('page0.png')"
        refuse_data(str(path), "one image", f"{number} pages or frames", way_out)
    file.seek(pages[0])


def _is_full(file: Any, page: int) -> bool:
    """Whether a page of a TIFF is neither a reduced copy nor a mask of another."""
    file.seek(page)
    return not file.tag_v2.get(_PAGE_TYPE, 0) & 0b101


def _upright(file: Any, path: Path) -> Image:
    """Turn an image that is loaded by its EXIF orientation.

    `PIL.ImageOps.exif_transpose` does the same, but also rewrites the EXIF data, which fails where they are malformed.
    """
    image: Image = file
    if file.format == "TIFF":  # Pillow has turned it, and some versions leave the orientation there
        return image
    try:
        return _turned(image, file.getexif().get(_ORIENTATION, 1))
    except Exception as error:  # as of other formats
        warnings.warn(
            f"EXIF data of {str(path)!r} cannot be read ({error}): the image is taken to be upright", stacklevel=2
        )
        return image


def _turned(image: Image, orientation: int) -> Image:
    from PIL import Image

    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image


def _converted(image: Image, form: Form, path: Path, file: Any, reading: Reading) -> Image:
    """Convert an image of any mode; ``file`` is what it was read from."""
    if not form.colours and (reading.stored or form.bits > 8):
        values = np.asarray(image)
        if image.mode == "1":
            values = values.astype(np.uint8) * 255
        elif image.mode == "I" and form.type == "u" and form.bits == 32:
            values = values.view(np.uint32)
        elif image.mode == "L" and form.type == "i":
            values = values.view(np.int8)
        tags = file.tag_v2 if file.format == "TIFF" else {}
        # of images of 8 bits alone Pillow sees to it
        white_is_0 = form.bits > 8 and tags.get(_PHOTOMETRIC) == 0
        return _grey(values, form, white_is_0, path, reading, image.info.get("transparency"))
    transparency = image.info.get("transparency")
    palette = getattr(image.palette, "mode", "") if image.mode == "P" else ""
    if image.mode in _ALPHA or palette.endswith("A") or (image.mode == "P" and transparency is not None):
        return _over_white(image, path)
    rgb = image.convert("RGB")
    if transparency is None or image.mode not in ("1", "L", "RGB"):
        return rgb
    return _without_colour(rgb, image.mode, transparency, path, file)


def _grey(
    stored: npt.NDArray[Any],
    form: Form,
    white_is_0: bool,
    path: Path,
    reading: Reading,
    transparency: int | None = None,
) -> Image:
    """Grey values as they are, or of more than 8 bits scaled to 8."""
    from PIL import Image

    bits, values = form.bits, stored.astype(np.int32) if form.has_range else stored
    transparent = None if transparency is None else values == transparency
    if white_is_0:
        values = (1 << bits) - 1 - values
    if reading.stored:
        if transparent is not None:
            values[transparent] = (1 << bits) - 1
        return Image.fromarray(as_float32(values, path))
    if bits > 8 and 0 < values.max() < 1 << (bits - 2) and path.parent not in _dark_folders:
        _dark_folders.add(path.parent)
        warnings.warn(
            f"grey values of {str(path)!r} reach {values.max()}, less than a quarter of the range of {bits} bits "
            f"(0..{(1 << bits) - 1}) by which all images are scaled, so the image becomes dark; others in its folder "
            "are not named: if its values have fewer bits, give their range to all clients alike, such as window=[2048,"
            " 4096] for 12 bits, or normalise='client'",
            stacklevel=2,
        )
    pixels = (values >> (bits - 8)).astype(np.uint8)
    if transparent is not None:
        pixels[transparent] = 255
    return Image.fromarray(pixels).convert("RGB")


def _over_white(image: Image, path: Path) -> Image:
    from PIL import Image

    image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    alpha = image.getchannel("A")
    if alpha.getextrema() == (0, 0):
        warnings.warn(f"{str(path)!r} is transparent everywhere, and so becomes white: mend or remove it", stacklevel=2)
    background = Image.new("RGB", image.size, "white")
    background.paste(image.convert("RGB"), mask=alpha)
    return background


def _without_colour(rgb: Image, mode: str, transparency: Any, path: Path, file: Any) -> Image:
    """Paint the one colour white that a file without alpha channel declares transparent."""
    from PIL import Image

    bits = _bits_of_png(path) if file.format == "PNG" else 8
    if bits == 16:
        rule = "without one transparent colour of 16 bits, which has no neighbours apart once it has 8"
        refuse_data(str(path), rule, "one", "save it with 8 bits per channel, or without transparency")
    maximum = (1 << bits) - 1
    colour = np.array(transparency) & maximum
    if mode == "1":
        colour = (np.array(transparency) > 0).astype(np.int64)
    pixels = np.array(rgb)
    pixels[(pixels == colour * (255 // maximum)).all(axis=2)] = 255
    return Image.fromarray(pixels)


def subfolders(folder: Path) -> list[Path]:
    """Return folders in a folder, sorted, but hidden ones, and what archives of macOS add."""
    folders = sorted(
        child for child in folder.iterdir() if child.is_dir() and not child.name.startswith((".", "__MACOSX"))
    )
    check_names(folders)
    return folders


def loose_images(folder: Path, classes: Iterable[str] = ()) -> list[Path]:
    """Return images that lie in a domain's folder itself, or in that of Office-31 below it, beside ``classes``."""
    inside = [folder, *(child for child in subfolders(folder) if child.name == "images" and "images" not in classes)]
    besides = [each / name for each in inside for name in classes]
    return sorted(image for each in inside for image in _images_in(each, besides=[*inside, *besides]))


def class_images(folder: Path) -> list[Path]:
    """Return the images of a class, of which there must be some."""
    images = _images_in(folder)
    others = sorted(file.name for file in folder.iterdir())
    way_out = "add images, or leave the class out with classes"
    check_data(bool(images), str(folder), f"a folder of images ({', '.join(SUFFIXES)})", some(others), way_out)
    return images


def _images_in(folder: Path, besides: Sequence[Path] = ()) -> list[Path]:
    """Images in a folder, sorted; warns of what else is there but hidden files and ``besides``."""
    files = sorted(f for f in folder.iterdir() if not f.name.startswith(".") and f.name.lower() not in _CLUTTER)
    images = [file for file in files if file.suffix.lower() in SUFFIXES and file.is_file()]
    check_names(images)
    others = [
        f"{file.name}{'' if file.exists() else ' (a link to nothing)'}"
        for file in sorted({*files} - {*images, *besides})
    ]
    if images and others:
        warnings.warn(
            f"left out entries of {str(folder)!r} that are not images ({', '.join(SUFFIXES)}): {some(others)}",
            stacklevel=2,
        )
    return images
