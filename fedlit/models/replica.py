"""What one client holds: an extractor and a classifier on its features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class Replica(nn.Module):
    """A client's own network: ``classifier(extractor(x))``.

    Args:
        extractor: Turns a batch of inputs into features, shape (batch, width).
        classifier: Turns features into logits, shape (batch, num_classes).
    """

    extractor: nn.Module
    classifier: nn.Module

    def __init__(self, extractor: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.extractor = extractor
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of inputs."""
        logits: Tensor = self.classifier(self.extractor(x))
        return logits


def part_of(state: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Entries of a replica's state that belong to one of its parts, by their names within it.

    Args:
        state: By name.
        part: Name of a sub-module, such as ``"classifier"``.
    """
    prefix = f"{part}."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def make_classifier(extractor: nn.Module, num_classes: int) -> nn.Linear:
    """A linear classifier as wide as an extractor's features, initialised by torch's global generator.

    Args:
        extractor: A network with an integer attribute ``out_features``, its feature width.
        num_classes: Number of classes, at least 1.

    Returns:
        A layer from ``extractor.out_features`` features to ``num_classes`` logits; where that is ``None``, one that
        takes the width of the first features it is given.

    Raises:
        TypeError: If the extractor does not state its width.
        ValueError: If ``num_classes`` is below 1.
    """
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}: it is the number of labels in the data")
    if getattr(extractor, "out_features", 0) is None:
        return nn.LazyLinear(num_classes)
    return nn.Linear(feature_width(extractor), num_classes)


def feature_width(extractor: nn.Module) -> int:
    """Width of an extractor's features, which it has in ``out_features``.

    Args:
        extractor: A network with an integer attribute ``out_features``.

    Raises:
        TypeError: If it has none.
    """
    width: Any = getattr(extractor, "out_features", None)
    if width is None and getattr(extractor, "in_features", 0) is None:
        raise TypeError(
            f"{type(extractor).__name__} was made without in_features, the width of its features, and a layer on them "
            "has to know it: give in_features"
        )
    if not isinstance(width, int):
        raise TypeError(
            f"extractor must have an integer attribute out_features, the width of its features, got {width!r} on "
            f"{type(extractor).__name__}: set it in the network's __init__"
        )
    return width
