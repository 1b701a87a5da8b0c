"""Clients, participation in a round, the messages between clients, and what these cost."""

from fedlit.federation.channel import Channel, Open, Pairwise, Summed
from fedlit.federation.client import Client, Facts
from fedlit.federation.errors import (
    ChannelError,
    DivergedError,
    FederationError,
    FederationTimeoutError,
    LabelGuardError,
    NotTrainedError,
    OutOfStepError,
    PayloadError,
    PeerFailedError,
    RosterError,
    SampleError,
)
from fedlit.federation.federation import Federation
from fedlit.federation.labels import UNLABELLED, GuardedLabels, reveal_for_oracle
from fedlit.federation.ledger import KEYS, SERVER, Ledger, LedgerEntry
from fedlit.federation.loader import FederatedLoader
from fedlit.federation.paces import Pace, RoundPlan
from fedlit.federation.participation import Everyone, Fraction, OneByOne, Participation, Schedule, UniformSubset
from fedlit.federation.reading import BatchedDataset

__all__ = [
    "KEYS",
    "SERVER",
    "UNLABELLED",
    "BatchedDataset",
    "Channel",
    "ChannelError",
    "Client",
    "DivergedError",
    "Everyone",
    "Facts",
    "FederatedLoader",
    "Federation",
    "FederationError",
    "FederationTimeoutError",
    "Fraction",
    "GuardedLabels",
    "LabelGuardError",
    "Ledger",
    "LedgerEntry",
    "NotTrainedError",
    "OneByOne",
    "Open",
    "OutOfStepError",
    "Pace",
    "Pairwise",
    "Participation",
    "PayloadError",
    "PeerFailedError",
    "RosterError",
    "RoundPlan",
    "SampleError",
    "Schedule",
    "Summed",
    "UniformSubset",
    "reveal_for_oracle",
]
