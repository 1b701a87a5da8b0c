"""Optical digits as four domains, from what comes with scikit-learn (Alpaydin and Kaynak, UCI 1998) and matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlit.checks import check_at_least, check_between
from fedlit.data.base import DomainDataModule
from fedlit.data.samples import Domain, Transform, flatten
from fedlit.data.shifts import add_noise, check_shifts, label_share, source_labels
from fedlit.data.splits import shuffled_by_class
from fedlit.federation.streams import stable_seed

NUM_CLASSES = 10
_WRITTEN = ("clean", "blended", "noisy")  # each made from its own third of the handwritten digits
DEJAVU_FONTS = [
    f"DejaVu{family}{style}.ttf"
    for family, styles in (
        ("Sans", ("", "-Bold", "-Oblique", "-BoldOblique")),
        ("SansMono", ("", "-Bold", "-Oblique", "-BoldOblique")),
        ("Serif", ("", "-Bold", "-Italic", "-BoldItalic")),
    )
    for style in styles
]
_PER_FONT_CLASS = 60  # as many printed digits as each handwritten domain has, about 600


class Digits(DomainDataModule):
    r"""Digits 0 to 9, 8x8 grey images in [0, 1], as four domains of about 600 samples; embedded, nothing to download.

    - ``clean``: written by hand (scikit-learn's ``load_digits``, divided by 16).
    - ``blended``: \|strength * patch - digit\| with patches of two photographs, as MNIST-M (Ganin et al., 2016) does
      in colour.
    - ``fonts``: printed in the DejaVu fonts, slightly turned, scaled and shifted.
    - ``noisy``: with Gaussian noise, clipped to [0, 1].

    The three handwritten domains hold different digits. On top come the controlled shifts of FedGP (Jiang et al., 2024,
    appendix C.7): noise on the target's images, and shifted labels.

    Args:
        noisy_std: Standard deviation of the noise in domain ``noisy``, at least 0; pixels lie in [0, 1].
        photo_strength: Weight of the photographs in domain ``blended``, in [0, 1]; 1, as of MNIST-M, leaves little.
        noise_level: Standard deviation of noise added to the target's images, whichever domain it is, at least 0 and
            not clipped ("noisy features"; 0.2 to 0.8 in the paper).
        label_shift: The paper's eta in [0, 0.5] ("label shifts"): each source keeps eta of its digits 0 to 2 and
            1 - eta of its digits 3 to 9, and the target the other way round. ``None`` keeps all.
        labels_per_source: Classes that each source keeps, 1 to 10 (the paper's "labels available", table 14). ``None``
            keeps all. It excludes ``label_shift``.
        flatten: Give samples as vectors of 64 numbers, for networks without convolutions.
        target: The domain that is adapted to.
        kwargs: See `DomainDataModule`.
    """

    def __init__(
        self,
        *,
        noisy_std: float = 0.4,
        photo_strength: float = 0.5,
        noise_level: float = 0.0,
        label_shift: float | None = None,
        labels_per_source: int | None = None,
        flatten: bool = False,
        target: str = "fonts",
        **kwargs: Any,
    ) -> None:
        super().__init__(target=target, **kwargs)
        check_at_least("noisy_std", noisy_std, 0)
        check_at_least("noise_level", noise_level, 0)
        check_between("photo_strength", photo_strength, 0, 1)
        check_shifts(NUM_CLASSES, label_shift, labels_per_source)
        self.noisy_std, self.photo_strength, self.noise_level = noisy_std, photo_strength, noise_level
        self.label_shift, self.labels_per_source = label_shift, labels_per_source
        self.flatten = flatten
        self.unshared_classes = label_shift is not None or labels_per_source is not None
        self.check_roster()

    def domain_names(self) -> list[str]:
        """Return the four domains."""
        return ["clean", "blended", "fonts", "noisy"]

    def class_names(self) -> list[str]:
        """Return the ten digits."""
        return [str(digit) for digit in range(NUM_CLASSES)]

    def load(self, domain: str) -> Domain:
        """Make one domain; the same in every run."""
        x, y = _printed() if domain == "fonts" else _written(_WRITTEN.index(domain))
        if domain == "blended":
            x = (self.photo_strength * _patches(len(x)) - x).abs()
        if domain == "noisy":
            x = add_noise(x, self.noisy_std, "Digits", "noisy").clamp(0, 1)
        keep = self._kept(domain, y)
        x, y = x[keep], y[keep]
        if domain == self.target:
            x = add_noise(x, self.noise_level, "Digits", "noise_level", domain)
        return Domain(x, y)

    def _kept(self, domain: str, y: Tensor) -> Tensor:
        """Positions that the shifts of labels leave, ascending."""
        is_target = domain == self.target
        labels: Sequence[int] = range(NUM_CLASSES)
        if self.labels_per_source is not None and not is_target:
            labels = source_labels(self.domain_names().index(domain), self.labels_per_source, NUM_CLASSES)
        members = shuffled_by_class(y, NUM_CLASSES, "Digits", "keep", domain)
        kept = []
        for label in labels:
            share = 1.0 if self.label_shift is None else label_share(label, self.label_shift, is_target)
            kept.append(members[label][: round(share * len(members[label]))])
        return torch.cat(kept).sort().values

    def transform(self, training: bool) -> Transform | None:
        """Flatten, if asked to."""
        return flatten if self.flatten else None


def written_digits(part: int, num_parts: int = len(_WRITTEN)) -> tuple[Tensor, Tensor]:
    """Return one of ``num_parts`` disjoint, stratified parts of scikit-learn's handwritten digits.

    Images are in [0, 1], of shape (n, 1, 8, 8), digits of shape (n,).
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    rng = np.random.default_rng(stable_seed("Digits", "parts"))
    positions = np.concatenate(
        [rng.permutation(np.flatnonzero(data.target == digit))[part::num_parts] for digit in range(NUM_CLASSES)]
    )
    positions.sort()
    images = torch.from_numpy(data.images[positions] / 16).float()[:, None]
    return images, torch.from_numpy(data.target[positions]).long()


def photo_patches(number: int, zoom: int = 2, size: int = 8) -> Tensor:
    """Cut random grey squares out of scikit-learn's photographs ``china.jpg`` and ``flower.jpg``, always the same.

    ``zoom`` is photograph pixels per patch pixel along each axis; ``size * zoom`` is at most 427, the height of the
    photographs. Returns values in [0, 1], shape (number, 1, size, size).
    """
    from sklearn.datasets import load_sample_images

    photos = [photo.mean(axis=2) / 255 for photo in load_sample_images().images]
    rng = np.random.default_rng(stable_seed("Digits", "patches"))
    side = size * zoom
    patches = np.empty((number, 1, size, size), dtype=np.float32)
    for patch in patches:
        photo = photos[rng.integers(len(photos))]
        top, left = (rng.integers(length - side + 1) for length in photo.shape)
        patch[0] = photo[top : top + side, left : left + side].reshape(size, zoom, size, zoom).mean(axis=(1, 3))
    return torch.from_numpy(patches)


def printed_digits(
    per_class: int = _PER_FONT_CLASS,
    size: int = 8,
    fonts: Sequence[str] = DEJAVU_FONTS,
    max_angle: float = 10.0,
    heights: tuple[float, float] = (0.85, 1.05),
    max_shift: float = 1 / 16,
) -> tuple[Tensor, Tensor]:
    """Draw digits printed in fonts, white on black, turned, scaled and shifted at random; the same in each run.

    Each image takes one of matplotlib's ``fonts``. It is turned by at most ``max_angle`` degrees; ``heights`` and
    ``max_shift`` are shares of its ``size`` in pixels. Images are in [0, 1], of shape (10 * per_class, 1, size, size).
    """
    import matplotlib as mpl
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    faces = [ImageFont.truetype(str(folder / name), 96) for name in fonts]
    rng = np.random.default_rng(stable_seed("Digits", "fonts"))
    fine = math.ceil(128 / size)  # draw at this many times the resolution, where 96 points fit, then average
    canvas, middle = size * fine, size * fine / 2
    y = np.tile(np.arange(NUM_CLASSES), per_class)
    x = np.empty((len(y), 1, size, size), dtype=np.float32)
    for image, digit in zip(x, y, strict=True):
        font = faces[rng.integers(len(faces))]
        page = Image.new("L", (canvas, canvas))
        pen = ImageDraw.Draw(page)
        left, top, right, bottom = pen.textbbox((0, 0), str(digit), font=font)
        pen.text((middle - (left + right) / 2, middle - (top + bottom) / 2), str(digit), fill=255, font=font)
        zoom = rng.uniform(*heights) * canvas / (bottom - top)
        angle = math.radians(rng.uniform(-max_angle, max_angle))
        across, down = middle + rng.uniform(-max_shift, max_shift, size=2) * canvas
        cos, sin = math.cos(angle) / zoom, math.sin(angle) / zoom
        # Pillow wants the map from the new image back to the page: undo the shift, the turn and the zoom.
        back = (cos, sin, middle - cos * across - sin * down, -sin, cos, middle + sin * across - cos * down)
        turned = page.transform(page.size, Image.Transform.AFFINE, back, resample=Image.Resampling.BILINEAR)
        image[0] = np.asarray(turned, dtype=np.float32).reshape(size, fine, size, fine).mean(axis=(1, 3)) / 255
    return torch.from_numpy(x), torch.from_numpy(y).long()


_written, _printed, _patches = cache(written_digits), cache(printed_digits), cache(photo_patches)  # slow to draw
