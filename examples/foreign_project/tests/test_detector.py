"""The project by itself, and with one loss of fedlit."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from fedlit.functional import mmd_squared
from plant_monitor.adapted_detector import AdaptedFaultDetector
from plant_monitor.data import PlantData
from plant_monitor.detector import FaultDetector
from plant_monitor.signals import CONDITIONS, LENGTH, PLANTS, record


def test_records_are_of_all_conditions_and_repeat_with_their_seed() -> None:
    for plant in PLANTS:
        signals, conditions = record(plant, 40, seed=1)
        assert signals.shape == (40, LENGTH)
        assert conditions.bincount().tolist() == [10] * len(CONDITIONS)
        assert torch.equal(signals, record(plant, 40, seed=1)[0])
        assert not torch.equal(signals, record(plant, 40, seed=2)[0])


def test_the_detector_learns_in_a_trainer_of_its_own(source_only) -> None:
    losses = source_only["losses"]
    assert losses[-1] < 0.5 * losses[0]
    assert source_only["tested"] == source_only["accuracy"]


def test_what_it_learns_does_not_carry_over_to_turin(source_only, trainer, accuracy) -> None:
    """The shift is real: as many labels of Turin's own make a far better detector for it."""
    detector = FaultDetector()
    labelled = TensorDataset(*record("turin", 400, seed=99))
    trainer.fit(detector, DataLoader(labelled, 40, shuffle=True))
    assert accuracy(detector) > source_only["accuracy"] + 0.1


def test_a_loss_of_fedlit_adapts_it(source_only, data, trainer, accuracy) -> None:
    adapted = AdaptedFaultDetector(data.uninspected)
    trainer.fit(adapted, data)
    assert accuracy(adapted) > source_only["accuracy"] + 0.1
    assert distance(adapted, data) < 0.5 * distance(source_only["detector"], data)
    assert "uninspected" not in adapted.state_dict()


@torch.no_grad()
def distance(detector: FaultDetector, data: PlantData) -> float:
    """Between features of inspected and of uninspected machines, whatever the scale of the features."""
    features, others = detector.spectrum(data.inspected.tensors[0]), detector.spectrum(data.uninspected)
    return float(mmd_squared(features, others, float(torch.cdist(features, features).median())))
