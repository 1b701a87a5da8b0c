"""The ``fedlit`` command as a user meets it: configurations, experiments, loggers, and what it says to mistakes."""

from __future__ import annotations

import atexit
import csv
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning_utilities.core.imports import RequirementCache

import processes
from fedlit.cli import main, run
from fedlit.cli.command import COMMANDS
from fedlit.privacy import PrivacyWarning
from stand_ins import DOMAINS, write_images

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
METHODS = sorted(path.stem for path in (CONFIGS / "methods").glob("*.yaml"))
ONE_BATCH = ["--trainer.fast_dev_run", "1"]
TWO_BATCHES = ["--trainer.fast_dev_run", "2"]
"""For all methods: auto-weights estimate a variance, which takes two."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty directory that has the real data beside it, as the repository has."""
    (tmp_path / "work").mkdir()
    shared = ROOT.parent / "shared"
    if shared.is_dir():
        (tmp_path / "shared").symlink_to(shared)
    monkeypatch.chdir(tmp_path / "work")


def needs_files(config: Path) -> None:
    """Skip where the data that a configuration names are not on this machine."""
    arguments = yaml.safe_load(config.read_text())["data"]["init_args"]
    place = arguments.get("path") or arguments.get("root")
    if place is not None and not Path(place).exists():
        pytest.skip(f"{config.name} reads {place}, which is not there: see data/README in the shared folder")


VARIANTS = (
    *(
        "adabn_autodial",
        "apfl",
        "co_mda",
        "fade",
        "fed_da_auto",
        "fed_dan_one_kernel",
        "fed_wdgrl",
        "fedprox",
        "fedrep",
    ),
    *("finetune_offline", "oracle", "target_only"),
)
"""Methods that are much like another in what their configurations say."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in VARIANTS else []) for name in METHODS]
)
def test_every_method_configuration_runs_two_batches(name: str) -> None:
    main(["fit", "--config", "data/digits", "--config", f"methods/{name}", *TWO_BATCHES])


def few_small_images(data: dict[str, Any]) -> list[str]:
    """Arguments with which a configuration's images are few and small; none if it has no images of its own."""
    if data["class_path"] != "fedlit.data.ImageDomains":
        return []
    for domain in Path(data["init_args"]["root"]).iterdir():
        for folder in sorted(domain.iterdir())[:3]:
            few = Path("few", domain.name, folder.name)
            few.mkdir(parents=True)
            for path in sorted(folder.iterdir())[:8]:
                (few / path.name).symlink_to(path.resolve())
    return ["--data.root=few", "--data.image_size=32", "--data.batch_size=3", "--data.num_workers=0"]


UNLIKE = {path.stem for path in (CONFIGS / "data").glob("*.yaml")} - {"digits", "terra_incognita", "vlcs"}
"""Without the digits, on which every method is trained, and what differs from PACS in its folders alone."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "heart_disease" else pytest.mark.slow) for name in sorted(UNLIKE)],
)
def test_data_configurations_run_one_batch(name: str) -> None:
    """Those that are like no other; test_data_configs.py builds them all."""
    config = CONFIGS / "data" / f"{name}.yaml"
    data = yaml.safe_load(config.read_text())["data"]
    if name in DOMAINS:
        write_images(Path(data["init_args"]["root"]), DOMAINS[name])
    needs_files(config)
    main(["fit", "--config", str(config), "--config", "methods/fedavg", *few_small_images(data), *ONE_BATCH])


COMPARED = ("fashion_mnist_noise_0.4_fedgp", "fashion_mnist_label_shift_0.0_fedgp")
"""Those of Fashion-MNIST that are run with all methods; their neighbours differ from them in one number."""

SHOWN = (*("first", "heart_fed_mmd", "heart_fedgp", "office_caltech_fedrftca"),)
"""Experiments of the default run: one of each kind of data, and of what methods send."""

ELSEWHERE = ("digits", "digits_fedavg")
"""Experiments that other tests of this file run, with all that they compare."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=[] if path.stem in SHOWN else [pytest.mark.slow])
        for path in sorted((CONFIGS / "experiments").glob("*.yaml"))
        if path.stem not in ELSEWHERE
    ],
)
def test_every_experiment_runs_two_batches(name: str) -> None:
    config = CONFIGS / "experiments" / f"{name}.yaml"
    needs_files(config)
    data = yaml.safe_load(config.read_text())["data"]
    axes = ["--seeds=[0]", f"--targets=[{data['init_args']['target']}]", *few_small_images(data)]
    if name.startswith("fashion_mnist") and name not in COMPARED:
        axes.append("--compare=null")
    main(["fit", "--config", f"experiments/{name}", *axes, *TWO_BATCHES])


