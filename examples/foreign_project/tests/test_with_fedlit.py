"""A method, a backend and a whole federation of fedlit, with the project's own networks and data."""

from __future__ import annotations

import torch

from plant_monitor import federated, few_labels, whole_module
from plant_monitor.detector import FaultDetector, Spectrum
from plant_monitor.shared_baseline import healthy_spectrum, secure_mean
from plant_monitor.signals import PLANTS, record


def test_a_method_trains_in_an_ordinary_trainer(source_only, trainer, accuracy) -> None:
    method = few_labels.make_method()
    trainer.fit(method, few_labels.make_loader(method))
    assert type(trainer.strategy).__module__.startswith("lightning.")
    assert accuracy(method) > source_only["accuracy"] + 0.1
    assert {"update", "model"} <= method.federation.ledger.bytes_by_channel().keys()
    assert isinstance(method.replicas["turin"].get_submodule("extractor"), Spectrum)


def test_the_secure_mean_is_the_mean() -> None:
    spectra = {plant: healthy_spectrum(plant) for plant in PLANTS}
    plain = torch.stack(list(spectra.values())).mean(dim=0)
    assert float((secure_mean(spectra) - plain).abs().max()) < 1e-6
    assert float(plain.max()) > 0.1  # at the speed of the shafts, so that 1e-6 says something


def test_a_federation_adapts_without_records_or_labels_of_turin(source_only, accuracy) -> None:
    torch.manual_seed(0)
    method, data, trainer = federated.make_method(), federated.FederatedPlantData(), federated.make_trainer()
    trainer.fit(method, data)
    assert accuracy(method) > source_only["accuracy"] + 0.05
    sent = method.federation.ledger.bytes_by_channel()
    assert {"weights", "moments", "moments/keys", "target_moments", "classifier"} <= sent.keys()
    assert method.federation.channels["moments"].description.backend == "PairwiseMasking"
    (tested,) = trainer.test(method, data, verbose=False)
    assert tested["source/acc"] > 0.8


def test_the_projects_own_module_is_trained_by_every_plant_as_it_is(source_only, accuracy) -> None:
    torch.manual_seed(0)
    method, data, trainer = whole_module.make_method(), federated.FederatedPlantData(), federated.make_trainer()
    trainer.fit(method, data)
    assert isinstance(method.replicas["turin"].get_submodule("extractor"), FaultDetector)
    assert accuracy(method) > source_only["accuracy"] + 0.05
    assert {"weights", "moments"} <= method.federation.ledger.bytes_by_channel().keys()


def test_the_federation_is_tested_on_other_machines_than_it_is_trained_on() -> None:
    data = federated.FederatedPlantData()
    train, test = data.train_dataloader().datasets, data.test_dataloader().datasets
    assert list(train) == list(test) == list(PLANTS)
    assert not any(torch.equal(train[plant].tensors[0], test[plant].tensors[0]) for plant in PLANTS)
    assert torch.equal(train["oslo"].tensors[0], record("oslo", 200, seed=1)[0])
