"""Parts of a user's module that stay at each client, for methods with a local head."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from fedlit.federation import Client
from fedlit.methods.fedrep import FedRep
from fedlit.models.copies import check_part
from fedlit.wrapped.base import Wrapped


class WrappedRep(Wrapped, FedRep):
    """`FedRep` of a module, one part of which is the head.

    Args:
        head: Name of the part of the module that stays at each client, such as ``"head"``; all others are averaged.
    """

    acts_on_steps: ClassVar[bool] = True

    def __init__(self, *args: Any, head: str, **kwargs: Any) -> None:
        self._head = head
        super().__init__(*args, **kwargs)
        module = self.originals[0]
        self.part_of_module("head", head)
        within = f"{head}."
        check_part(module, (within,))
        if not any(not name.startswith(within) for name, _ in module.named_parameters()):
            raise ValueError(f"head={head!r} has all weights of {type(module).__name__}, and leaves none to share")
        self.run.weights.stays_local = (f"extractor.{within}",)

    def body_and_head(self, client: Client) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the weights of a local client that are shared, and those of the head."""
        module = self.replicas[client].get_submodule("extractor")
        head = [*module.get_submodule(self._head).parameters()]
        own = {id(param) for param in head}
        return [param for param in module.parameters() if id(param) not in own], head
