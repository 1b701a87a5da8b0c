"""SourceOnly: FedAvg over the sources, no adaptation; the floor that every method is compared with.

As "Source Only" in Jiang, Zhang and Koyejo (Principled Federated Domain Adaptation, ICLR 2024, section 5): only the
sources' updates are averaged.
"""

from __future__ import annotations

from fedlit.federation import Client
from fedlit.methods.fedavg import FedAvg


class SourceOnly(FedAvg):
    """FedAvg over the sources, no adaptation: the baseline (as in Jiang et al., ICLR 2024, section 5).

    The target receives the model and adds nothing, even if it has labels.
    """

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """The sources."""
        return self.sources
