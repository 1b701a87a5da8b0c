"""Image files in folders, and their pixels: 8-bit colours, by rules that depend on no other images of a client.

`ImageDomains` documents the rules. CMYK is converted by its plain formula, inverted where the file is a JPEG (Adobe's
convention); Lab by its definition.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedlit.data.samples import DatasetLayoutError, Transform, check_data, labelled_positions, refuse_data
from fedlit.data.tables.values import some

if TYPE_CHECKING:
    from PIL.Image import Image

Interpolation = Literal["bilinear", "bicubic"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
"""Suffixes of image files, in lower case."""

VERSION = 2
"""Increased whenever some file is decoded to other pixels than before, so that features made earlier are not reused."""

_CLUTTER = ("thumbs.db", "desktop.ini")
# Of the photographs that nearly all published extractors were trained on.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_MAX_PIXELS = 1 << 27
"""Largest size of one image after it is resized."""

_OPAQUE = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
_DEEP_GREY = ("I;16", "I;16B", "I;16L", "I;16N")

# tags of TIFF, the last one of EXIF too
_PAGE_TYPE, _BITS, _PHOTOMETRIC, _SAMPLE_FORMAT, _ORIENTATION = 254, 258, 262, 339, 274
_SIGNED = 2  # a sample format

_dark_folders: set[Path] = set()
"""Folders whose dark images of 16 bits have been warned of, so that one warning stands for all of them."""


def decode(path: Path, resized_side: int, side: int, interpolation: Interpolation = "bilinear") -> Tensor:
    """Read an image, scale its shorter side to ``resized_side`` and cut out the middle square of ``side`` pixels.

    Returns red, green and blue, uint8, shape (3, side, side). Scaling is antialiased.

    Raises:
        DatasetLayoutError: If the file is no image, is damaged or too large, or has values without a known range.
    """
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    image = read_rgb(path)
    # a strip of pixels becomes large if its shorter side does
    fits = max(image.size) * resized_side**2 <= min(image.size) * _MAX_PIXELS
    shown = f"a strip of {image.width}x{image.height} pixels"
    check_data(fits, str(path), "an image that is not too narrow", shown, "mend or remove it")
    image = F.resize(image, [resized_side], interpolation=InterpolationMode(interpolation))
    pixels: Tensor = F.pil_to_tensor(F.center_crop(image, [side, side]))
    return pixels


def read_rgb(path: Path) -> Image:
    """Read an image as 8-bit red, green and blue, upright and without transparency; errors as of `decode`."""
    from PIL import Image

    try:
        with Image.open(path) as file:
            _choose_page(file, path)
            file.load()
            return _to_rgb(_upright(file, path), path, file)
    except DatasetLayoutError:
        raise
    except Exception as error:  # at bytes of another format, Pillow raises errors of any kind
        refuse_data(str(path), "an image", str(error) or type(error).__name__, "mend or remove it")


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
    from PIL import Image

    image: Image.Image = file
    if file.format == "TIFF":  # Pillow has turned it, and some versions leave the orientation there
        return image
    try:
        orientation = file.getexif().get(_ORIENTATION, 1)
    except Exception as error:  # as of other formats
        warnings.warn(
            f"EXIF data of {str(path)!r} cannot be read ({error}): the image is taken to be upright", stacklevel=2
        )
        return image
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


def _to_rgb(image: Image, path: Path, file: Any) -> Image:
    """Convert an image of any mode; ``file`` is what it was read from."""
    tags = file.tag_v2 if file.format == "TIFF" else {}
    signed = _SIGNED in np.atleast_1d(tags.get(_SAMPLE_FORMAT, 1))
    deep = image.mode in _DEEP_GREY or (image.mode == "I" and file.format in ("PNG", "PPM"))
    if signed or not (deep or image.mode in _OPAQUE + _ALPHA):
        way_out = (
            "save it with these, scaled by the same numbers at all clients, such as "
            "PIL.Image.fromarray(((x - low) / (high - low) * 255).clip(0, 255).astype('uint8'))"
        )
        values = f"{'signed ' if signed else ''}values of Pillow's mode {image.mode}, whose range is not known"
        refuse_data(str(path), "an image of 8 or 16 unsigned bits", values, way_out)
    if deep:
        return _grey(image, path, tags)
    transparency = image.info.get("transparency")
    palette = getattr(image.palette, "mode", "") if image.mode == "P" else ""
    if image.mode in _ALPHA or palette.endswith("A") or (image.mode == "P" and transparency is not None):
        return _over_white(image, path)
    rgb = image.convert("RGB")
    if transparency is None or image.mode not in ("1", "L", "RGB"):
        return rgb
    return _without_colour(rgb, image.mode, transparency, path, file)


def _grey(image: Image, path: Path, tags: Any) -> Image:
    """Scale grey values of more than 8 bits to 8."""
    from PIL import Image

    bits = int(np.atleast_1d(tags.get(_BITS, 16))[0])
    values = np.asarray(image).astype(np.int32)
    transparent = values == image.info.get("transparency", -1)
    if tags.get(_PHOTOMETRIC) == 0:  # white is 0, which Pillow sees to in images of 8 bits alone
        values = (1 << bits) - 1 - values
    if 0 < values.max() < 1 << (bits - 2) and path.parent not in _dark_folders:
        _dark_folders.add(path.parent)
        warnings.warn(
            f"grey values of {str(path)!r} reach {values.max()}, less than a quarter of the range of {bits} bits "
            f"(0..{(1 << bits) - 1}) by which all images are scaled, so the image becomes dark; others in its folder "
            "are not named: if its values have fewer bits, multiply them at all clients alike, such as by 16 for 12 "
            "bits",
            stacklevel=2,
        )
    pixels = (values >> (bits - 8)).astype(np.uint8)
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

    bits = 8
    if file.format == "PNG":
        with path.open("rb") as content:
            bits = content.read(25)[24]  # of the header, which is the first part of all
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
    """Return folders in a folder, sorted, but hidden ones."""
    return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))


def loose_images(folder: Path) -> list[Path]:
    """Return images that lie in a domain's folder itself, or in that of Office-31 below it."""
    inside = [folder, *(child for child in subfolders(folder) if child.name == "images")]
    return sorted(image for each in inside for image in _images_in(each, besides=inside))


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


