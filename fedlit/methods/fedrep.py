"""FedRep (Collins, Hassani, Mokhtari and Shakkottai, ICML 2021), Algorithm 1.

Differences from the paper: a round's local steps are shared out between head and body, while the paper takes so many
epochs of each (10 and 1 in its experiments). Its analysis has one step of the body, which here is ``head_share`` of
(steps - 1) / steps. BatchNorm's running statistics, part of the body, follow the data in the head's steps too.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import nn

from fedlit.checks import check
from fedlit.federation import Channel, Client, FederatedLoader, Summed
from fedlit.methods.fedavg import FedAvg
from fedlit.models import Replica
from fedlit.run.options import ReplicaSpec, Requires
from fedlit.run.replicas import Replicas


class FedRep(FedAvg):
    """A shared extractor, and a local classifier at each client (Collins et al., ICML 2021, Algorithm 1).

    In a round, a client first trains its head with the body fixed, then the body with its head fixed; the mean of the
    bodies replaces everyone's. Each client is evaluated by the shared body and its head, which never leaves it,
    not in a warm-up either.

    Args:
        head_share: Share of a client's local steps in a round that train its head, in (0, 1); rounded up to whole
            steps. A client whose data make one batch a round trains its head alone, unless the strategy's
            ``local_steps`` are more.

    Raises:
        ValueError: If the extractor has no weights.
        RosterError: When training starts, if the target has no labels.
    """

    replicas: Replicas[Replica]
    requires: ClassVar[Requires] = Requires(target_labels=True)
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(local=("classifier.",))

    def __init__(self, *args: Any, head_share: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check(
            0 < head_share < 1,
            "head_share",
            "between 0 and 1",
            head_share,
            "it is the share of local steps that train the head, and both head and body need some",
        )
        if not self.originals[0].state_dict():
            raise ValueError(
                f"FedRep shares the extractor, but {type(self.originals[0]).__name__} has no weights to share: give "
                "one that is trained, such as fedlit.models.MLP"
            )
        self.head_share = head_share

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The body's weights."""
        return (Summed("weights", "weights of the extractor", up="learners"),)

    def on_after_backward(self) -> None:
        """Forget the gradients of what is fixed; an optimiser passes over parameters without one."""
        super().on_after_backward()
        if self.run.clock.warming_up:
            return
        for client in self.federation.local_clients:
            body, head = self.body_and_head(client)
            for param in body if self.trains_head(client) else head:
                param.grad = None

    def body_and_head(self, client: Client) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the weights of a local client that are shared, and those that stay local."""
        replica = self.replicas[client]
        return [*replica.extractor.parameters()], [*replica.classifier.parameters()]

    def trains_head(self, client: Client) -> bool:
        """Whether the step under way trains the client's head rather than the body."""
        accumulate = self.trainer.accumulate_grad_batches
        steps = math.ceil(self._num_batches(client) / accumulate)
        # Rounded, as 0.28 * 25 is a little more than 7.
        return self.federation.batch_idx // accumulate < math.ceil(round(self.head_share * steps, 9))

    def _num_batches(self, client: Client) -> int:
        """Batches of a client in a round."""
        loader, whole = self.trainer.train_dataloader, int(self.trainer.num_training_batches)
        return min(whole, loader.batches_of(client.name)) if isinstance(loader, FederatedLoader) else whole
