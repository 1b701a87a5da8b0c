"""The project's module and data module as they are, in a federation of its clinics."""

import lightning as L

from fedlit import FederatedDAN, FederatedStrategy
from fedlit.callbacks import OracleAccuracy
from fedlit.data import FederatedLoader
from project.data import CLINICS, BreathData
from project.module import BreathClassifier

L.seed_everything(0)
clinics = {name: BreathData(name, balanced=name != "turin") for name in CLINICS}
data = {stage: FederatedLoader.from_loaders(clinics, stage=stage, label="label") for stage in ("train", "val", "test")}
model = FederatedDAN(BreathClassifier(), list(clinics), "turin", 3, features="encoder", width=48, warmup_rounds=0.3)
trainer = L.Trainer(max_epochs=10, accelerator="cpu", strategy=FederatedStrategy(), callbacks=[OracleAccuracy()])
trainer.fit(model, data["train"], data["val"])
trainer.test(model, data["test"])
