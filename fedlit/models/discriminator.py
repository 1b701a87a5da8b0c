"""What one client of an adversarial method holds: extractor and classifier, and what its features are judged by."""

from __future__ import annotations

from torch import nn

from fedlit.models.replica import Replica


def make_discriminator(width: int, hidden: int) -> nn.Sequential:
    """A network with one hidden layer and one number for each sample, initialised by torch's global generator.

    It has no BatchNorm: a client has samples of one domain alone, whose mean would become 0 in both domains.

    Args:
        width: Of what it is given, at least 1.
        hidden: Units of its hidden layer, at least 1.

    Returns:
        From shape (batch, width) to (batch,).

    Raises:
        ValueError: If a size is below 1.
    """
    if width < 1 or hidden < 1:
        raise ValueError(f"a discriminator must have at least 1 input and 1 hidden unit, got {width} and {hidden}")
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Flatten(0))


class AdversarialReplica(Replica):
    """A client's own network, and the discriminator of domains, or critic, that all clients have alike.

    Args:
        extractor: Turns a batch of inputs into features, shape (batch, width).
        classifier: Turns features into logits, shape (batch, num_classes).
        discriminator: Turns features, or what is made of them, into one number per sample, shape (batch,); it takes the
            classifier's number type.
    """

    discriminator: nn.Module

    def __init__(self, extractor: nn.Module, classifier: nn.Module, discriminator: nn.Module) -> None:
        super().__init__(extractor, classifier)
        self.discriminator = discriminator.to(next(classifier.parameters()).dtype)
