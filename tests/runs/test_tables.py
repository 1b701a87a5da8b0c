"""Tables in a federation: each process with its own clinic's file and nothing else, as in one process with all."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch

import processes
from clinics import ARGUMENTS, CLINICS, clinic, write
from fedlit import FederatedStrategy
from fedlit.data import CSVDomains
from fedlit.export import export_target
from fedlit.federation import ChannelError
from fedlit.methods import FedGP
from fedlit.models import MLP, Features
from fedlit.privacy import CKKS, GaussianMechanism, PairwiseMasking
from helpers import QUIET, fingerprint, samples_of, weights


def make(folder: Path, ranks: int = 1, privacy: Any = None, **arguments: Any) -> tuple[L.Trainer, FedGP, CSVDomains]:
    """A run on the tables of a folder, in which paths are looked for."""
    os.chdir(folder)
    L.seed_everything(0)
    files = arguments.pop("files", {name: f"{name}.csv" for name in CLINICS})
    of_strategy = ("participation", "differential_privacy", "placement")
    choices = {key: arguments.pop(key) for key in of_strategy if key in arguments}
    network = Features() if arguments.pop("linear", False) else MLP(hidden=[8])  # neither is told the width
    data = CSVDomains(files, **(ARGUMENTS | {"classes": ["no", "yes"]} | arguments))
    module = FedGP(data.clients, data.target, data.num_classes, network, beta=0.5)
    strategy = FederatedStrategy(privacy=privacy, num_threads=1, **choices)
    return L.Trainer(**QUIET, max_epochs=1, devices=ranks, strategy=strategy), module, data


def run(
    folder: str, masked: bool, ranks: int, linear: bool = False
) -> tuple[dict[str, str], dict[str, int], Any, list[str]]:
    """On one of the processes: fingerprints of its clients, the ledger, metrics, and what features are."""
    own = Path(folder) / ("together" if ranks == 1 else f"site{os.environ['LOCAL_RANK']}")
    trainer, module, data = make(own, ranks, PairwiseMasking() if masked else None, linear=linear)
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    trainer.save_checkpoint(Path(folder, f"of {ranks}", "run.ckpt"))
    told = {key: float(value) for key, value in trainer.callback_metrics.items()}
    shas = {name: fingerprint(weights(module, name)) for name, _ in module.replicas.named_children()}
    return shas, module.federation.ledger.bytes_by_channel(), told, data.feature_names()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place, names in ({"together": CLINICS} | {f"site{i}": [name] for i, name in enumerate(CLINICS)}).items():
        (tmp_path / place).mkdir()
        write(tmp_path / place, *names)
    return tmp_path


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.slow), True])
def test_four_processes_with_a_file_each_equal_one_with_all(folder, masked):
    together = run(str(folder), masked, 1)
    apart = processes.results(run, str(folder), masked, 4, ranks=4)
    assert {name: sha for each in apart for name, sha in each[0].items()} == together[0]
    assert all(each[1:] == together[1:] for each in apart)
    assert {"levels", "magnitudes", "statistics"} <= together[1].keys()


HOSTS = [[], ["north", "east"], ["west", "south"]]
"""Clients of each of three processes, of which the first is a server apart."""


def around(
    folder: str, privacy: Any, rounds: int, ranks: int = 3, resume: bool = False, linear: bool = False
) -> tuple[Any, Any, Any]:
    """On one of three processes, each with its own tables alone: fingerprints, the ledger, and the shape of samples.

    One process has all tables.
    """
    placement = HOSTS if ranks > 1 else [[*CLINICS]]
    files = {name: f"../together/{name}.csv" for name in placement[int(os.environ.get("LOCAL_RANK", "0"))]}
    given = {"files": files or None, "clients": [*CLINICS], "placement": placement, "linear": linear}
    trainer, module, data = make(Path(folder, "site0"), ranks, privacy, **given)
    trainer.fit_loop.max_epochs = rounds
    path = Path(folder, f"around of {ranks}.ckpt")
    trainer.fit(module, data, ckpt_path=path if resume else None)
    trainer.save_checkpoint(path)
    shas = {name: fingerprint(weights(module, name)) for name, _ in module.replicas.named_children()}
    return shas, module.federation.ledger.bytes_by_channel(), data.input_shape


@pytest.mark.slow
@pytest.mark.parametrize(("privacy", "linear"), [(PairwiseMasking(), True), (None, False), (None, True)])
def test_a_server_without_tables_changes_nothing_and_resumes(folder, privacy, linear):
    together = around(str(folder), privacy, 2, 1, False, linear)
    (server, *_) = processes.results(around, str(folder), privacy, 1, 3, False, linear, ranks=3)
    assert server[0] == {}
    server, *sites = processes.results(around, str(folder), privacy, 2, 3, True, linear, ranks=3)
    assert {name: sha for each in sites for name, sha in each[0].items()} == together[0]
    assert all(each[2] == together[2] for each in (server, *sites))
    assert all(each[1] == together[1] for each in (server, *sites) if privacy is None)  # or pairs agree on keys again


def test_a_server_without_tables_hears_that_they_do_not_fit_together(folder):
    table = clinic("east")
    table.assign(sex=table["sex"].str.upper()).to_csv(folder / "together" / "east.csv", index=False)
    server, *sites = processes.run(around, str(folder), None, 1, ranks=3, timeout=60)
    assert all("sex (levels) must be written in one way" in each.error for each in sites)
    assert "fedlit.federation.errors." in server.error, server.error[-600:]


def predicted(folder: str, checkpoint: str, linear: bool) -> torch.Tensor:
    """What the target's own process, which has nothing but its table, predicts from a checkpoint."""
    trainer, module, data = make(Path(folder, "site3"), linear=linear)
    batches = trainer.predict(module, data, ckpt_path=checkpoint)
    return torch.cat([batch["south"] for batch in batches])