def test_experiments_of_one_table_differ_in_their_shift_alone() -> None:
    for table in ("noise", "label_shift"):
        texts = set()
        for path in (CONFIGS / "experiments").glob(f"fashion_mnist_{table}_*_fedgp.yaml"):
            config = yaml.safe_load(path.read_text())
            key = "noise_level" if table == "noise" else "label_shift"
            assert float(path.stem.split("_")[-2]) == config["data"]["init_args"].pop(key)
            texts.add(json.dumps(config))
        assert len(texts) == 1


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "settings").glob("*.yaml")))
def test_every_setting_runs_one_batch_and_hears_whom_it_says(name: str) -> None:
    main(["fit", "--config", "data/digits", "--config", f"settings/{name}", *ONE_BATCH,
          "--model.init_args.num_frequencies=8", "--model.init_args.num_components=4"])  # fmt: skip


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "loggers").glob("*.yaml")))
def test_every_logger_configuration_gets_the_figures(name: str) -> None:
    pytest.importorskip({"wandb": "wandb", "tensorboard": "tensorboard"}[name])
    main(["fit", "--config", "data/digits", "--config", f"loggers/{name}", "--trainer.max_epochs=1"])
    assert any(path.is_file() for path in Path("runs").rglob("*"))


PRIVACY = sorted(path.stem for path in (CONFIGS / "privacy").glob("*.yaml"))
NEEDS = {"paillier": "phe", "bfv": "tenseal", "ckks": "tenseal", "differential": "dp_accounting"}


def needs_extra(privacy: str) -> None:
    if privacy in NEEDS:
        pytest.importorskip(NEEDS[privacy])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("masking", "ckks") else [pytest.mark.slow]) for name in PRIVACY]
)
def test_every_privacy_configuration_trains_and_says_what_it_hides(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_extra(name)
    small = ["--model.extractor.init_args.hidden=[8]", "--trainer.max_epochs=2"]
    config = ["--config", "experiments/digits_fedavg", "--config", f"privacy/{name}"]
    if name == "paillier":  # arithmetic, not secrecy
        options = "--trainer.strategy.init_args.privacy.init_args"
        small += [f"{options}.key_bits=512", f"{options}.insecure_test_keys=true"]
    main(["fit", *config, *small])
    printed = capsys.readouterr().out
    (path,) = Path("runs").rglob("privacy.json")
    report = json.loads(path.read_text())
    (channel,) = report["channels"]
    backend = {"masking": "PairwiseMasking", "paillier": "Paillier", "bfv": "BFV", "ckks": "CKKS"}.get(name, "Plain")
    assert channel["channel"] == "weights"
    assert channel["description"]["backend"] == backend
    assert (channel["bytes_keys"] > 0) == (backend != "Plain")
    for text in ("privacy report", "Not protected:", backend, f"{channel['bytes_up']:,}"):
        assert text in printed
    assert (report["epsilon_message"] is not None) == (name == "differential")
    if name == "differential":
        assert report["epsilon_message"] > 0
        curve = [row["privacy/epsilon"] for row in rows("runs/FedAvg/version_0/metrics.csv")]
        assert any(curve)


def test_exact_backends_train_bit_for_bit_like_the_plain_grid() -> None:
    for name in ("plain", "masking", "bfv"):
        needs_extra(name)
    small = ["--model.extractor.init_args.hidden=[8]", "--trainer.max_epochs=3"]
    for name in ("plain", "masking", "bfv"):
        main(["fit", "--config", "experiments/digits_fedavg", "--config", f"privacy/{name}", *small])
    digests = {json.loads(path.read_text())["target_sha256"] for path in Path("runs").rglob("summary.json")}
    assert len(list(Path("runs").rglob("summary.json"))) == 3
    assert len(digests) == 1


def test_backends_are_chosen_by_channel_on_the_command_line() -> None:
    masking = "{weights: {class_path: fedlit.privacy.PairwiseMasking, init_args: {modulus_bits: 64}}}"
    main(["fit", "--config", "experiments/digits_fedavg", "--trainer.max_epochs=1",
          f"--trainer.strategy.init_args.privacy={masking}"])  # fmt: skip
    (path,) = Path("runs").rglob("privacy.json")
    (channel,) = json.loads(path.read_text())["channels"]
    assert channel["description"]["backend"] == "PairwiseMasking"
    assert channel["description"]["bytes_per_number"] == 8


def rows(pattern: str) -> list[dict[str, str]]:
    """Rows of the one CSV file that ``pattern`` finds."""
    (path,) = Path().glob(pattern)
    with path.open() as file:
        return list(csv.DictReader(file))


def test_fit_prints_the_closing_table_and_writes_what_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "--config", "experiments/digits", "--trainer.max_epochs=2"])
    printed = capsys.readouterr().out
    summaries = {p.parts[-3]: json.loads(p.read_text()) for p in Path("runs").glob("*/version_0/summary.json")}
    assert set(summaries) == {"FedAvg", "SourceOnly"}
    for method, summary in summaries.items():
        assert method in printed
        assert f"{100 * summary['oracle_accuracy']:.1f}" in printed
        assert summary["rounds"] == 2
    booked = rows("runs/FedAvg/version_0/ledger.csv")
    sent = sum(int(row["bytes"]) for row in booked if row["channel"] == "weights")
    assert sent == summaries["FedAvg"]["bytes_by_channel"]["weights"]
    metrics = rows("runs/FedAvg/version_0/metrics.csv")
    for name in ("train/loss", "source/acc", "target/score", "oracle/target/acc", "comm/MB", "time/local_s"):
        assert any(row.get(name) for row in metrics), name


