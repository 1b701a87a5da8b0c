"""Five domains of digits, in the shape of the Digit-Five benchmark, from one file and what scikit-learn ships."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from fedlit.checks import check_at_least, check_between
from fedlit.data.base import DomainDataModule
from fedlit.data.digits import DEJAVU_FONTS, NUM_CLASSES, photo_patches, printed_digits, written_digits
from fedlit.data.files import read_npz
from fedlit.data.samples import DatasetNotFoundError, Domain, Transform, check_data, flatten
from fedlit.data.splits import kept_of_each_class, shuffled_by_class
from fedlit.federation.streams import stable_seed

_SIDES = {"mnist": 28, "usps": 16}  # pixels of the images in the file
_KEYS = [f"{name}_{part}" for name in _SIDES for part in "xy"]
_FONTS = [
    *DEJAVU_FONTS,
    *(f"STIXGeneral{style}.ttf" for style in ("", "Bol", "Italic", "BolIta")),
    *(f"cm{style}10.ttf" for style in ("r", "b", "ss", "tt")),
]
_PER_RENDERED_CLASS = 200
_MIN_CONTRAST = 0.4


class DigitFive(DomainDataModule):
    r"""Digits 0 to 9 as five domains, in the shape of Digit-Five (Peng et al., 2019); grey images in [0, 1].

    - ``mnist``: half of the file's MNIST digits, written by hand.
    - ``usps``: the file's USPS digits, cut tightly from envelopes.
    - ``optdigits``: scikit-learn's ``load_digits``, written by hand, stored at 8x8 pixels.
    - ``blended``: \|strength * patch - digit\| of the other half of the MNIST digits and patches of two photographs, as
      in MNIST-M (Ganin et al., 2016).
    - ``rendered``: 2,000 digits drawn in 20 fonts, turned by up to 20 degrees, 50 to 80% high, shifted by up to a
      tenth of the image, light on dark or dark on light, as in Synthetic Digits (Ganin et al., 2016).

    The published benchmark has SVHN where ``optdigits`` is, and MNIST-M and Synthetic Digits in colour, so its figures
    are no reference for these. Images are brought to one size with their margins, which are part of the shift.

    The file has ``mnist_x`` (n, 28, 28) and ``usps_x`` (n, 16, 16), uint8 and light on dark, and their digits
    ``mnist_y`` and ``usps_y`` (n,). Other entries are ignored: splits are made here, for all domains alike.

    Args:
        path: The ``.npz`` file.
        image_size: Height and width of all images, 8 to 64 pixels; bilinear and antialiased.
        max_samples: Samples that each domain keeps at most, at least 10, with its class shares; ``None`` keeps all.
        photo_strength: Weight of the photographs in domain ``blended``, in [0, 1]; MNIST-M has 1. Above 0.5, grey
            strokes vanish where the patch is half as bright.
        flatten: Give samples as vectors of ``image_size ** 2`` numbers, for networks without convolutions.
        target: The domain that is adapted to.
        kwargs: See `DomainDataModule`.

    Raises:
        DatasetNotFoundError: If there is nothing at ``path``.
        DatasetLayoutError: If it holds something else.
    """

    def __init__(
        self,
        path: str,
        *,
        image_size: int = 16,
        max_samples: int | None = None,
        photo_strength: float = 1.0,
        flatten: bool = False,
        target: str = "mnist",
        **kwargs: Any,
    ) -> None:
        super().__init__(target=target, **kwargs)
        way_out = "below 8 digits cannot be distinguished, and no original has more than 28"
        check_between("image_size", image_size, 8, 64, way_out)
        if max_samples is not None:
            check_at_least("max_samples", max_samples, NUM_CLASSES, "samples, one of each digit")
        check_between("photo_strength", photo_strength, 0, 1)
        self.path = Path(path)
        self.image_size = image_size
        self.max_samples = max_samples
        self.photo_strength = photo_strength
        self.flatten = flatten
        self._arrays = _read(self.path)
        self.check_roster()

    def domain_names(self) -> list[str]:
        """Return the five domains."""
        return ["mnist", "usps", "optdigits", "blended", "rendered"]

    def class_names(self) -> list[str]:
        """Return the ten digits."""
        return [str(digit) for digit in range(NUM_CLASSES)]

    def load(self, domain: str) -> Domain:
        """Make one domain; the same in every run."""
        if domain == "rendered":
            x, y = rendered_digits(self.image_size)
        else:
            x, y = self._written(domain)
            x = resize(x, self.image_size)
        if domain == "blended":
            zoom = max(1, 32 // self.image_size)  # whatever the size, about as much of a photograph as MNIST-M shows
            x = (self.photo_strength * photo_patches(len(x), zoom, self.image_size) - x).abs()
        keep = kept_of_each_class(y, self.max_samples, NUM_CLASSES, "DigitFive", "keep", domain)
        return Domain(x[keep], y[keep])

    def _written(self, domain: str) -> tuple[Tensor, Tensor]:
        """Handwritten digits in the size in which they are stored."""
        if domain == "optdigits":
            return written_digits(0, num_parts=1)
        stored = "usps" if domain == "usps" else "mnist"
        x, y = (torch.from_numpy(self._arrays[f"{stored}_{part}"]) for part in "xy")
        if stored == "mnist":
            positions = self.mnist_positions(domain)
            x, y = x[positions], y[positions]
        return x[:, None].float() / 255, y.long()

    def mnist_positions(self, domain: str) -> Tensor:
        """Return positions in the file of the MNIST digits of ``"mnist"`` or ``"blended"``, ascending, disjoint.

        ``mnist`` has the first half of each class in random order, the same in every run, and ``blended`` the rest.
        """
        y = torch.from_numpy(self._arrays["mnist_y"])
        half = 0 if domain == "mnist" else 1
        members = shuffled_by_class(y, NUM_CLASSES, "DigitFive", "halves")
        return torch.cat([group[half::2] for group in members]).sort().values

    def transform(self, training: bool) -> Transform | None:
        """Flatten, if asked to."""
        return flatten if self.flatten else None


def resize(x: Tensor, size: int) -> Tensor:
    """Bring images in [0, 1], shape (n, channels, height, width), to ``size`` x ``size`` pixels, bilinear."""
    resized = F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False, antialias=True)
    return resized.clamp(0, 1)  # the weights of a pixel add up to 1 but for rounding errors


@lru_cache(maxsize=4)  # drawing takes seconds, and a run over all targets and seeds asks for it each time
def rendered_digits(size: int) -> tuple[Tensor, Tensor]:
    """Return 2000 printed digits in many fonts with random greys of stroke and background, the same in each run.

    The two greys differ by 0.4 to 1; either may be the lighter one, with equal probability. All calls share the result,
    images in [0, 1] of shape (2000, 1, size, size) and digits of shape (2000,): copy it before you change it.
    """
    x, y = printed_digits(_PER_RENDERED_CLASS, size, _FONTS, max_angle=20.0, heights=(0.5, 0.8), max_shift=1 / 10)
    generator = torch.Generator().manual_seed(stable_seed("DigitFive", "greys"))
    contrast, shift, side = torch.rand(3, len(y), 1, 1, 1, generator=generator)
    contrast = _MIN_CONTRAST + (1 - _MIN_CONTRAST) * contrast
    darker = (1 - contrast) * shift
    x = torch.where(side < 0.5, x, 1 - x)
    return (darker + contrast * x).clamp(0, 1), y


def _read(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The four arrays of the file, checked."""
    if not path.exists():
        raise DatasetNotFoundError(
            f"no digits at path={str(path)!r} (looked for {str(path.absolute())!r}): give an .npz file with the arrays "
            f"{_KEYS}. torchvision.datasets.MNIST and USPS download them as .data (images) and .targets (digits), "
            "and numpy.savez saves them"
        )
    content = read_npz(path)
    missing = [key for key in _KEYS if key not in content]
    check_data(not missing, str(path), f"of arrays {_KEYS}", sorted(content), f"add {missing}")
    for name, side in _SIDES.items():
        x, y = content[f"{name}_x"], content[f"{name}_y"]
        fits = x.shape[1:] == (side, side) and x.dtype == np.uint8
        rule, shown = f"uint8 images of shape (n, {side}, {side})", f"shape {x.shape} of {x.dtype}"
        check_data(fits, f"{name}_x (in {path})", rule, shown)
        fits = y.shape == x.shape[:1] and np.issubdtype(y.dtype, np.integer)
        rule, shown = f"one whole number for each of {len(x)} images", f"shape {y.shape} of {y.dtype}"
        check_data(fits, f"{name}_y (in {path})", rule, shown)
        digits = sorted(set(y.tolist()))
        check_data(digits == [*range(NUM_CLASSES)], f"{name}_y (in {path})", "all digits 0 to 9 and no others", digits)
    return content
