"""A client's replica: an extractor and a classifier on its features, and in adversarial methods a discriminator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fedlit.checks import check_at_least


class Replica(nn.Module):
    """A client's network: ``classifier(extractor(x))``.

    Args:
        extractor: Turns a batch of inputs into features, shape (batch, width).
        classifier: Turns features into logits, shape (batch, num_classes).
    """

    def __init__(self, extractor: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.extractor = extractor
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of inputs."""
        logits: Tensor = self.classifier(self.extractor(x))
        return logits


class AdversarialReplica(Replica):
    """A client's network, and the discriminator of domains, or critic, which is equal at all clients.

    Args:
        extractor: Turns a batch of inputs into features, shape (batch, width).
        classifier: Turns features into logits, shape (batch, num_classes).
        discriminator: Turns features, or a function of them, into one number per sample, shape (batch,); converted
            to the classifier's number type.
    """

    def __init__(self, extractor: nn.Module, classifier: nn.Module, discriminator: nn.Module) -> None:
        super().__init__(extractor, classifier)
        self.discriminator = discriminator.to(next(classifier.parameters()).dtype)


def part_of(state: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Entries of a replica's state that belong to one of its parts, by their names within it.

    Args:
        state: Tensors by name.
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
    check_at_least("num_classes", num_classes, 1, way_out="it is the number of labels in the data")
    if getattr(extractor, "out_features", 0) is None:
        return nn.LazyLinear(num_classes)
    return nn.Linear(feature_width(extractor), num_classes)


def feature_width(extractor: nn.Module) -> int:
    """Width of an extractor's features.

    Args:
        extractor: A network with an integer attribute ``out_features``.

    Raises:
        TypeError: If it has none.
    """
    width: Any = getattr(extractor, "out_features", None)
    name = type(extractor).__name__
    if width is None and getattr(extractor, "in_features", 0) is None:
        raise TypeError(f"{name} was made without in_features, which the layer on its features needs: give in_features")
    if not isinstance(width, int):
        raise TypeError(
            f"extractor must have an integer attribute out_features, the width of its features, got {width!r} on "
            f"{name}: set it in the network's __init__"
        )
    return width


def make_discriminator(width: int, hidden: int) -> nn.Sequential:
    """A network with one hidden layer and one number for each sample, initialised by torch's global generator.

    It has no BatchNorm: a client has samples of one domain alone, whose mean would become 0 in both domains.

    Args:
        width: Number of input features, at least 1.
        hidden: Units of its hidden layer, at least 1.

    Returns:
        From shape (batch, width) to (batch,).

    Raises:
        ValueError: If a size is below 1.
    """
    check_at_least("width", width, 1, "input of a discriminator")
    check_at_least("hidden", hidden, 1, "hidden unit of a discriminator")
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Flatten(0))
