"""Arguments that no run could use are refused by name, at construction or, of a Trainer, when a run starts."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader

import one_site
import processes
from fedlit import Client, FederatedModule, methods
from fedlit.methods import FedAvg
from fedlit.models import MLP, SmallCNN
from helpers import build, digits, normalised_head, same, shards, trainer, weights
from method_table import METHODS
from refused import refused

SIZES = {"num_frequencies": 8, "num_components": 4}

VALUES: dict[type[FederatedModule], dict[str, list[Any]]] = {
    methods.FedAvg: {
        "num_classes": [1], "task": ["ranking"], "warmup_rounds": [-1, -0.5, 1.5, inf, nan], "weighting": ["size"],
        "schedule_interval": ["epoch"], "batchnorm_average": ["median"], "refine": ["both", 2],
        "class_weights": [[1.0], [1.0, -1.0], [0.0, 0.0], "even", [1.0, nan], 2.0],
    },
    methods.AdaBN: {"mixing": [0.4, 1.5, nan, "auto"], "entropy_weight": [-1.0, inf]},
    methods.APFL: {"alpha": [-0.1, 1.5]},
    methods.CoMDA: {"ensemble": [1.0], "forget_rate": [-0.1], "sharpness": [inf], "mixup": [nan]},
    methods.Ditto: {"lam": [-1.0, inf, nan]},
    methods.GALA: {
        "target_lr_ratio": [0.0], "discrepancy_weight": [-1.0, nan], "classifier_lr": [-1.0, inf], "temperature": [0.0],
        "centroid_samples": [0, 2.5, True],
    },
    methods.FADA: {
        "hidden": [0, 2.5], "identifier_weight": [-1.0], "mi_weight": [inf], "identifier_lr": [0.0],
        "temperature": [nan], "reverse": ["source"], "attention": ["gap"], "attention_samples": [1],
    },
    methods.FedAnalytic: {
        "head": ["svm"], "penalty": [0.0, inf, "best"], "shrinkage": [0.0], "num_frequencies": [-1],
        "class_shares": ["even", "equal"], "bandwidth": [0.0], "kernel": ["rbf"],
    },
    methods.FedCORAL: {"mmd_weight": [nan], "feature_variance": [-1.0, "max"]},
    methods.FedDA: {
        "beta": [1.5, -0.1, nan, "Auto", {"a": 0.5}, {"a": 0.5, "b": 2}, {"a": 0.5, "b": 0.5, "t": 0.5}],
        "target_lr_ratio": [0.0, inf, nan],
    },
    methods.FedDAN: {
        "mmd_weight": [-1.0], "match": ["both"], "every": ["epoch"], "average": ["extractor"], "num_kernels": [0, 2.5],
        "num_frequencies": [12], "bandwidth_factor": [1.0], "bandwidth": [0.0, "median"],
    },
    methods.FedDANN: {
        "hidden": [0, 2.5], "sync": ["epoch"], "reversal_weight": [-0.1, inf], "schedule_rounds": [0, "all"],
        "average": ["target"], "discriminator_lr_ratio": [0.0],
    },
    methods.FedDaDiL: {
        "num_atoms": [0, 2.5], "atom_size": [1, 20.5], "atom_batch_size": [0, 1], "num_iterations": [0, 2.5],
        "atom_lr": [0.0], "simplex_lr": [-1.0], "penalty": [0.0], "sampling": ["sorted"], "sample_weights": ["sorted"],
        "predict_with": ["both"], "entropy": [0.0], "label_cost": [-2.0],
    },
    methods.FedGP: {
        "granularity": ["network"], "projection": ["euclid"], "residual": ["full"], "weighting": ["size"],
        "filtered": ["no"],
    },
    methods.FedJDA: {"num_iterations": [0, 2.5], "scaling": ["none"], "gamma": [None, -1.0], "num_components": [17]},
    methods.FedMMD: {
        "degree": [4], "alpha": [-1.0], "center": [-1.0], "within": ["all"], "mmd_weight": [nan],
        "exchange": ["closed"], "classifier_period": [0, 2.5], "trust_region": [0.0, -1.0, inf, nan],
    },
    methods.FedMME: {"entropy_weight": [-0.1, nan], "temperature": [0.0]},
    methods.FedRFTCA: {
        "num_components": [0, 17], "mmd_weight": [-0.1, nan, inf], "train_extractor": ["some", "norm"],
        "constraint": ["trace"], "classifier_period": [0, 2.5], "bandwidth": [0.0], "kernel": ["linear"],
        "weighting": ["size"],
    },
    methods.FedRFTCAClosedForm: {
        "num_components": [0, 17], "shrinkage": [0.0, 1.5], "gamma": [0.0, inf, nan], "bandwidth": [-1.0],
        "kernel": ["rbf"],
    },
    methods.FedRep: {"head_share": [0.0, 1.0]},
    methods.FedWDGRL: {
        "wasserstein_weight": [-1.0], "penalty_weight": [-0.5, nan], "critic_steps": [0, 2.5], "critic_lr": [0.0],
        "average": ["none"],
    },
    methods.KD3A: {
        "gate": [1.0, (0.9, -0.1), (0.9, 0.9, 0.9)], "vote": ["loud"], "focus": ["all"], "mixup": [-1.0],
        "momentum": [1.0], "bn": ["none"], "weighting": ["sqrt"], "exchange": ["letters"],
    },
    methods.KNNPer: {"lam": [1.1], "num_neighbors": [0, 2.5]},
}  # fmt: skip

COMBINATIONS: list[tuple[type[FederatedModule], dict[str, Any], str]] = [
    (methods.FedAvg, {"task": "regression", "num_classes": 0}, "num_classes"),
    (methods.FedAvg, {"task": "regression", "class_weights": "balanced"}, "class_weights|regression"),
    (methods.FedAvg, {"vectorize": True, "class_weights": "balanced"}, "vectorize"),
    (methods.FedAvg, {"task": "regression", "num_classes": 1, "refine": True}, "refine"),
    (methods.FedAvg, {"batchnorm_average": "moments", "local_norm": True}, "local_norm"),
    (methods.AdaBN, {"mixing": 0.8, "task": "regression"}, "regression"),
    (methods.AdaBN, {"local_norm": True}, "local_norm"),
    (methods.FedAnalytic, {"class_weights": "balanced"}, "class_weights|would do nothing"),
    (methods.FedAnalytic, {"local_norm": True}, "local_norm"),
    (methods.FedAnalytic, {"head": "lda", "penalty": "leave_one_out"}, "no ridge"),
    (methods.FedDANN, {"conditional": True, "task": "regression"}, "conditional"),
    (methods.FedDaDiL, {"class_weights": "balanced"}, "class_weights|would do nothing"),
    (methods.FedJDA, {"class_weights": "balanced"}, "class_weights|would do nothing"),
    (methods.FedJDA, {"local_norm": True}, "local_norm"),
    (methods.FedRFTCAClosedForm, {"class_weights": "balanced"}, "class_weights|would do nothing"),
    (methods.FedRFTCAClosedForm, {"local_norm": True}, "local_norm"),
    (methods.KD3A, {"focus": "shapley", "exchange": "votes"}, "shapley"),
    (methods.KD3A, {"exchange": "models", "local_norm": True}, "exchange"),
    (methods.SourceOnly, {"trust_region": 1.0}, "trust_region"),
    (methods.FedRep, {"extractor": nn.Identity(), "classifier": nn.Linear(5, 2)}, "no weights to share"),
    (methods.FedCORAL, {"extractor": MLP(5, [4]).requires_grad_(False)}, "nothing to train"),
    (methods.AdaBN, {"classifier": None}, "BatchNorm"),
    (methods.AdaBN, {"classifier": None, "extractor": SmallCNN(1, width=4, norm="group")}, "BatchNorm"),
]


def make(method: type[FederatedModule], arguments: dict[str, Any]) -> FederatedModule:
    sizes = SIZES if method in (methods.FedJDA, methods.FedRFTCA, methods.FedRFTCAClosedForm) else {}
    head = {"classifier": normalised_head(4, 2)} if method is methods.AdaBN else {}
    clients = ["a", "b", Client("t", role="target", labelled=True)]
    given = {"clients": clients, "target": "t", "num_classes": 2, "extractor": MLP(5, [4])}
    return method(**(given | sizes | head | arguments))


@pytest.mark.parametrize(
    ("method", "argument", "value"),
    [(method, name, value) for method, each in VALUES.items() for name, values in each.items() for value in values],
)
def test_values_out_of_range_are_refused(method: type[FederatedModule], argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        make(method, {argument: value})


@pytest.mark.parametrize(("method", "arguments", "said"), COMBINATIONS)
def test_arguments_that_exclude_each_other_are_refused(
    method: type[FederatedModule], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make(method, arguments)


@pytest.mark.parametrize("method", [getattr(methods, name) for name in methods.__all__])
def test_methods_of_classes_refuse_numbers(method: type[FederatedModule]) -> None:
    if method.requires.tasks == ("classification",):
        with pytest.raises(ValueError, match="classification"):
            make(method, {"num_classes": 1, "task": "regression"})
    elif method is not methods.AdaBN:
        assert make(method, {"num_classes": 1, "task": "regression"}).num_classes == 1


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name][0].requires.target_labels])
def test_without_the_target_labels_that_a_method_needs_a_run_is_refused(name: str) -> None:
    method, arguments, _ = METHODS[name]
    data = digits()
    with pytest.raises(ValueError, match="target 'fonts' has none"):
        trainer(1).fit(build(method, data, **arguments), data)


def test_the_oracle_needs_all_labels() -> None:
    data = digits(target_labels=30)
    with pytest.raises(ValueError, match=r"30 of \d+"):
        trainer(1).fit(build(methods.Oracle, data), data)


@pytest.mark.parametrize("name", ["CoMDA", "KNNPer", "AdaBN"])
def test_methods_that_go_through_samples_need_a_federated_loader(name: str) -> None:
    method, arguments, _ = METHODS[name]
    given = arguments | {"warmup_rounds": 0}
    if "classifier" in given:
        given["classifier"] = normalised_head(4, 2)
    batch = {client: tuple(each.tensors) for client, each in shards(3).items()}
    clients = [Client("c0", num_samples=40), Client("c1", num_samples=40), Client("c2", "target", True, 40)]
    module = method(clients, "c2", 2, MLP(5, [4]), **given)
    with refused("train_dataloaders", TypeError):
        trainer(1, federated=False).fit(module, DataLoader([batch], batch_size=None))


def test_a_loader_that_does_not_tell_sizes_is_refused() -> None:
    batch = {client: tuple(each.tensors) for client, each in shards(3).items()}
    module = methods.FedDAN(["c0", "c1", "c2"], "c2", 2, MLP(5, [4]))
    with refused("train_dataloaders", TypeError):
        trainer(1, federated=False).fit(module, DataLoader([0], collate_fn=lambda _: batch))


AVERAGING = [
    StochasticWeightAveraging(0.01),
    # not in Lightning 2.5
    *([callbacks.WeightAveraging()] if hasattr(callbacks, "WeightAveraging") else []),
    *([callbacks.EMAWeightAveraging(decay=0.9)] if hasattr(callbacks, "EMAWeightAveraging") else []),
]


class OwnFinder(LearningRateFinder):
    pass


@pytest.mark.parametrize("federated", [True, False])
@pytest.mark.parametrize(
    "callback",
    [
        *AVERAGING, OwnFinder(), LearningRateFinder(update_attr=False), callbacks.BackboneFinetuning(),
        callbacks.ModelPruning("l1_unstructured", amount=0.5),
    ],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_callbacks_that_do_not_go_by_rounds_are_refused_before_training(callback: pl.Callback, federated: bool) -> None:
    data = digits()
    module = build(FedAvg, data)
    run = trainer(1, [callback], federated)
    with refused("callbacks"):
        run.fit(module, data)
    assert run.global_step == 0
    assert not len(module.replicas) or same(
        {name.removeprefix("extractor."): t for name, t in weights(module, "clean").items() if "extractor" in name},
        dict(module.originals[0].state_dict()),
    )


@pytest.mark.parametrize("federated", [True, False])
def test_a_tuner_finds_no_rate_and_leaves_a_trainer_that_trains(federated: bool) -> None:
    data = digits()
    tuned, plain = build(FedAvg, data), build(FedAvg, data)
    run = trainer(2, federated=federated)
    with refused("callbacks"):
        Tuner(run).lr_find(tuned, datamodule=data, update_attr=False)
    run.fit(tuned, datamodule=data)
    trainer(2, federated=federated).fit(plain, data)
    assert same(weights(tuned, "clean"), weights(plain, "clean"))


@pytest.mark.parametrize("stage", ["fit", "predict"])
def test_a_batch_size_is_not_looked_for(stage: Any) -> None:
    data = digits()
    module = build(FedAvg, data)
    run = trainer(1, federated=False)
    size = data.batch_size
    with refused("callbacks"):
        Tuner(run).scale_batch_size(module, datamodule=data, method=stage)
    assert data.batch_size == size
    getattr(run, stage)(module, datamodule=data)
    with refused("callbacks"):
        trainer(1, [BatchSizeFinder()], federated=False).fit(module, data)


@pytest.mark.multiprocess
@pytest.mark.parametrize("stage", ["fit", "test"])
def test_another_strategy_on_several_processes_is_refused_on_each(stage: str) -> None:
    for ended in processes.run(one_site.under_ddp, stage, 2, ranks=2):
        assert "ArgumentError: strategy must be" in ended.error
        assert "give Trainer(strategy=FederatedStrategy())" in ended.error


@pytest.mark.multiprocess
def test_another_strategy_on_one_process_trains_as_a_plain_trainer_does() -> None:
    ended = one_site.under_ddp("fit", 1)
    data = digits()
    module = build(FedAvg, data)
    trainer(2).fit(module, data)
    assert ended == one_site.fingerprint(weights(module, "clean"))


def test_synchronised_batchnorm_is_refused_by_name() -> None:
    data = digits()
    with refused("sync_batchnorm"):
        trainer(1, sync_batchnorm=True).fit(build(FedAvg, data), data)
