"""Replica of adversarial methods: extractor, classifier, and a discriminator or critic of features."""

from __future__ import annotations

from torch import nn

from fedlit.checks import check_at_least
from fedlit.models.replica import Replica


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
