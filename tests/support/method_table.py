"""Every method with arguments: what tests of all methods go through."""

from __future__ import annotations

from fedlit import FederatedModule
from fedlit.methods import (
    APFL,
    FADA,
    FADE,
    KD3A,
    AdaBN,
    CoMDA,
    Ditto,
    FedAvg,
    FedCORAL,
    FedDA,
    FedDaDiL,
    FedDAN,
    FedDANN,
    FedGP,
    FedJDA,
    FedMMD,
    FedMME,
    FedProx,
    FedRep,
    FedRFTCA,
    FedRFTCAClosedForm,
    FedWDGRL,
    FinetuneOffline,
    KNNPer,
    Oracle,
    SourceOnly,
    TargetOnly,
)
from helpers import normalised_head

METHODS: dict[str, tuple[type[FederatedModule], dict[str, object], dict[str, object]]] = {
    "APFL": (APFL, {}, {"target_labels": 30}),
    "CoMDA": (CoMDA, {"warmup_rounds": 1}, {"target_labels": 30}),
    "CoMDA, votes": (CoMDA, {"warmup_rounds": 1, "exchange": "votes"}, {}),
    "AdaBN": (AdaBN, {"classifier": normalised_head()}, {}),
    "AdaBN, mixing": (AdaBN, {"classifier": normalised_head(), "mixing": "learned"}, {}),
    "Ditto": (Ditto, {}, {"target_labels": 30}),
    "FADA": (FADA, {"attention_samples": 50}, {}),
    "FADA, disentangling": (FADA, {"attention_samples": 50, "disentangle": True}, {}),
    "FADE": (FADE, {"schedule_rounds": 3}, {}),
    "FedAvg": (FedAvg, {}, {"target_labels": 30}),
    "FedCORAL": (FedCORAL, {}, {}),
    "FedDA": (FedDA, {"target_lr_ratio": 0.5, "align_magnitudes": True}, {"target_labels": 30}),
    "FedDA auto": (FedDA, {"beta": "auto"}, {"target_labels": 30, "target_batch_size": 8}),
    "FedDAN": (FedDAN, {"num_frequencies": 20}, {}),
    "FedDAN, pairwise": (FedDAN, {"num_frequencies": 20, "match": "pairwise", "every": "round"}, {}),
    "FedGP": (FedGP, {"target_lr_ratio": 0.5}, {"target_labels": 30}),
    "FedGP auto": (FedGP, {"beta": "auto"}, {"target_labels": 30, "target_batch_size": 8}),
    "FedGP auto, exact": (
        FedGP,
        {"beta": "auto", "residual": "exact"},
        {"target_labels": 30, "target_batch_size": 8},
    ),
    "FedDANN": (FedDANN, {"schedule_rounds": 3}, {}),
    "FedDANN, conditional": (FedDANN, {"schedule_rounds": None, "conditional": True}, {"target_labels": 30}),
    "FedDaDiL": (
        FedDaDiL,
        {"warmup_rounds": 1, "num_atoms": 2, "atom_size": 20, "atom_batch_size": 10, "penalty": 0.1},
        {},
    ),
    "FedJDA": (FedJDA, {"num_frequencies": 16, "num_components": 8}, {}),
    "FedMMD": (FedMMD, {"warmup_rounds": 1, "degree": 1}, {}),
    "FedMME": (FedMME, {"warmup_rounds": 1}, {"target_labels": 30}),
    "FedProx": (FedProx, {"mu": 0.1}, {}),
    "FedRFTCA": (FedRFTCA, {"num_frequencies": 16, "num_components": 8, "classifier_period": 1}, {}),
    "FedRFTCAClosedForm": (FedRFTCAClosedForm, {"num_frequencies": 16, "num_components": 8}, {}),
    "FedRep": (FedRep, {}, {"target_labels": 30}),
    "FedWDGRL": (FedWDGRL, {"critic_steps": 2}, {}),
    "FinetuneOffline": (FinetuneOffline, {"federated_rounds": 2}, {"target_labels": 30}),
    "KD3A": (KD3A, {"warmup_rounds": 1, "gate": 0.3}, {}),
    "KD3A, shapley": (KD3A, {"warmup_rounds": 1, "gate": 0.3, "focus": "shapley"}, {}),
    "KD3A, votes": (KD3A, {"warmup_rounds": 1, "gate": 0.3, "exchange": "votes"}, {}),
    "KD3A, soft votes": (
        KD3A,
        {"warmup_rounds": 1, "gate": 0.3, "exchange": "votes", "vote": "soft"},
        {"target_labels": 30},
    ),
    "KNNPer": (KNNPer, {}, {"target_labels": 30}),
    "Oracle": (Oracle, {}, {"target_labels": 1.0}),
    "SourceOnly": (SourceOnly, {}, {}),
    "TargetOnly": (TargetOnly, {}, {"target_labels": 30}),
}
"""Every method, with arguments for itself and for its data; a new one is tested by adding a row."""

ONE_PASS = ("FedJDA", "FedRFTCAClosedForm")
"""Methods of a single round, which needs all samples of everyone and ends the run."""
