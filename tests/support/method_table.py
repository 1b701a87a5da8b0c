"""Every method with arguments: what tests of all methods go through."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from fedlit import FederatedModule, methods
from helpers import normalised_head

Row = tuple[type[FederatedModule], dict[str, Any], dict[str, Any]]

ARGUMENTS: dict[str, dict[str, Any]] = {name: {} for name in methods.__all__ if name != "TargetDistillation"} | {
    "CoMDA": {"warmup_rounds": 1},
    "CoMDA, votes": {"warmup_rounds": 1, "exchange": "votes"},
    "AdaBN": {"classifier": normalised_head()},
    "AdaBN, mixing": {"classifier": normalised_head(), "mixing": "learned"},
    "FADA": {"attention_samples": 50},
    "FADA, disentangling": {"attention_samples": 50, "disentangle": True},
    "FADE": {"schedule_rounds": 3},
    "FedAnalytic, leave one out": {"penalty": "leave_one_out"},
    "FedAnalytic, squares": {"head": "qda_diagonal"},
    "FedDA": {"target_lr_ratio": 0.5, "align_magnitudes": True},
    "FedDA auto": {"beta": "auto"},
    "FedDAN": {"num_frequencies": 20},
    "FedDAN, pairwise": {"num_frequencies": 20, "match": "pairwise", "every": "round"},
    "FedGP": {"target_lr_ratio": 0.5},
    "FedGP auto": {"beta": "auto"},
    "FedGP auto, exact": {"beta": "auto", "residual": "exact"},
    "FedGP auto, steps": {"beta": "auto", "estimate_from": "steps", "filtered": False},
    "FedDANN": {"schedule_rounds": 3},
    "FedDANN, conditional": {"schedule_rounds": None, "conditional": True},
    "FedDaDiL": {"warmup_rounds": 1, "num_atoms": 2, "atom_size": 20, "atom_batch_size": 10, "penalty": 0.1},
    "FedDaDiL, random": {"warmup_rounds": 1, "num_atoms": 2, "atom_size": 20, "atom_start": "random", "penalty": 0.1},
    "FedJDA": {"num_frequencies": 16, "num_components": 8},
    "FedMMD": {"warmup_rounds": 1, "degree": 1},
    "FedMMD, classifiers last": {"warmup_rounds": 1, "degree": 1, "classifier_period": None},
    "FedMME": {"warmup_rounds": 1},
    "FedProx": {"mu": 0.1},
    "FedRFTCA": {"num_frequencies": 16, "num_components": 8, "classifier_period": 1},
    "FedRFTCAClosedForm": {"num_frequencies": 16, "num_components": 8},
    "FedWDGRL": {"critic_steps": 2},
    "FinetuneOffline": {"federated_rounds": 2},
    "SHOT": {"federated_rounds": 2},
    "KD3A": {"warmup_rounds": 1, "gate": 0.3},
    "KD3A, shapley": {"warmup_rounds": 1, "gate": 0.3, "focus": "shapley"},
    "KD3A, votes": {"warmup_rounds": 1, "gate": 0.3, "exchange": "votes"},
    "KD3A, soft votes": {"warmup_rounds": 1, "gate": 0.3, "exchange": "votes", "vote": "soft"},
}
"""Arguments of each row; the method is what its name begins with. `TargetDistillation` takes a file that fits the data,
and sends nothing: tests/runs/test_distillation.py."""

LABELLED = ("FedAvg", "FedMME", "FedDANN, conditional", "CoMDA", "KD3A, soft votes")
"""Rows whose target has some labels, which the method does not need."""


def row(name: str) -> Row:
    """A method, arguments for it, and arguments for its data."""
    method: type[FederatedModule] = getattr(methods, name.replace(",", "").split()[0])
    arguments, of_data = ARGUMENTS[name], {}
    if method.requires.target_labels or name in LABELLED:
        of_data["target_labels"] = 1.0 if method is methods.Oracle else 30
    if arguments.get("beta") == "auto":  # a variance takes several batches
        of_data["target_batch_size"] = 8
    return method, arguments, of_data


METHODS: dict[str, Row] = {name: row(name) for name in ARGUMENTS}
"""Every method of fedlit, with arguments: a new one is tested without a row, where its defaults will do."""

ONE_PASS = ("FedAnalytic", "FedAnalytic, leave one out", "FedAnalytic, squares", "FedJDA", "FedRFTCAClosedForm")
"""Methods of a single round, which needs all samples of everyone and ends the run."""

LIKE_OTHERS = (
    *("APFL", "AdaBN", "AdaBN, mixing", "CoMDA", "CoMDA, votes", "Ditto", "FADA", "FADA, disentangling", "FADE"),
    *("FedAnalytic", "FedAnalytic, squares", "FedCORAL", "FedDA", "FedDA auto", "FedDAN", "FedDAN, pairwise"),
    *("FedDANN, conditional", "FedGP", "FedJDA"),
    *("FedDaDiL, random", "FedGP auto, exact", "FedGP auto, steps", "FedMMD, classifiers last", "FedMME", "FedProx"),
    *("FedWDGRL", "FinetuneOffline", "KD3A, shapley", "KD3A, soft votes"),
    *("KD3A, votes", "KNNPer", "Oracle", "SourceOnly", "T3A", "TargetOnly"),
)
"""Rows that send and train as one of the others does: weights, a discriminator, atoms, updates, moments, votes, one
pass, personal networks or knowledge. A new method is none of them, and tested by default."""


def one_of_each(names: Iterable[str]) -> list[Any]:
    """Parameters of a test of all methods; those that are `LIKE_OTHERS` are ``slow``."""
    return [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ()) for name in names]
