"""FedAvg (McMahan, Moore, Ramage, Hampson and Aguera y Arcas, AISTATS 2017), Algorithm 1.

The smallest federated method; copy this file to start another.

Differences from the paper: none. The mean runs over all floating-point and integer state, BatchNorm statistics
included (`FederatedModule`'s ``local_norm`` keeps those at home, ``batchnorm_average`` sets how their mean is taken).
"""

from __future__ import annotations

from fedlit import FederatedModule, Run
from fedlit.federation import Channel, Summed


class FedAvg(FederatedModule):
    """Local training, then the mean of the weights for everyone (McMahan et al., AISTATS 2017, Algorithm 1).

    The target trains along if it has labels (``target_labels`` of the data module); without, FedAvg is `SourceOnly`.
    """

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The weights."""
        return (Summed("weights", "weights of the network", up="learners"),)

    def on_round_start(self, run: Run) -> None:
        """A client that was absent fetches the current model first."""
        run.weights.catch_up("weights")

    def on_round_end(self, run: Run) -> None:
        """Replace everyone's weights: w <- sum over learners k of (n_k / n) w_k."""
        run.weights.average_("weights", among=run.learners())