@dataclass(frozen=True)
class ImageTransform:
    """Bytes to normalised floats, squares of ``image_size`` pixels.

    To augment is to cut a random square and mirror half of the images, drawn from torch's global generator.
    """

    image_size: int
    augment: bool = False
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return self.augment

    def __call__(self, x: Tensor) -> Tensor:
        """Transform uint8 images, shape (n, 3, side, side)."""
        if self.augment:
            size = self.image_size
            corners = torch.randint(0, x.shape[-1] - size + 1, (len(x), 2)).tolist()
            x = torch.stack(
                [im[:, top : top + size, left : left + size] for im, (top, left) in zip(x, corners, strict=True)]
            )
            mirrored = torch.rand(len(x)) < 0.5
            x = torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        return (x.float() / 255 - mean) / std


@dataclass(eq=False)
class ImageFiles(Dataset[tuple[Tensor, Tensor]]):
    """Images of one client that are decoded sample by sample, as `decode` does, with classes y, int64, -1 where hidden.

    The transform is applied to a batch of decoded images; ``augments`` states whether it draws random numbers.
    """

    paths: Sequence[Path]
    y: Tensor
    resized_side: int
    side: int
    transform: Transform
    augments: bool = False
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        self.labelled_indices = labelled_positions(self.y)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.decode(self.paths[index : index + 1]))[0], self.y[index]

    def decode_all(self, num_workers: int) -> Tensor:
        """All images as one uint8 tensor, shape (n, 3, side, side), decoded by ``num_workers`` processes."""
        pixels = torch.empty(len(self), 3, self.side, self.side, dtype=torch.uint8)
        loader: DataLoader[Path] = DataLoader(
            self.paths,  # type: ignore[arg-type]  # a list has all that a data set must
            batch_size=64,
            num_workers=num_workers,
            collate_fn=self.decode,
            # The default start-up draws a seed from torch's global generator, which would make the cache visible there.
            generator=torch.Generator().manual_seed(0),
        )
        start = 0
        for batch in loader:
            pixels[start : start + len(batch)] = batch
            start += len(batch)
        return pixels

    def decode(self, paths: Sequence[Path]) -> Tensor:
        """Pixels of some images, uint8, shape (n, 3, side, side)."""
        return torch.stack([decode(path, self.resized_side, self.side, self.interpolation) for path in paths])