@pytest.mark.parametrize("linear", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_target_predicts_from_a_checkpoint_alone(folder, linear):
    run(str(folder), False, 1, linear)
    checkpoint = folder / "of 1" / "run.ckpt"
    found = predicted(str(folder), str(checkpoint), linear)
    trainer, module, data = make(folder / "together", linear=linear)
    trainer.predict(module, data, ckpt_path=checkpoint)
    x = samples_of(data, "south", "test")[0]
    assert torch.equal(found, module.replicas["south"].eval()(x).softmax(dim=1))
    assert len(found) == len(data.split("south").test)


def test_a_resumed_run_equals_a_straight_one_and_refuses_other_features(folder):
    def fit(rounds: int, path: str | None = None, **arguments: Any) -> dict[str, str]:
        trainer, module, data = make(folder / "together", **arguments)
        trainer.fit_loop.max_epochs = rounds
        trainer.fit(module, data, ckpt_path=path)
        trainer.save_checkpoint(f"{rounds}.ckpt")
        return {name: fingerprint(weights(module, name)) for name in CLINICS}

    straight, _ = fit(2), fit(1)
    assert fit(2, "1.ckpt") == straight
    with pytest.raises(Exception, match="with other features"):
        fit(2, "1.ckpt", statistics="own")


@pytest.mark.slow
def test_a_backend_gives_the_features_of_sums_in_the_open(folder):
    trainer, module, data = make(folder / "together", privacy=CKKS())
    trainer.fit(module, data)
    plain = make(folder / "together")[2]
    assert data.feature_names() == plain.feature_names()
    for name in CLINICS:
        torch.testing.assert_close(samples_of(data, name)[0], samples_of(plain, name)[0], atol=1e-4, rtol=1e-4)


def test_differential_privacy_does_not_cover_what_is_exact(folder):
    mechanism = GaussianMechanism(1.0, 1.0)
    both = {"update": mechanism, "levels": mechanism}
    trainer, module, data = make(folder / "together", differential_privacy=both)
    with pytest.raises(ChannelError, match=r"'levels'.*give statistics='own', or let a mechanism"):
        trainer.fit(module, data)
    levels = {"sex": ["f", "m"], "ward": ["a", "b", *CLINICS]}
    trainer, module, data = make(folder / "together", differential_privacy=both, categories=levels, statistics="own")
    with pytest.raises(ChannelError, match=r"names the channels \['levels'\], which this"):
        trainer.fit(module, data)


def unreadable(folder: str) -> None:
    """A process whose table is of no use."""
    own = Path(folder, f"site{os.environ['LOCAL_RANK']}")
    trainer, module, data = make(own, 4)
    trainer.fit(module, data)


def test_what_is_wrong_is_told_where_it_is_and_ends_the_others(folder):
    table = pd.read_csv(folder / "site1" / "east.csv")
    table.drop(columns="age").assign(secret=1).to_csv(folder / "site1" / "east.csv", index=False)
    ended = processes.run(unreadable, str(folder), ranks=4)
    assert all("['age'] at 'north' alone and ['secret'] at 'east' alone" in each.error for each in ended)
    table.assign(age=[f"{age} years" for age in table["age"]]).to_csv(folder / "site1" / "east.csv", index=False)
    ended = processes.run(unreadable, str(folder), ranks=4)
    assert "age (column of east.csv) must" in ended[1].error
    for rank in (0, 2, 3):
        assert "the process of ['east'] (rank 1) could not report its data" in ended[rank].error
        assert "years" not in ended[rank].error


def export(trainer: L.Trainer, module: FedGP, data: CSVDomains, suffix: str) -> torch.Tensor:
    """Write the model of a short run into a file; what the Trainer predicts with it."""
    trainer.fit(module, data)
    export_target(module, f"target{suffix}", data)
    return torch.cat([batch["south"] for batch in trainer.predict(module, data)])


def predict_as_the_card_says(rows: pd.DataFrame, **written: Any) -> dict[str, Any]:
    """What the code of the ONNX file's card, word for word, has read and predicted."""
    pytest.importorskip("onnxruntime")
    (code,) = re.findall("```python\n(.*?)```", Path("target.onnx.md").read_text(), re.DOTALL)
    rows.to_csv("rows.csv", index=False, **written)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def check_told(found: dict[str, Any], card: str) -> None:
    """What a file and its card tell of the model."""
    assert found["outputs"] == ["no", "yes"]
    assert found["method"] == "FedGP"
    assert found["rounds"] == 1
    assert [each["name"] for each in found["columns"]] == ["age", "marker", "sex", "ward"]
    assert "| ward | text, one of: a, b, east, north, south, west; empty where it is missing |" in card


def test_an_exported_model_takes_rows_as_they_are_in_the_table(folder):
    trainer, module, data = make(folder / "together")
    expected = export(trainer, module, data, ".pt2")
    rows = data.split("south").test.tolist()
    raw, table = data.raw_inputs(), data.table("south").iloc[rows]
    columns = [
        table[name].to_numpy(float)
        if levels is None
        else raw.codes(name, [*table[name].where(table[name].notna(), None)])
        for name, levels in raw.columns
    ]
    about = {"fedlit.json": ""}
    model = torch.export.load("target.pt2", extra_files=about).module()
    found = model(torch.tensor(np.stack(columns, axis=1), dtype=torch.float64))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    check_told(json.loads(about["fedlit.json"]), Path("target.pt2.md").read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("translations_kept")
def test_an_onnx_file_takes_rows_as_its_card_reads_them(folder):
    trainer, module, data = make(folder / "together")
    expected = export(trainer, module, data, ".onnx")
    names = predict_as_the_card_says(clinic("south").iloc[data.split("south").test.tolist()])
    np.testing.assert_allclose(names["predictions"], expected.numpy(), atol=1e-6, rtol=1e-5)
    session = names["session"]
    told = {key.removeprefix("fedlit."): text for key, text in session.get_modelmeta().custom_metadata_map.items()}
    unknown = names["rows"] | {"ward": np.array([["cellar"]], object)}
    (odd,) = session.run(None, {name: given[:1] for name, given in unknown.items()})
    assert np.isfinite(odd).all()
    check_told(told | {key: json.loads(told[key]) for key in STRUCTURED}, Path("target.onnx.md").read_text())


STRUCTURED = ("outputs", "columns", "rounds")
"""What an ONNX file has in JSON of what it tells of itself."""


def odd_clinic(name: str) -> pd.DataFrame:
    """A clinic whose wards are numbers, with a point where one is missing, and which writes otherwise than others."""
    table = clinic(name)
    table["ward"] = table["ward"].map({"a": 1, "b": 2} | dict.fromkeys(CLINICS, 3.0)).where(table.index % 9 != 0)
    return table.assign(sex=" " + table["sex"])


@pytest.mark.slow
def test_the_card_reads_a_file_as_its_model_was_trained(folder):
    written = {"sep": ";", "decimal": ",", "na_rep": "?"}
    for name in CLINICS:
        table = odd_clinic(name)
        table["ill"] = table["ill"].map({"no": "None", "yes": "NA"})
        table.to_csv(folder / "together" / f"{name}.csv", index=False, **written)
    options = {"separator": ";", "decimal": ",", "missing_values": ["?"], "categories": {"ward": None, "sex": None}}
    trainer, module, data = make(folder / "together", classes=["None", "NA"], **options)
    expected = export(trainer, module, data, ".onnx")
    assert (data.labels("north") >= 0).all()  # which are texts that stand for missing values elsewhere
    rows = odd_clinic("south").iloc[data.split("south").test.tolist()]
    assert rows["ward"].isna().any()
    names = predict_as_the_card_says(rows, **written)
    np.testing.assert_allclose(names["predictions"], expected.numpy(), atol=1e-6, rtol=1e-5)
