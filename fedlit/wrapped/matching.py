"""Features of a user's module, for methods that match them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedlit.federation import Client
from fedlit.federation.nested import num_samples
from fedlit.methods.mean_matching import MomentMatching
from fedlit.models import feature_width
from fedlit.wrapped.base import Wrapped


class WrappedMatching(Wrapped, MomentMatching):
    """Mixed in before a method that matches features, it takes those of a part of the module.

    Args:
        features: Name of the part of the module that gives features, such as ``"backbone"``, of shape (batch, ...),
            flattened to (batch, width). They are those of its first call in a ``training_step``, and of the target's in
            ``forward``.
        width: Number of features; ``None`` is ``out_features`` of that part, if it states that.
    """

    def __init__(self, *args: Any, features: str, width: int | None = None, **kwargs: Any) -> None:
        self._part, self._width = features, width
        self._losses: dict[str, Tensor] = {}
        super().__init__(*args, **kwargs)

    def matched_width(self) -> int:
        """Width of the features of the part."""
        part = self.part_of_module("features", self._part)
        if self._width is not None:
            return self._width
        try:
            return feature_width(part)
        except TypeError as error:
            raise ValueError(
                f"the part features={self._part!r} of {type(self.originals[0]).__name__} does not state how many "
                "features it gives: give width"
            ) from error

    def features(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Features of a client's batch: of a source while it takes its ``training_step``."""
        module = self.replicas[client].get_submodule("extractor")
        seen: list[Tensor] = []
        handle = module.get_submodule(self._part).register_forward_hook(lambda _, inputs, out: seen.append(out))
        try:
            if client.is_target:
                module(batch[0])  # all samples are matched, and some have labels at most
            else:
                self._losses[client.name] = self.label_loss(client, batch)
        finally:
            handle.remove()
        features = seen[0].flatten(1) if seen and isinstance(seen[0], Tensor) else None
        number = num_samples(batch[0])
        if features is None or features.shape != (number, self.width):
            got = f"{seen[:1]!r:.60}" if features is None else tuple(seen[0].shape)
            raise ValueError(
                f"the part features={self._part!r} gave {got} when it was first called with a batch of client "
                f"{client.name!r}, and is to give features of shape ({number}, {self.width}): name another part "
                "of the module, or give width"
            )
        return features

    def loss_of_features(self, client: Client, features: Tensor, batch: Sequence[Any]) -> Tensor:
        """What a source's ``training_step`` gave when its features were seen, and the target's now."""
        return self.label_loss(client, batch) if client.is_target else self._losses.pop(client.name)
