"""The project's own module in a federation as it is: its training step, its optimiser, in each plant a copy.

`FederatedDAN` also makes the features of all plants alike, those that ``FaultDetector.spectrum`` gives; Turin, which
nobody has inspected, takes part by that alone. `Federated`, of the same arguments without ``features``, would be plain
FedAvg.
"""

from __future__ import annotations

import lightning as L

from fedlit import FederatedDAN
from plant_monitor.detector import FaultDetector
from plant_monitor.federated import FederatedPlantData, make_trainer
from plant_monitor.signals import CONDITIONS, PLANTS


def make_method(target: str = "turin") -> FederatedDAN:
    """The detector in every plant, the second half of the rounds with features that are made alike."""
    return FederatedDAN(
        FaultDetector(), list(PLANTS), target, len(CONDITIONS), features="spectrum", mmd_weight=1.0, warmup_rounds=0.5
    )


def main() -> None:
    """Train, test, and tell what was sent."""
    L.seed_everything(0)
    method, data, trainer = make_method(), FederatedPlantData(), make_trainer()
    trainer.fit(method, data)
    trainer.test(method, data)
    print(method.federation.ledger.bytes_by_channel())


if __name__ == "__main__":
    main()
