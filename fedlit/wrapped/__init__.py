"""A LightningModule of the user's, trained by every client on its data: `Federated`, and with more than FedAvg.

Each client has a copy: its ``training_step`` is the loss, its ``configure_optimizers`` makes the optimisers. What else
the module does while it trains is done by each copy, too, or refused by name.
"""

from __future__ import annotations

from typing import ClassVar

from fedlit.methods import AdaBN, FedAvg, FedCORAL, FedDAN, FedProx
from fedlit.wrapped.base import Wrapped
from fedlit.wrapped.matching import WrappedMatching
from fedlit.wrapped.personal import WrappedRep

__all__ = [
    "Federated",
    "FederatedAdaBN",
    "FederatedCORAL",
    "FederatedDAN",
    "FederatedProx",
    "FederatedRep",
    "Wrapped",
    "WrappedMatching",
    "WrappedRep",
]


class Federated(Wrapped, FedAvg):
    """A LightningModule of one's own, trained by FedAvg: each client has a copy, and copies are averaged after a round.

    The module is as it is in one's project: its ``training_step(batch, batch_idx)`` is called with a client's samples,
    as the client's dataset has them in a batch, and gives the loss; its ``configure_optimizers`` makes the optimiser,
    with any groups and schedules, of each copy. A module with several optimisers steps them by itself, as Lightning has
    it (``automatic_optimization = False``). What ``training_step`` gives to ``self.log`` is logged by client,
    ``source/NAME/...``, as the mean over a round, with ``on_epoch`` as Lightning's of an epoch. Schedules of an
    ``"epoch"`` advance after each round that the client took part in, those of a ``"step"`` after each of its steps.
    The hooks `on_train_start`, `on_train_epoch_start`, `on_train_epoch_end` and `on_train_end` are called of each copy;
    hooks that single clients' copies cannot have are refused by name.

    ``validation_step`` and ``test_step`` of the module are called for each client, with their hooks for epochs and
    batches. What they log is ``source/NAME/...``, with the mean over sources as ``source/...``. Of the target it is
    ``target/...`` if the step reads no label, and otherwise ``oracle/target/...``, of samples with known labels, by
    which nothing may be selected. With ``num_classes``, fedlit also evaluates what ``forward`` gives. ``predict_step``
    is not called: predictions are what ``forward`` gives.

    Args:
        module: Not changed.
        clients: The roster, at least two names or `Client` objects.
        target: Name of the client adapted to.
        num_classes: Number of classes; in regression, of numbers to predict. ``forward`` gives outputs of shape (batch,
            num_classes). ``None``: they may have any form, such as classes of pixels, and ``validation_step`` and
            ``test_step`` alone evaluate clients.
        task: ``"classification"`` or ``"regression"``: how clients are evaluated.
        scale_labels: ``False``: ``training_step`` is given numbers as they are, and ``forward`` gives numbers in their
            unit. A module that learns them standardised does both itself.
        kwargs: See `FederatedModule`: ``weighting``, ``local_norm``, ``batchnorm_average`` and ``reset_optimizer``.

    Raises:
        TypeError: If the module is no LightningModule, or, when it is evaluated, ``forward`` gives something else.
        ValueError: If the module does something in training that its copies would not, or has what an argument gives.
    """

    acts_on_steps: ClassVar[bool] = False


class FederatedProx(Wrapped, FedProx):
    """`Federated`, whose copies are held near the round's first model: see `FedProx`."""


class FederatedRep(WrappedRep):
    """`Federated`, of whose copies one part is trained and kept by each client: see `FedRep`."""


class FederatedAdaBN(Wrapped, AdaBN):
    """`Federated`, with BatchNorm statistics of the target's samples in its copy: see `AdaBN`, without ``mixing``."""

    acts_on_steps: ClassVar[bool] = False


class FederatedDAN(WrappedMatching, FedDAN):
    """`Federated`, whose copies also make all clients' features alike, by means of random features: see `FedDAN`."""


class FederatedCORAL(WrappedMatching, FedCORAL):
    """`Federated`, whose copies also make covariances of the features of all clients alike: see `FedCORAL`."""