def test_targets_and_seeds_make_one_run_each(capsys: pytest.CaptureFixture[str]) -> None:
    axes = ["--targets=[all]", "--seeds=[0,1]", "--data.clients=[clean,noisy,fonts]"]
    main(["fit", "--config", "data/digits", *axes, "--trainer.max_epochs=1"])
    printed = capsys.readouterr().out
    found = [json.loads(p.read_text()) for p in Path("runs").rglob("summary.json")]
    assert {(run["target"], run["seed"]) for run in found} == {
        (t, s) for t in ("clean", "noisy", "fonts") for s in (0, 1)
    }
    assert "run 6 of 6" in printed
    assert "average" in printed
    assert "±" in printed


def test_sums_that_are_taken_for_several_targets_are_told_by_channel() -> None:
    with pytest.warns(PrivacyWarning, match="channel 'weights' is summed for the targets .* in the first round"):
        main(["fit", "--config", "data/digits", "--config", "privacy/masking", "--targets=[all]", *ONE_BATCH])


def test_sums_of_compared_methods_over_other_clients_are_told_by_channel() -> None:
    """A labelled target trains in FedAvg and not in SourceOnly: what it sends first is the difference of two sums."""
    arguments = ["--config", "data/digits", "--config", "privacy/masking", "--data.target_labels=1.0", *ONE_BATCH]
    with pytest.warns(PrivacyWarning, match=r"with FedAvg and the same seed: .* reveal what \['fonts'\] sent"):
        main(["fit", *arguments, "--model=FedAvg", "--compare=[fedlit.methods.SourceOnly]"])


