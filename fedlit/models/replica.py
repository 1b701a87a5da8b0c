"""A client's replica: an extractor and a classifier on its features, and in adversarial methods a discriminator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fedlit.checks import check, check_at_least, refuse


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
        extractor: See `Replica`.
        classifier: See `Replica`.
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
        extractor: A network with its feature width in ``out_features``; where that is ``None``, the layer takes the
            width of the first features.
        num_classes: Number of classes, at least 1.

    Raises:
        TypeError: If the extractor does not state its width.
    """
    check_at_least("num_classes", num_classes, 1, way_out="it is the number of labels in the data")
    if is_width_open(extractor):
        return nn.LazyLinear(num_classes)
    return nn.Linear(feature_width(extractor), num_classes)


def is_width_open(extractor: nn.Module) -> bool:
    """Whether the width of an extractor's features is that of the data, and known when training starts."""
    return getattr(extractor, "out_features", 0) is None


def feature_width(extractor: nn.Module) -> int:
    """Width of an extractor's features, its attribute ``out_features``; a `TypeError` if it has none.

    Args:
        extractor: Any network.
    """
    width: Any = getattr(extractor, "out_features", None)
    name = type(extractor).__name__
    if width is None and getattr(extractor, "in_features", 0) is None:
        refuse("in_features", f"given to {name}, for the layer on its features", None, error=TypeError)
    way_out = f"set it in __init__ of {name}"
    check(isinstance(width, int), "out_features", "an integer, the width of features", width, way_out, TypeError)
    return int(width)


def make_discriminator(width: int, hidden: int) -> nn.Sequential:
    """A network from (batch, width) to (batch,), initialised by torch's global generator; both sizes are at least 1.

    It has no BatchNorm: a client has samples of one domain alone, whose mean would become 0 in both domains.

    Args:
        width: Number of input features.
        hidden: Units of its hidden layer.
    """
    check_at_least("width", width, 1, "input of a discriminator")
    check_at_least("hidden", hidden, 1, "hidden unit of a discriminator")
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Flatten(0))
