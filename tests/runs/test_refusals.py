"""What of a Trainer does not go with rounds is refused when a run starts."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner

import one_site
import processes
from fedlit.methods import FedAvg
from helpers import build, digits, same, trainer, weights

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
    with pytest.raises(ValueError, match=f"{type(callback).__name__} .*: "):
        run.fit(module, data)
    assert run.global_step == 0
    assert not len(module.replicas) or same(
        {name.removeprefix("extractor."): t for name, t in weights(module, "clean").items() if "extractor" in name},
        dict(module.originals[0].state_dict()),
    )


@pytest.mark.parametrize("callback", AVERAGING, ids=lambda each: type(each).__name__)
def test_averages_of_training_are_no_matter_in_evaluation(callback: pl.Callback) -> None:
    data = digits()
    module = build(FedAvg, data)
    trainer(1).fit(module, data)
    (scores,) = trainer(1, [callback]).test(module, data, verbose=False)
    assert scores == trainer(1).test(module, data, verbose=False)[0]


@pytest.mark.parametrize("federated", [True, False])
def test_a_tuner_finds_no_rate_and_leaves_a_trainer_that_trains(federated: bool) -> None:
    data = digits()
    tuned, plain = build(FedAvg, data), build(FedAvg, data)
    run = trainer(2, federated=federated)
    with pytest.raises(ValueError, match=r"LearningRateFinder tries rates on steps without"):
        Tuner(run).lr_find(tuned, datamodule=data, update_attr=False)
    run.fit(tuned, datamodule=data)
    trainer(2, federated=federated).fit(plain, data)
    assert same(weights(tuned, "clean"), weights(plain, "clean"))


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_batch_size_is_not_looked_for(stage: Any) -> None:
    data = digits()
    module = build(FedAvg, data)
    run = trainer(1, federated=False)
    size = data.batch_size
    with pytest.raises(ValueError, match=r"BatchSizeFinder tries sizes on steps without"):
        Tuner(run).scale_batch_size(module, datamodule=data, method=stage)
    assert data.batch_size == size
    getattr(run, stage)(module, datamodule=data)
    with pytest.raises(ValueError, match="BatchSizeFinder tries sizes"):
        trainer(1, [BatchSizeFinder()], federated=False).fit(module, data)


@pytest.mark.multiprocess
@pytest.mark.parametrize("stage", ["fit", "test"])
def test_another_strategy_on_several_processes_is_refused_on_each(stage: str) -> None:
    for ended in processes.run(one_site.under_ddp, stage, 2, ranks=2):
        assert "ValueError: DDPStrategy on 2 processes would" in ended.error
        assert "give Trainer(strategy=FederatedStrategy())" in ended.error


@pytest.mark.multiprocess
def test_another_strategy_on_one_process_trains_as_a_plain_trainer_does() -> None:
    (ended,) = processes.results(one_site.under_ddp, "fit", 1)
    data = digits()
    module = build(FedAvg, data)
    trainer(2).fit(module, data)
    assert ended == one_site.fingerprint(weights(module, "clean"))


def test_synchronised_batchnorm_is_refused_by_name() -> None:
    data = digits()
    with pytest.raises(ValueError, match="sync_batchnorm=True would take statistics over samples"):
        trainer(1, sync_batchnorm=True).fit(build(FedAvg, data), data)
