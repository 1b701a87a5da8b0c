"""Replicas of FedRF-TCA: extractor, random features, aligner and classifier."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlit.checks import check_between
from fedlit.functional import Kernel, hard_vote, random_fourier_features, sample_frequencies

STAYS_LOCAL = ("seed", "received", "heard", "informed", "ballot.")
"""Prefixes of the names in a replica's state that never leave its client."""


def check_widths(num_frequencies: int, num_components: int, bandwidth: float, kernel: Kernel) -> None:
    """Raise a `ValueError` now, rather than when a run starts, if a replica cannot be built from these."""
    check_between("num_components (m)", num_components, 1, 2 * num_frequencies, "at most 2 * num_frequencies (2N)")
    sample_frequencies(1, 1, bandwidth, kernel)


class AlignedReplica(nn.Module):
    """A client's network: ``classifier(aligner(random_features(extractor(x))))``.

    Args:
        extractor: Turns a batch of inputs into features z, shape (batch, p).
        sample: Draws Omega, shape (N, p), from ``seed=``: `sample_frequencies` with all other arguments bound.
        seed: Of Omega, the same at every client. The state holds it in place of Omega, which is drawn anew on loading.
        aligner: W^T, a linear layer without bias from 2N random features to m aligned ones.
        classifier: Turns aligned features into logits, shape (batch, num_classes).
        unit_norm: Scale z to length 1 first.
    """

    votes: ClassVar[bool] = False
    """True if it predicts by the votes of others' classifiers."""

    frequencies: Tensor
    seed: Tensor
    received: Tensor
    heard: Tensor
    informed: Tensor

    def __init__(
        self,
        extractor: nn.Module,
        sample: Callable[..., Tensor],
        seed: int,
        aligner: nn.Linear,
        classifier: nn.Module,
        unit_norm: bool,
    ) -> None:
        super().__init__()
        frequencies = sample(seed=seed).to(aligner.weight)
        self.sample = sample
        self.extractor = extractor
        self.aligner = aligner
        self.classifier = classifier
        self.unit_norm = unit_norm
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("seed", torch.tensor(seed))
        self.register_load_state_dict_post_hook(_draw_again)  # type: ignore[no-untyped-call]
        # the mean received in this round; in the state, so that a checkpoint within a round has it
        self.register_buffer("received", frequencies.new_zeros(2 * len(frequencies)))
        self.register_buffer("heard", torch.tensor(False))
        # true once the classifier is trained, which the target's is not before it receives one
        self.register_buffer("informed", torch.tensor(False))

    def random_features(self, x: Tensor) -> Tensor:
        """Random Fourier features s of the extracted ones, shape (batch, 2N)."""
        z = self.extractor(x)
        return random_fourier_features(F.normalize(z, dim=1) if self.unit_norm else z, self.frequencies)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of inputs."""
        logits: Tensor = self.classifier(self.aligner(self.random_features(x)))
        return logits


def _draw_again(replica: nn.Module, incompatible: object) -> None:
    """Draw Omega from the seed that has been loaded."""
    assert isinstance(replica, AlignedReplica)
    replica.frequencies.copy_(replica.sample(seed=int(replica.seed)))


class VotingReplica(AlignedReplica):
    """The target's network where the sources' classifiers vote: one prediction of each, and the most frequent wins.

    Args:
        replica: The target's without a vote; its parts are taken over.
        voters: Names of the sources.
    """

    votes: ClassVar[bool] = True

    def __init__(self, replica: AlignedReplica, voters: Sequence[str]) -> None:
        super().__init__(
            replica.extractor, replica.sample, int(replica.seed), replica.aligner, replica.classifier, replica.unit_norm
        )
        self.voters = list(voters)
        self.ballot = nn.ModuleList(copy.deepcopy(replica.classifier).requires_grad_(False) for _ in voters)

    def count_(self, ballots: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the state of each voter's classifier, without its local part."""
        for voter, classifier in zip(self.voters, self.ballot, strict=True):
            classifier.load_state_dict(ballots[voter], strict=False)
        self.informed.fill_(True)

    def forward(self, x: Tensor) -> Tensor:
        """Log of the vote shares, shape (batch, num_classes): see `hard_vote`."""
        aligned = self.aligner(self.random_features(x))
        return hard_vote(torch.stack([classifier(aligned) for classifier in self.ballot]))
