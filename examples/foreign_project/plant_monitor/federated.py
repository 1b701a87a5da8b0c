"""A whole federation in fedlit's strategy, of the project's own networks and its own data module.

Nobody has inspected a machine of Turin's, and no records leave their plant: FedMMD sends moments of features, of which
Turin receives the mean, and masks hide a single plant's from the server.
"""

from __future__ import annotations

import lightning as L
from torch import nn
from torch.optim import Adam
from torch.utils.data import TensorDataset

from fedlit import FederatedStrategy
from fedlit.data import FederatedLoader
from fedlit.methods import FedMMD
from fedlit.privacy import PairwiseMasking
from plant_monitor.detector import Spectrum
from plant_monitor.signals import CONDITIONS, PLANTS, record


class FederatedPlantData(L.LightningDataModule):
    """Records plant by plant; those of a plant that another process hosts are dropped by the strategy.

    Args:
        target: Plant without labels.
        machines: Records of each plant, for training and for testing.
        seed: Of the records.
    """

    def __init__(self, target: str = "turin", machines: int = 200, seed: int = 0) -> None:
        super().__init__()
        self.target = target
        self.machines = machines
        self.seed = seed

    def train_dataloader(self) -> FederatedLoader:
        """For each plant its own records; labels of the target are never read."""
        return self._loader(0, training=True)

    def test_dataloader(self) -> FederatedLoader:
        """Other machines of each plant."""
        return self._loader(5, training=False)

    def _loader(self, offset: int, training: bool) -> FederatedLoader:
        data = {
            plant: TensorDataset(*record(plant, self.machines, 10 * self.seed + offset + place))
            for place, plant in enumerate(PLANTS)
        }
        return FederatedLoader(data, batch_size=40, training=training, seed=self.seed)


def make_method(target: str = "turin") -> FedMMD:
    """FedMMD with the project's networks."""
    return FedMMD(
        list(PLANTS),
        target,
        len(CONDITIONS),
        Spectrum(),
        nn.Linear(16, len(CONDITIONS)),
        warmup_rounds=10,
        optimizer=lambda params: Adam(params, lr=0.01),
    )


def make_trainer(rounds: int = 25) -> L.Trainer:
    """A Trainer whose epochs are rounds of communication between the plants."""
    strategy = FederatedStrategy(privacy=PairwiseMasking(), num_threads=1)
    return L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
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
