"""APFL (Deng, Kamani and Mahdavi, Adaptive Personalized Federated Learning, arXiv 2003.13461, 2020), Algorithm 1.

Differences from the paper: alpha is fixed and the same for all, as in Jiang et al. (ICLR 2024); its adaptive alpha is
left out. BatchNorm's running statistics are not mixed: those of the mixed model's own activations are kept.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedlit.checks import check_between
from fedlit.methods.personalised import Personalised, PersonalReplica


class MixedReplica(PersonalReplica):
    """A client's copy of the averaged model w and its local model v, evaluated as alpha v + (1 - alpha) w.

    v starts as a copy of w; alpha is in [0, 1].
    """

    def __init__(self, extractor: nn.Module, classifier: nn.Module, alpha: float) -> None:
        super().__init__(extractor, classifier)
        self.alpha = alpha

    def own(self, x: Tensor) -> Tensor:
        """Logits of the mixed model; their gradient reaches v alone."""
        mixed = {
            name: torch.lerp(self.get_parameter(name).detach(), param, self.alpha)
            for name, param in self.personal.named_parameters()
        }
        logits: Tensor = functional_call(self.personal, mixed, (x,))
        return logits


class APFL(Personalised):
    """FedAvg of w, and at each client a local v_k that is mixed with it (Deng et al., arXiv 2003.13461, Algorithm 1).

    w takes steps on its own loss F_k(w), v_k along alpha grad F_k(alpha v_k + (1 - alpha) w). Each client is evaluated
    by the mixture; v_k never leaves it.

    Args:
        alpha: Share of the local model in [0, 1]: 0 is FedAvg (with BatchNorm statistics of the client's own), 1 is
            local training.

    Raises:
        ValueError: If ``alpha`` is outside [0, 1].
        RosterError: When training starts, if the target has no labels.
    """

    def __init__(self, *args: Any, alpha: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_between("alpha", alpha, 0, 1, "it is the share of the local model")
        self.alpha = alpha

    def build_replica(self) -> PersonalReplica:
        """Both models, and how they are mixed."""
        extractor, classifier = copy.deepcopy(self.originals)
        return MixedReplica(extractor, classifier, self.alpha)
