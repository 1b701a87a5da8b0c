"""Coloured MNIST: colour predicts the label better than the shape does, and in one domain it misleads."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from fedlit.checks import check_between, check_one_of
from fedlit.data.base import DomainDataModule
from fedlit.data.fashion_mnist import bytes_of_pixels
from fedlit.data.idx import load_idx
from fedlit.data.raw_inputs import RawInputs
from fedlit.data.samples import Domain, Transform
from fedlit.data.transforms import to_unit
from fedlit.federation.streams import stable_seed

COLOUR_NOISE = {"plus90": 0.1, "plus80": 0.2, "minus90": 0.9}
"""Probability that the colour disagrees with the label, by domain."""


class ColoredMNIST(DomainDataModule):
    """Coloured MNIST (Arjovsky et al., Invariant Risk Minimization, 2019), three domains of a third of MNIST each.

    A digit below 5 is of class 1 and any other of class 0, but a quarter of these labels (``label_noise``) are flipped.
    The digit is then drawn in the colour of its label (class 0 red, class 1 green), which is flipped with probability
    0.1 in domain ``plus90`` (the papers' "+90%"), 0.2 in ``plus80`` and 0.9 in ``minus90``. Images have two channels,
    red and green, of which one is empty, in [0, 1].

    Args:
        root: Folder with the four idx files of MNIST (gzipped or not), or with them in ``raw/`` or ``MNIST/raw/``.
        download: Let torchvision download them into ``root`` if they are not there.
        image_size: 14 leaves out every second row and column, as Arjovsky et al. do; 28 keeps all, as DomainBed and
            FedGP do.
        label_noise: Share of the labels that are flipped, in [0, 0.5].
        target: The domain that is adapted to.
        kwargs: See `DomainDataModule`.

    Raises:
        ValueError: If a number is out of its range.
        DatasetNotFoundError: If the files are not there.
    """

    def __init__(
        self,
        root: str,
        *,
        download: bool = False,
        image_size: Literal[14, 28] = 14,
        label_noise: float = 0.25,
        target: str = "minus90",
        **kwargs: Any,
    ) -> None:
        super().__init__(target=target, **kwargs)
        check_one_of("image_size", image_size, (14, 28))
        check_between("label_noise", label_noise, 0, 0.5)
        self.root = root
        self.download = download
        self.image_size = image_size
        self.label_noise = label_noise
        self.check_roster()

    def domain_names(self) -> list[str]:
        """Return the three domains."""
        return list(COLOUR_NOISE)

    def class_names(self) -> list[str]:
        """Return what the digits of each class are, but for the flipped labels."""
        return ["5 to 9", "0 to 4"]

    @cached_property
    def _images(self) -> tuple[Tensor, Tensor]:
        return load_idx(self.root, "MNIST", self.download)

    def positions(self, domain: str) -> Tensor:
        """Return positions of a domain's digits among the 70,000 (training files first), ascending, always the same."""
        count = len(self._images[1])
        order = torch.randperm(count, generator=torch.Generator().manual_seed(stable_seed("ColoredMNIST", "parts")))
        return order[self.domain_names().index(domain) :: len(COLOUR_NOISE)].sort().values

    def load(self, domain: str) -> Domain:
        """Flip labels, then colour the digits of one domain."""
        images, digits = self._images
        chosen = self.positions(domain)
        generator = torch.Generator().manual_seed(stable_seed("ColoredMNIST", "flips", domain))
        flipped = torch.rand(len(chosen), generator=generator) < self.label_noise
        disagrees = torch.rand(len(chosen), generator=generator) < COLOUR_NOISE[domain]
        y = ((digits[chosen] < 5) ^ flipped).long()
        colour = y ^ disagrees.long()
        step = 28 // self.image_size
        grey = images[chosen][:, ::step, ::step]
        x = torch.zeros(len(grey), 2, *grey.shape[1:], dtype=torch.uint8)
        x[torch.arange(len(grey)), colour] = grey
        return Domain(x, y)

    def transform(self, training: bool) -> Transform:
        """Convert bytes to floats in [0, 1]."""
        return to_unit

    def raw_inputs(self) -> RawInputs:
        """Return bytes of pixels, of a red and a green channel."""
        return bytes_of_pixels((2, self.image_size, self.image_size))