def test_methods_are_compared_with_arguments_of_their_own_under_names_that_tell_them_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """FedProx twice, once with other data and more rounds: the summaries say which is which, and so does the table."""
    compare = """
      - class_path: fedlit.methods.FedProx
        init_args: {mu: 0.5}
      - class_path: fedlit.methods.FedProx
        init_args: {mu: 1.0, optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.5}}}
        name: long
        data: {target_labels: 1.0}
        trainer: {max_epochs: 2}
      - fedlit.methods.SourceOnly
    """
    Path("compare.yaml").write_text(f"trainer: {{max_epochs: 1}}\ncompare:{compare}")
    main(["fit", "--config", "experiments/digits", "--config", "compare.yaml"])
    printed = capsys.readouterr().out
    summaries = [json.loads(path.read_text()) for path in Path("runs").rglob("summary.json")]
    assert {run["method"]: run["rounds"] for run in summaries} == {
        "FedAvg": 1, "FedProx(mu=0.5)": 1, "long": 2, "SourceOnly": 1,
    }  # fmt: skip
    assert "run 2 of 4, less than a minute left: FedProx(mu=0.5): --model=fedlit.methods.FedProx" in printed
    table = printed[printed.index("target accuracy (oracle)") :]
    assert all(run["method"] in table for run in summaries)
    configs = [yaml.safe_load(path.read_text()) for path in sorted(Path("runs/FedProx").rglob("config.yaml"))]
    few, many = configs
    assert (few["model"]["init_args"]["mu"], few["data"]["init_args"]["target_labels"]) == (0.5, 50)
    assert few["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.1  # the configuration's
    assert (many["model"]["init_args"]["mu"], many["data"]["init_args"]["target_labels"]) == (1.0, 1.0)
    assert many["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.5


def test_the_command_line_goes_before_what_an_entry_of_compare_presets() -> None:
    compare = "[{class_path: fedlit.methods.FedProx, trainer: {max_epochs: 3}, data: {target_labels: 1.0}}]"
    main(["fit", "--config", "experiments/digits", "--trainer.max_epochs=1", f"--compare={compare}"])
    summaries = [json.loads(path.read_text()) for path in Path("runs").rglob("summary.json")]
    assert {run["method"]: run["rounds"] for run in summaries} == {"FedAvg": 1, "FedProx": 1}
    (config,) = Path("runs/FedProx").rglob("config.yaml")
    assert yaml.safe_load(config.read_text())["data"]["init_args"]["target_labels"] == 1.0


def test_an_entry_of_compare_may_not_be_called_like_the_configured_method() -> None:
    with pytest.raises(SystemExit, match="two methods of this experiment are called 'FedAvg'"):
        main(["fit", "--config", "experiments/digits", "--compare=[fedlit.methods.FedAvg]"])


def test_the_seed_decides_the_result_and_repeats_it() -> None:
    def accuracy(seed: int) -> float:
        before = set(Path("runs").rglob("summary.json"))
        main(["fit", "--config", "data/digits", "--trainer.max_epochs=1", f"--seed_everything={seed}"])
        (new,) = set(Path("runs").rglob("summary.json")) - before
        return float(json.loads(new.read_text())["target_score"])

    assert accuracy(1) == accuracy(1)
    assert accuracy(1) != accuracy(2)


def test_resuming_from_a_checkpoint_continues_the_run() -> None:
    run = ["fit", "--config", "data/digits", "--config", "methods/fedprox"]
    main([*run, "--trainer.max_epochs=4"])
    main([*run, "--trainer.max_epochs=2"])
    (half,) = Path("runs/FedProx/version_1").rglob("*.ckpt")
    checkpoint = torch.load(half, weights_only=True)
    checkpoint["server"]["clock"]["trained"] += 1000.0  # as if it had trained that long
    torch.save(checkpoint, "longer.ckpt")
    main([*run, "--trainer.max_epochs=4", "--ckpt_path=longer.ckpt"])
    (straight,) = Path("runs/FedProx/version_0").rglob("*.ckpt")
    (resumed,) = Path("runs/FedProx/version_2").rglob("*.ckpt")
    spent = [json.loads(Path(f"runs/FedProx/version_{n}/summary.json").read_text())["seconds_total"] for n in (1, 2)]
    timer = torch.load(half, weights_only=True)["server"]["clock"]
    assert sum(timer["before"].values()) < timer["trained"] < spent[0]
    assert spent[1] > 1000 + timer["trained"]
    one, two = (torch.load(path, weights_only=True)["clients"] for path in (straight, resumed))
    assert one.keys() == two.keys()
    for client in one:
        torch.testing.assert_close(two[client]["weights"], one[client]["weights"], rtol=0, atol=0)


def test_no_run_takes_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=runs", "--trainer.logger.version=one"]
    run = ["fit", "--config", "data/digits", "--trainer.max_epochs=1", *logger]
    main(run)
    (metrics,) = Path("runs").rglob("metrics.csv")
    before = metrics.read_text()
    (checkpoint,) = Path("runs").rglob("*.ckpt")
    for again in (run, [*run, f"--ckpt_path={checkpoint}"], ["test", *run[1:], f"--ckpt_path={checkpoint}"]):
        with pytest.raises(SystemExit, match=r"version 'one' of CSVLogger .*metrics.csv' would be deleted"):
            main(again)
    assert metrics.read_text() == before
    with pytest.raises(SystemExit, match=r"version 'two' of CSVLogger .* names one run, but this is several"):
        main([*run, "--trainer.logger.version=two", "--seeds=[1, 2]"])
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_RUN_ID", "three")
    with pytest.raises(SystemExit, match=r"version 'three' of WandbLogger .* names one run, but this is several"):
        main(["fit", "--config", "data/digits", "--config", "loggers/wandb", "--seeds=[1, 2]"])


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_the_other_subcommands_run_from_a_checkpoint(command: str) -> None:
    main(["fit", "--config", "data/digits", "--trainer.max_epochs=1"])
    (path,) = Path("runs").rglob("*.ckpt")
    main([command, "--config", "data/digits", f"--ckpt_path={path}"])
    if command == "predict":
        predicted = rows("runs/SourceOnly/version_1/predictions.csv")
        assert len(predicted) == 120  # the target's test samples
        assert all(
            float(row[row["predicted"]]) == max(float(row[str(digit)]) for digit in range(10)) for row in predicted
        )


def test_what_wandb_agents_write_is_understood() -> None:
    tokens = ["trainer.max_epochs=1", "data.batch_size=16", "model.classifier=None"]
    main(["fit", "--config", "data/digits", *tokens])
    (config,) = Path("runs").rglob("config.yaml")
    written = yaml.safe_load(config.read_text())
    assert written["data"]["init_args"]["batch_size"] == 16
    assert written["trainer"]["max_epochs"] == 1
    assert written["model"]["init_args"]["classifier"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.wieghting=uniform"], "wieghting"),
        (["--trainer.strategy.local_setps=3"], "local_setps"),
        (["--trainer.strategy.rounds_per_epoch=0"], "fedlit: ValueError: rounds_per_epoch must be at least 1, got 0"),
        (["--data.batch_size=0"], "batch_size must be at least 1, got 0"),
        (["--data.target=nowhere"], "nowhere"),
        (["--data.clients=[fonts]"], "at least 2 clients"),
        (["--data.clients=[clean,clean,fonts]"], "clean"),
        (["--model.clients=[a,b]"], "taken from the data module"),
        (["--model.num_classes=3"], "taken from the data module"),
        (
            ["--model={class_path: FedProx, init_args: {num_classes: 3}}"],
            "fedlit: model.init_args.num_classes: clients",
        ),
        (["--model", "{class_path: FedProx, init_args: {task: x}}"], "fedlit: model.init_args.task: clients, target"),
        (["--model.init_args={target: a}"], "fedlit: model.init_args.target: clients, target"),
        (["--data=fedlit.data.FeatureDomains", "--data.path=missing.npz"], "missing.npz"),
        (["--data=fedlit.data.ImageDomains", "--data.root=missing"], "missing"),
        (["--config=missing.yaml"], "missing.yaml"),
        (["--model=fedlit.methods.Oracle"], "target_labels"),
        (["--compare=[fedlit.methods.Nothing]"], "Nothing"),
        (["--compare=[{init_args: {mu: 0.1}}]"], "an entry of compare must be a class path or a mapping with"),
        (
            ["--compare=[{class_path: fedlit.methods.FedProx, mu: 0.1}]"],
            "mu: stands beside class_path: put it below init_args",
        ),
        (["--compare=[{class_path: fedlit.methods.FedProx, init_args: {mu: -1}}]"], "mu"),
        (["--compare=[{class_path: FedProx, init_args: {target: a}}]"], "taken from the data module"),
        (["--compare=[{class_path: FedProx, data: {target_labels: 9}}, {class_path: FedProx}]"], "called 'FedProx'"),
        (["--ckpt_path=nowhere.ckpt"], "resumes one run, but this is 2 runs"),
        (["--trainer.logger=false"], "would overwrite each other's files"),
        (
            ["--trainer.logger=lightning.pytorch.loggers.WandbLogger", "--trainer.logger.id=mine"],
            "version 'mine' of WandbLogger (trainer.logger or WANDB_RUN_ID) names one run",
        ),
        (["--ckpt_path=nowhere.ckpt", "--compare=null"], "'nowhere.ckpt' is not a file"),
        (["--model=FedProxx"], "there is no class 'FedProxx': did you mean 'FedProx'?"),
        (["--seeds=[1,0,1]"], "fedlit: seeds has 1 twice"),
        (["--seeds=[-1]"], "fedlit: seeds must be between 0 and 4294967295, got -1"),
        (["--seed_everything=-1"], "fedlit: seed_everything: -1 is not in bounds"),
        (["--targets=[fonts,fonts]"], "fedlit: targets has 'fonts' twice"),
        (["--model.optimizer.lr=-1"], "fedlit: model.init_args.optimizer cannot be made: Invalid learning rate: -1.0"),
        (["--trainer.max_epochs=-2"], "fedlit: MisconfigurationException: `max_epochs` must be"),
        (
            ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=oracle/target/acc"],
            "fedlit: LabelGuardError: ModelCheckpoint(monitor='oracle/target/acc') would select",
        ),
        (["--model.extractor.in_features=65"], "in_features must be the number of values of an input, 64, got 65"),
    ],
)
def test_mistakes_are_told_by_name(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, ValueError)) as caught:
        main(["fit", "--config", "experiments/digits", *ONE_BATCH, *arguments])
    assert message in str(caught.value) + capsys.readouterr().err


def test_a_mistake_prints_what_matters_and_not_all_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config=data/digits", "--model=FedProxx"])
    printed = capsys.readouterr().err + str(caught.value)
    assert "FedProxx" in printed
    assert len(printed.splitlines()) < 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare=[FedProxx]"], "FedProxx"),
        (["--compare=[FedProxx,FedProx]"], "FedProxx"),
        (["--compare=[TargetOnly,FedProx]"], "fedlit: TargetOnly trains on target labels"),
        (["--compare=[{class_path: FedProx, init_args: {muu: 1}}]"], "muu"),
        (["--targets=[fonts,foo]"], "fedlit: targets ['foo'] are not among the clients ['clean', 'blended', 'fonts'"),
        (["--compare=[TargetOnly]"], "fedlit: TargetOnly trains on target labels, but data.init_args.target_labels is"),
        (["--compare=[{class_path: FedProx, data: {batch_sise: 3}}]"], "batch_sise"),
        (["--compare=[{class_path: FedProx, trainer: {max_epochs: many}}]"], "max_epochs"),
        (["--compare=[FedAvg, {class_path: FedProx, init_args: {num_classes: 3}}]"], "taken from the data module"),
        (["--compare=[{class_path: FedGP, name: mine}]"], "fedlit: mine trains on target labels, but data.init_args"),
        (["--compare=[fedlit.methods.FedProx]", "--data=FeatureDomains", "--data.path=gone.npz", "--targets=[all]"],
         "fedlit: ValueError: no features at path='gone.npz'"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_later_run_is_found_before_the_first(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config=data/digits", *ONE_BATCH, *arguments])
    assert message in str(caught.value) + capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("subcommand", "path"),
    [*product(["validate", "test", "predict"], [None]), *product(["fit", "test"], ["last", "best"])],
)
def test_nothing_is_measured_of_random_weights(subcommand: str, path: str | None) -> None:
    given = [] if path is None else [f"--ckpt_path={path}"]
    with pytest.raises(
        SystemExit, match=rf"fedlit: ({subcommand} without --|)ckpt_path.* give the path of a checkpoint"
    ):
        main([subcommand, "--config=data/digits", *given])


def test_a_file_that_is_no_checkpoint_is_refused() -> None:
    Path("notes.ckpt").write_text("remember the milk")
    with pytest.raises(SystemExit, match=r"fedlit: ckpt_path 'notes\.ckpt' is no checkpoint"):
        main(["test", "--config=data/digits", "--ckpt_path=notes.ckpt"])


def test_a_checkpoint_beyond_the_last_round_is_said_in_a_line() -> None:
    run = ["fit", "--config=data/digits"]
    main([*run, "--trainer.max_epochs=3"])
    (path,) = Path("runs").rglob("*.ckpt")
    with pytest.raises(SystemExit, match="fedlit: MisconfigurationException: You restored a checkpoint"):
        main([*run, "--trainer.max_epochs=1", f"--ckpt_path={path}"])


@pytest.fixture
def _handlers_of_signals_as_before() -> Iterator[None]:
    """Lightning ignores SIGINT once it has had one."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    # where the tests themselves run in the background, a shell has told them to ignore SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers_of_signals_as_before")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_a_run_with_a_word_and_the_status_of_shells(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not as a success, with which a script would go on, and without a summary, as the run has not finished."""

    over = threading.Event()

    def send_when_there_is_a_checkpoint() -> None:
        while not over.wait(0.1):
            if [*Path("runs").rglob("*.ckpt")]:
                os.kill(os.getpid(), getattr(signal, name))
                return

    sender = threading.Thread(target=send_when_there_is_a_checkpoint)
    sender.start()
    try:
        with pytest.raises(SystemExit) as ended:
            main(["fit", "--config=data/digits", "--trainer.max_epochs=1000", "--seeds=[0,1]"])
    finally:
        over.set()
        sender.join()
    assert ended.value.code == 128 + getattr(signal, name)
    assert f"fedlit: ended by {name}" in capsys.readouterr().err
    assert not [*Path("runs").rglob("summary.json")]


def test_a_typo_in_a_file_is_told_by_name() -> None:
    config = yaml.safe_load((CONFIGS / "data" / "digits.yaml").read_text())
    config["model"]["init_args"]["optimiser"] = None
    Path("typo.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit, match=r"typo.yaml: .*'optimiser': did you mean 'optimizer'"):
        main(["fit", "--config", "typo.yaml"])


def test_what_the_data_say_is_refused_wherever_a_file_has_it() -> None:
    linked = {"model": {"class_path": "FedAvg", "init_args": {"num_classes": 3}}}
    forms = {
        "model.init_args.num_classes": linked,
        "fit.model.init_args.num_classes": {"fit": linked},
        "model.num_classes": {"model": {"num_classes": 3}},
        "model.init_args.target": {"model.init_args.target": "fonts"},
        "model.init_args.clients": {"model": {"init_args": {"clients": [{"name": "fonts"}]}}},
    }
    for key, content in forms.items():
        path = Path("mu=0.1", "some.yaml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(content))
        for given in (["--config", str(path)], [f"--config={path}"]):
            with pytest.raises(SystemExit, match=f"fedlit: {key} in {path}: clients, target"):
                main(["fit", "--config=data/digits", *given])
    Path("model.yaml").write_text(yaml.safe_dump(linked["model"]))
    with pytest.raises(SystemExit, match=r"fedlit: model.init_args.num_classes: clients, target"):
        main(["fit", "--config=data/digits", "--model=model.yaml"])


def test_a_model_may_be_a_long_text() -> None:
    extractor = {"class_path": "fedlit.models.MLP", "init_args": {"in_features": 64, "hidden": [8] * 60}}
    model = {"class_path": "FedProx", "init_args": {"extractor": extractor, "mu": 0.1}}
    assert len(yaml.safe_dump(model, default_flow_style=True)) > 255
    main(["fit", "--config=data/digits", *ONE_BATCH, "--model", json.dumps(model)])


def test_a_file_that_is_no_yaml_is_told_by_name() -> None:
    Path("broken.yaml").write_text("model: [")
    with pytest.raises(SystemExit, match=r"fedlit: broken.yaml, line 1, column 9: this is no YAML, and must be mended"):
        main(["fit", "--config", "broken.yaml"])


def test_a_full_disk_is_named_and_no_other_failure_of_files_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(number: int) -> Any:
        def fails(_: list[str]) -> None:
            raise OSError(number, os.strerror(number), "last.ckpt")

        return fails

    monkeypatch.setitem(COMMANDS, "list", failing(errno.ENOSPC))
    with pytest.raises(SystemExit, match=r"no space left for 'last.ckpt' .*: make some, and give the same command"):
        main(["list"])
    monkeypatch.setitem(COMMANDS, "list", failing(errno.EACCES))
    with pytest.raises(PermissionError):
        main(["list"])


def test_an_experiment_before_its_subcommand_is_refused() -> None:
    with pytest.raises(SystemExit, match="--config must come after fit"):
        main(["--config", "experiments/digits", "fit"])
    Path("whole.yaml").write_text(yaml.safe_dump({"test": yaml.safe_load((CONFIGS / "data/digits.yaml").read_text())}))
    with pytest.raises(SystemExit, match="test without --ckpt_path"):
        main(["--config", "whole.yaml", "test", "--trainer.default_root_dir", "fit"])


def test_what_the_user_gives_takes_the_place_of_what_a_method_presets() -> None:
    compare = "--compare=[{class_path: FedProx, trainer: {max_epochs: 3}, data: {batch_size: 16}}]"
    Path("late.yaml").write_text(yaml.safe_dump({"trainer": {"log_every_n_steps": 2}}))
    main(["fit", "--config=data/digits", compare, "--trainer.max_epochs=1", "--config=late.yaml"])
    summary, config = (next(Path("runs/FedProx").rglob(name)).read_text() for name in ("summary.json", "config.yaml"))
    assert json.loads(summary)["rounds"] == 1
    assert yaml.safe_load(config)["data"]["init_args"]["batch_size"] == 16


@pytest.mark.parametrize(
    "given", ["--data.init_args.batch_size=24", "--trainer.strategy.local_steps=7", "--data.batch_size=24"]
)
def test_it_does_so_before_a_configuration_and_in_any_spelling(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    preset = {"trainer": {"strategy": {"class_path": "fedlit.FederatedStrategy", "init_args": {"local_steps": 3}}}}
    preset |= {"class_path": "FedProx", "data": {"batch_size": 16}}
    Path("late.yaml").write_text(yaml.safe_dump({"compare": [preset], "trainer": {"max_epochs": 1}}))
    main(["fit", "--config=data/digits", given, "--config", "late.yaml"])
    (path,) = Path("runs/FedProx").rglob("config.yaml")
    config = yaml.safe_load(path.read_text())
    found = (config["data"]["init_args"]["batch_size"], config["trainer"]["strategy"]["init_args"]["local_steps"])
    assert found == ((16, 7) if "local_steps" in given else (24, 3))
    assert ("--data.batch_size=16" in capsys.readouterr().out) == ("local_steps" in given)


def test_callbacks_of_a_kind_take_the_place_of_fedlits(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my_timer.py").write_text("from fedlit.callbacks import RoundTimer\nclass Timer(RoundTimer): pass\n")
    monkeypatch.syspath_prepend(".")
    mine = ["--trainer.callbacks+=my_timer.Timer", "--trainer.callbacks+=RichProgressBar"]
    main(["fit", "--config=data/digits", "--trainer.max_epochs=1", *mine])
    (table,) = Path("runs").rglob("metrics.csv")
    assert "time/round_s" in table.read_text()
    assert len([*Path("runs").rglob("summary.json")]) == 1


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr("lightning.fabric.loggers.tensorboard._TENSORBOARD_AVAILABLE", False)
    monkeypatch.setattr("lightning.fabric.loggers.tensorboard._TENSORBOARDX_AVAILABLE", False)
    with pytest.raises(SystemExit, match=r"fedlit\[tensorboard\]"):
        main(["fit", "--config", "data/digits", "--config", "loggers/tensorboard", "--trainer.max_epochs=1"])


def test_a_missing_wandb_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", RequirementCache("wandb>=999999"))
    with pytest.raises(SystemExit, match=r"fedlit\[wandb\]"):
        main(["fit", "--config", "data/digits", "--config", "loggers/wandb", "--trainer.max_epochs=1"])


@pytest.mark.parametrize(
    ("library", "privacy", "message"),
    [
        ("tenseal", "bfv", "fedlit: BFV and CKKS need TenSEAL: pip install 'fedlit[he]'"),
        ("tenseal", "ckks", "fedlit: BFV and CKKS need TenSEAL: pip install 'fedlit[he]'"),
        ("phe", "paillier", "fedlit: Paillier keys need the phe library: pip install 'fedlit[paillier]'"),
        (
            "dp_accounting",
            "differential",
            "fedlit: accounting for differential privacy needs: pip install 'fedlit[dp]'",
        ),
    ],
)
def test_backends_name_the_extra_that_they_lack_before_anything_is_trained(
    library: str, privacy: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", "experiments/digits_fedavg", "--config", f"privacy/{privacy}"])
    assert caught.value.code == message
    assert "round 1" not in capsys.readouterr().out


STRATEGY = "trainer.strategy.init_args"


@pytest.mark.parametrize(
    ("privacy", "argument", "message"),
    [
        (
            "plain",
            "privacy.init_args.codec.init_args.bound=-1",
            f"ValueError: bound must be positive and finite, got -1.0 ({STRATEGY}.privacy.init_args.codec.bound)",
        ),
        (
            "differential",
            "differential_privacy.init_args.clip_norm=-1",
            "ValueError: clip_norm (C) must be positive and finite, got -1.0 "
            f"({STRATEGY}.differential_privacy.clip_norm)",
        ),
        (  # what is inside a mapping from channels has no key
            "differential",
            "privacy={weights: {class_path: fedlit.privacy.Plain, init_args: {codec: {bound: -1}}}}",
            "ValueError: bound must be positive and finite, got -1.0",
        ),
    ],
)
def test_a_constructor_deep_in_the_configuration_is_heard_alone(privacy: str, argument: str, message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", "experiments/digits_fedavg", "--config", f"privacy/{privacy}",
              f"--{STRATEGY}.{argument}"])  # fmt: skip
    assert caught.value.code == f"fedlit: {message}"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("codec.init_args={fraction_bits: 20, bound: 0.01}", "RangeError: client 'clean', channel 'weights': "),
        ("threshold=77", "ChannelError: "),
    ],
)
def test_what_a_backend_refuses_in_training_is_told_without_a_traceback(argument: str, message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", "experiments/digits_fedavg", "--config", "privacy/masking",
              f"--{STRATEGY}.privacy.init_args.{argument}"])  # fmt: skip
    assert str(caught.value.code).startswith(f"fedlit: {message}")
    assert "\n" not in str(caught.value.code)


def test_short_names_are_enough() -> None:
    network = ["--model.extractor=Features", "--model.extractor.in_features=64"]
    main(["fit", "--data=Digits", "--data.flatten=true", "--model=SourceOnly", *network, *ONE_BATCH])


def test_help_prints_the_class_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--model.help", "FedProx"])
    printed = capsys.readouterr().out
    assert "Strength of the proximal term" in printed
    assert "Rounds of FedAvg over the sources" in printed


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_command_runs_on_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    """As it does in one, which is this one; each is an interpreter of its own, with its own seed of string hashes."""
    arguments = ["fit", "--config", "experiments/digits", "--trainer.max_epochs=2", "--compare=null"]
    main([*arguments, "--trainer.devices=1"])
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [Path(sys.executable).with_name("fedlit"), *arguments, "--trainer.devices=2"],
        capture_output=True, text=True, timeout=120, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for printed in (capsys.readouterr().out, done.stdout):
        assert printed.count("target accuracy") == 1
    alone, together = (Path(f"runs/FedAvg/version_{number}") for number in (0, 1))
    assert (alone / "ledger.csv").read_text() == (together / "ledger.csv").read_text()
    one, two = (json.loads((run / "summary.json").read_text()) for run in (alone, together))
    assert [one[key] == two[key] for key in ("target_sha256", "oracle_accuracy", "rounds")] == [True] * 3


def test_files_go_to_the_folder_of_csv_files_wherever_it_stands_in_a_list() -> None:
    loggers = [{"class_path": f"lightning.pytorch.loggers.{name}", "init_args": {"save_dir": folder}}
               for name, folder in (("TensorBoardLogger", "board"), ("CSVLogger", "table"))]  # fmt: skip
    Path("log.yaml").write_text(yaml.safe_dump({"trainer": {"logger": loggers}}))
    main(["fit", "--config", "experiments/digits", "--config", "log.yaml", "--trainer.max_epochs=1"])
    assert len(list(Path("table").rglob("summary.json"))) == 2


def test_words_of_other_commands_are_left_as_they_are() -> None:
    with pytest.raises(SystemExit, match=r"'mu=0\.1/config\.yaml' is not there"):
        main(["export", "mu=0.1"])


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["-h"], []):
        main(words)
        printed = capsys.readouterr().out
        for command in (*COMMANDS, "fit", "validate", "test", "predict"):
            assert f"\n  {command} " in printed


def in_a_process(words: list[str]) -> None:
    """The command, with something to do at the end of the process."""
    atexit._clear()  # what the process has to do that this one is a fork of
    atexit.register(print, "the end", flush=True)
    sys.argv = ["fedlit", *words]
    run()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["list", "models"], 0, "SmallCNN"),
        (["export", "nowhere"], 1, "fedlit: RUN_DIR must be a folder that fedlit fit left"),
        (["list", "nothing"], 2, "argument kind: invalid choice: 'nothing'"),
    ],
)
def test_the_process_of_a_command_ends_with_its_status_and_as_processes_do(
    words: list[str], status: int, said: str
) -> None:
    (ended,) = processes.run(in_a_process, words)
    assert ended.exit_code == status
    assert said in ended.output
    assert ended.output.endswith("the end\n")


def test_the_command_says_how_many_labels_of_the_target_are_kept(tmp_path: Path) -> None:
    """In a process of its own, as a test's has handlers that the command lacks."""
    words = ["fit", "--config=data/heart_disease", "--config=methods/fedavg", "--trainer.fast_dev_run=1"]
    command = [sys.executable, "-m", "fedlit.cli", *words, "--data.target_labels=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "target 'va_long_beach' keeps the labels of 1 of its 140 training samples" in done.stderr
