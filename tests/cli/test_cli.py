"""The ``fedlit`` command as a user meets it: configurations, loggers, checkpoints, signals, and what it refuses."""

from __future__ import annotations

import atexit
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
from commands import instantiated, parsed, refusal, rows, summaries
from fedlit.cli import main, run
from fedlit.cli.arguments import normalise
from fedlit.cli.command import COMMANDS
from fedlit.cli.experiment import Experiment
from fedlit.papers.stand_ins import STAND_INS
from fedlit.privacy import PrivacyWarning
from refused import slow
from stand_ins import PAPERS

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
ONE_BATCH = ["--trainer.fast_dev_run=1"]
TWO_BATCHES = ["--trainer.fast_dev_run=2"]  # auto-weights estimate a variance, which takes two
STRATEGY = "trainer.strategy.init_args"
NETWORK = "--model.extractor.init_args.hidden=[8]"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    shared = ROOT.parent / "shared"
    if shared.is_dir():
        (tmp_path / "shared").symlink_to(shared)
    monkeypatch.chdir(tmp_path / "work")


def configs(kind: str, without: tuple[str, ...] = ()) -> list[Any]:
    """Names of shipped configurations, which do not run by default."""
    names = sorted(path.stem for path in (CONFIGS / kind).glob("*.yaml") if path.stem not in without)
    return [*map(slow, names)]


def needs_files(config: Path) -> None:
    """Skip where the data that a configuration names are not on this machine."""
    arguments = yaml.safe_load(config.read_text()).get("data", {}).get("init_args", {})
    place = arguments.get("path") or arguments.get("root")
    if place is not None and not Path(place).exists():
        pytest.skip(f"{config.name} reads {place}, which is not there: see data/README in the shared folder")


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


@pytest.mark.parametrize(
    "name", ["methods/co_mda", *map(slow, ("methods/adabn_autodial", "methods/kd3a", "settings/fedrf_tca_v"))]
)
def test_configurations_of_methods_and_settings_make_their_objects(name):
    """Those of sweeps make theirs in `test_sweeps`, and `check` reads all of them in `test_mistakes`."""
    (made,) = instantiated("--config", "data/digits", "--config", name)
    assert (
        type(made.model).__name__
        == yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["model"]["class_path"].rpartition(".")[2]
    )


@pytest.mark.parametrize("name", configs("methods"))
def test_every_method_configuration_runs_two_batches(name):
    main(["fit", "--config", "data/digits", "--config", f"methods/{name}", *TWO_BATCHES])


@pytest.mark.parametrize(
    "name", configs("data", without=("adaptiope", "digits", "office_home", "terra_incognita", "vlcs"))
)
def test_data_configurations_run_one_batch(name):
    config = CONFIGS / "data" / f"{name}.yaml"
    data = yaml.safe_load(config.read_text())["data"]
    few = []
    if name in PAPERS:
        few = [f"--{key}={value}" for key, value in STAND_INS[PAPERS[name]](Path("files")).items()]
    else:
        needs_files(config)
    if data["class_path"] == "fedlit.data.ImageDomains":
        few += ["--data.image_size=32", "--data.batch_size=5", "--data.num_workers=0"]
    main(["fit", "--config", str(config), "--config", "methods/fedavg", *few, *ONE_BATCH])


@pytest.mark.parametrize("name", configs("experiments", without=("digits", "digits_fedavg")))
def test_every_experiment_runs_two_batches(name):
    config = CONFIGS / "experiments" / f"{name}.yaml"
    needs_files(config)
    data, before = yaml.safe_load(config.read_text()).get("data", {}), []
    if "class_path" not in data:  # it comes after a configuration of data
        before = ["--config", "data/digits", "--data.target_labels=50"]
        data = yaml.safe_load((CONFIGS / "data" / "digits.yaml").read_text())["data"]
    axes = ["--seeds=[0]", f"--targets=[{data['init_args']['target']}]", *few_small_images(data)]
    if name.endswith("images_feddadil"):
        axes.append("--model.encoder.batch_size=3")
    main(["fit", *before, "--config", f"experiments/{name}", *axes, *TWO_BATCHES])


@pytest.mark.parametrize("name", configs("settings"))
def test_every_setting_runs_one_batch(name):
    small = ["--model.init_args.num_frequencies=8", "--model.init_args.num_components=4"]
    if name == "fedrf_tca_paper":
        small.append("--model.init_args.classifier.init_args.in_features=4")
    small = small if name.startswith("fedrf_tca") else ["--model.init_args.warmup_rounds=0"]
    main(["fit", "--config", "data/digits", "--config", f"settings/{name}", *ONE_BATCH, *small])


NEEDS = {"paillier": "phe", "threshold_paillier": "phe", "bfv": "tenseal", "ckks": "tenseal"}
BACKENDS = {
    "paillier": "Paillier", "threshold_paillier": "ThresholdPaillier", "bfv": "BFV", "ckks": "CKKS",
    "robust": "RobustPlain",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", configs("privacy", without=("masking",)))
def test_every_privacy_configuration_trains_and_reports_what_it_hides(name, capsys):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    small = [NETWORK, "--trainer.max_epochs=2"]
    if "paillier" in name:  # arithmetic, not secrecy
        small += [f"--{STRATEGY}.privacy.init_args.{each}" for each in ("key_bits=512", "insecure_test_keys=true")]
    main(["fit", "--config", "experiments/digits_fedavg", "--config", f"privacy/{name}", *small])
    check_privacy(Path("runs/FedAvg/version_0"), capsys.readouterr().out, BACKENDS.get(name, "Plain"))
    report = json.loads(Path("runs/FedAvg/version_0/privacy.json").read_text())
    assert (report["epsilon_message"] is not None) == (name == "differential")
    if name == "differential":
        assert report["epsilon_message"] > 0
        assert any(row["privacy/epsilon"] for row in rows("runs/FedAvg/version_0/metrics.csv"))


def check_privacy(folder: Path, printed: str, backend: str) -> None:
    (channel,) = json.loads((folder / "privacy.json").read_text())["channels"]
    assert channel["channel"] == "weights"
    assert channel["description"]["backend"] == backend
    assert (channel["bytes_keys"] > 0) == (backend not in ("Plain", "RobustPlain"))
    for text in ("privacy report", "Not protected:", backend, f"{channel['bytes_up']:,}"):
        assert text in printed


def test_fit_prints_the_closing_table_and_writes_what_it_measured(reported):
    digits, printed = reported / "runs" / "digits", (reported / "printed.txt").read_text()
    check_privacy(digits / "FedAvg" / "version_0", printed, "PairwiseMasking")
    by_method = {run["method"]: run for run in summaries(str(digits))}
    assert set(by_method) == {"FedAvg", "SourceOnly"}
    for method, summary in by_method.items():
        assert method in printed
        assert f"{100 * summary['oracle_accuracy']:.1f}" in printed
        assert summary["rounds"] == 2
    booked = rows(digits / "FedAvg" / "version_0" / "ledger.csv")
    sent = sum(int(row["bytes"]) for row in booked if row["channel"] == "weights")
    assert sent == by_method["FedAvg"]["bytes_by_channel"]["weights"]
    metrics = rows(digits / "FedAvg" / "version_0" / "metrics.csv")
    for name in ("train/loss", "source/acc", "target/score", "oracle/target/acc", "comm/MB", "time/local_s"):
        assert any(row.get(name) for row in metrics), name


def test_targets_and_seeds_make_one_run_each():
    axes = ["--targets=[all]", "--seeds=[0,1]", "--data.clients=[clean,noisy,fonts]"]
    experiment = Experiment(normalise(["fit", "--config", "data/digits", *axes]))
    assert [(run.target, run.seed) for run in experiment.runs] == [*product(("clean", "noisy", "fonts"), (0, 1))]


def test_sums_that_reveal_beside_those_of_another_target_are_reported():
    words = ["--config", "data/heart_disease", "--config", "privacy/masking", "--targets=[hungary,switzerland]"]
    with pytest.warns(PrivacyWarning, match="channel 'weights' is summed for the targets .* in the first round"):
        main(["fit", *words, *ONE_BATCH])


def checkpoint(run: Path, epoch: int) -> Path:
    (path,) = run.glob(f"checkpoints/epoch={epoch}-*.ckpt")
    return path


def test_resuming_from_a_checkpoint_continues_the_run(exported):
    half = torch.load(checkpoint(exported, 0), weights_only=True)
    clock = dict(half["server"]["clock"])
    half["server"]["clock"]["trained"] += 1000.0  # as if it had trained that long
    torch.save(half, "longer.ckpt")
    run = ["fit", "--config", "experiments/digits_fedavg", NETWORK]
    main([*run, "--trainer.max_epochs=3", "--ckpt_path=longer.ckpt"])
    (straight,), (resumed,) = summaries(str(exported)), summaries()
    assert sum(clock["before"].values()) < clock["trained"] < straight["seconds_total"]
    assert resumed["seconds_total"] > 1000 + clock["trained"]
    assert resumed["target_sha256"] == straight["target_sha256"]
    (last,) = Path("runs").rglob("*.ckpt")
    one, two = (torch.load(path, weights_only=True)["clients"] for path in (checkpoint(exported, 2), last))
    assert one.keys() == two.keys()
    for client in one:
        torch.testing.assert_close(two[client]["weights"], one[client]["weights"], rtol=0, atol=0)
    assert "MisconfigurationException" in refusal(*run, "--trainer.max_epochs=1", f"--ckpt_path={last}")


def test_a_checkpoint_serves_the_other_subcommands_and_no_run_takes_the_place_of_another(exported):
    run = ["fit", "--config", "experiments/digits_fedavg", NETWORK]
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=runs", "--trainer.logger.version=one"]
    there = Path("runs/lightning_logs/one/metrics.csv")
    there.parent.mkdir(parents=True)
    there.write_text("of another run")
    given = f"--ckpt_path={checkpoint(exported, 2)}"
    for command, *words in (("fit",), ("test", given)):
        assert "would be deleted" in refusal(command, *run[1:], *logger, *words)
    assert there.read_text() == "of another run"
    for command in ("test", "predict"):
        main([command, *run[1:], given])
    predicted = rows("runs/**/predictions.csv")
    assert len(predicted) == 120  # the target's test samples
    assert all(float(row[row["predicted"]]) == max(float(row[str(each)]) for each in range(10)) for row in predicted)
    assert "version 'two' of CSVLogger" in refusal(*run, *logger, "--trainer.logger.version=two", "--seeds=[1, 2]")


@pytest.mark.slow
def test_no_run_takes_the_name_in_the_environment_from_another(monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_RUN_ID", "three")
    words = ["--config=experiments/digits_fedavg", "--config=loggers/wandb", "--seeds=[1, 2]"]
    assert "version 'three' of WandbLogger" in refusal("fit", *words)


def test_what_wandb_agents_write_is_understood():
    (each,) = parsed("--config", "data/digits", "trainer.max_epochs=1", "data.batch_size=16", "model.classifier=None")
    assert each.arguments.data.init_args.batch_size == 16
    assert each.arguments.trainer.max_epochs == 1
    assert each.arguments.model.init_args.classifier is None


def test_short_names_and_long_texts_are_enough():
    network = ["--model.extractor=Features", "--model.extractor.in_features=64"]
    instantiated("--data=Digits", "--data.flatten=true", "--model=SourceOnly", *network)
    extractor = {"class_path": "fedlit.models.MLP", "init_args": {"in_features": 64, "hidden": [8] * 60}}
    model = {"class_path": "FedProx", "init_args": {"extractor": extractor, "mu": 0.1}}
    (made,) = instantiated("--config=data/digits", "--model", json.dumps(model))
    assert made.model.mu == 0.1


def test_compared_methods_have_their_own_arguments_and_names():
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
    experiment = Experiment(normalise(["fit", "--config", "experiments/digits", "--config", "compare.yaml"]))
    assert str(experiment.runs[1]).startswith("FedProx(mu=0.5): --model=fedlit.methods.FedProx")
    texts = [(method.name, yaml.safe_load(each.text)) for method, each in experiment.by_method.items()]
    trained = {name or text["model"]["class_path"].split(".")[-1]: text for name, text in texts}
    assert {name: each["trainer"]["max_epochs"] for name, each in trained.items()} == {
        "FedAvg": 1, "FedProx(mu=0.5)": 1, "long": 2, "SourceOnly": 1,
    }  # fmt: skip
    few, many = trained["FedProx(mu=0.5)"], trained["long"]
    assert (few["model"]["init_args"]["mu"], few["data"]["init_args"]["target_labels"]) == (0.5, 50)
    assert few["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.1  # the configuration's
    assert (many["model"]["init_args"]["mu"], many["data"]["init_args"]["target_labels"]) == (1.0, 1.0)
    assert many["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.5


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--data.init_args.batch_size=24", "--trainer.max_epochs=1", "--config=late.yaml"], (1, 24, 3)),
        slow(["--trainer.strategy.local_steps=7", "--config=late.yaml", "--data.batch_size=24"], (9, 24, 7)),
    ],
)
def test_what_the_user_gives_takes_the_place_of_what_a_method_presets(words, expected):
    strategy = {"class_path": "fedlit.FederatedStrategy", "init_args": {"local_steps": 3}}
    preset = {"class_path": "FedProx", "data": {"batch_size": 16}, "trainer": {"strategy": strategy, "max_epochs": 9}}
    Path("late.yaml").write_text(yaml.safe_dump({"compare": [preset], "trainer": {"log_every_n_steps": 2}}))
    arguments = parsed("--config=data/digits", *words)[1].arguments
    trainer = arguments.trainer
    assert expected == (trainer.max_epochs, arguments.data.init_args.batch_size, trainer.strategy.init_args.local_steps)


WRONG = [
    slow(["--trainer.strategy.rounds_per_epoch=0"], "rounds_per_epoch must be"),
    slow(["--data.clients=[fonts]"], "at least 2 clients"),
    slow(["--model.clients=[a,b]"], "taken from the data module"),
    (["--model", "{class_path: FedProx, init_args: {task: x}}"], "model.init_args.task: clients"),
    slow(["--data=fedlit.data.ImageDomains", "--data.root=missing"], "missing"),
    slow(["--compare=[{init_args: {mu: 0.1}}]"], "an entry of compare"),
    (["--compare=[{class_path: FedProx, data: {target_labels: 9}}, {class_path: FedProx}]"], "called 'FedProx'"),
    (["--ckpt_path=nowhere.ckpt"], "resumes one run, but this is 2 runs"),
    (["--trainer.logger=false"], "would overwrite each other's files"),
    slow(["--trainer.logger=WandbLogger", "--trainer.logger.id=mine"], "version 'mine' of WandbLogger"),
    slow(["--ckpt_path=nowhere.ckpt", "--compare=null"], "'nowhere.ckpt' is not a file"),
    slow(["--seeds=[1,0,1]"], "seeds has 1 twice"),
    slow(["--seed_everything=-1"], "seed_everything: -1"),
    slow(["--model.optimizer.lr=-1"], "model.init_args.optimizer cannot be made: Invalid learning rate: -1.0"),
    slow(["--trainer.max_epochs=-2"], "MisconfigurationException: `max_epochs`"),
    slow(["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=oracle/target/acc"], "LabelGuardError"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_what_is_wrong_is_named_before_anything_is_trained(words, message):
    told = refusal("fit", "--config", "experiments/digits", *ONE_BATCH, *words)
    assert told.startswith("fedlit: ")
    assert message in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compare=[{class_path: TargetOnly, name: mine},FedProx]"], "mine trains on target labels"),
        slow(["--compare=[{class_path: FedProx, data: {batch_sise: 3}}]"], "batch_sise"),
        slow(["--compare=[{class_path: FedProx, trainer: {max_epochs: many}}]"], "max_epochs"),
        (["--compare=[FedProx]", "--data=FeatureDomains", "--data.path=gone.npz", "--targets=[all]"], "'gone.npz'"),
    ],
)
def test_what_is_wrong_in_a_later_run_is_found_before_the_first(words, message):
    assert message in refusal("fit", "--config=data/digits", *ONE_BATCH, *words)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("key", "content"),
    [
        ("fit.model.init_args.num_classes", "fit: {model: {class_path: FedAvg, init_args: {num_classes: 3}}}"),
        slow("model.num_classes", "model: {num_classes: 3}"),
        slow("model.init_args.target", "model.init_args.target: fonts"),
        ("model.init_args.clients", "model: {init_args: {clients: [{name: fonts}]}}"),
    ],
)
def test_what_the_data_have_is_refused_wherever_a_file_has_it(key, content):
    path = Path("mu=0.1", "some.yaml")
    path.parent.mkdir()
    path.write_text(content)
    for words in (["--config", str(path)], [f"--config={path}"]):
        assert refusal("fit", "--config=data/digits", *words).startswith(f"fedlit: {key} in {path}: clients")
    Path("model.yaml").write_text("class_path: FedAvg\ninit_args: {num_classes: 3}\n")
    line = refusal("fit", "--config=data/digits", "--model=model.yaml")
    assert line.startswith("fedlit: model.init_args.num_classes: clients")


@pytest.mark.parametrize(
    ("subcommand", "path"), [("validate", None), slow("fit", "last"), slow("test", "best"), ("test", "notes.ckpt")]
)
def test_nothing_is_measured_of_random_weights(subcommand, path):
    Path("notes.ckpt").write_text("remember the milk")
    words = [] if path is None else [f"--ckpt_path={path}"]
    line = refusal(subcommand, "--config=data/digits", *words)
    assert "ckpt_path" in line
    assert "give the path of a checkpoint" in line


def test_an_experiment_before_its_subcommand_is_refused():
    assert "--config must come after fit" in refusal("--config", "experiments/digits", "fit")
    Path("whole.yaml").write_text(yaml.safe_dump({"test": yaml.safe_load((CONFIGS / "data/digits.yaml").read_text())}))
    words = ["--config", "whole.yaml", "test", "--trainer.default_root_dir", "fit"]
    assert "test without --ckpt_path" in refusal(*words)
    assert "'mu=0.1/config.yaml' is not there" in refusal("export", "mu=0.1")  # as other commands have their own words


def test_a_full_disk_is_named_and_no_other_failure_of_files_is_hidden(monkeypatch):
    def failing(number: int) -> Any:
        def fails(_: list[str]) -> None:
            raise OSError(number, os.strerror(number), "last.ckpt")

        return fails

    monkeypatch.setattr("fedlit.cli.commands.list_command", failing(errno.ENOSPC))
    assert "no space left for 'last.ckpt'" in refusal("list")
    monkeypatch.setattr("fedlit.cli.commands.list_command", failing(errno.EACCES))
    with pytest.raises(PermissionError):
        main(["list"])


LACKING = [
    ("tensorboard", ["--config=loggers/tensorboard"], "tensorboard"),
    slow("wandb", ["--config=loggers/wandb"], "wandb"),
    slow("tenseal", ["--config=privacy/ckks"], "he"),
]


@pytest.mark.parametrize(("library", "words", "extra"), LACKING)
def test_a_missing_extra_is_named_before_anything_is_trained(library, words, extra, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    for flag in ("TENSORBOARD", "TENSORBOARDX"):
        monkeypatch.setattr(f"lightning.fabric.loggers.tensorboard._{flag}_AVAILABLE", False)
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", RequirementCache("wandb>=999999"))
    assert f"fedlit[{extra}]" in refusal("fit", "--config=experiments/digits_fedavg", *words)
    assert "round 1" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("privacy", "argument", "message"),
    [
        (
            "plain",
            "privacy.init_args.codec.init_args.bound=-1",
            f"bound must be positive and finite, got -1.0 ({STRATEGY}.privacy.init_args.codec.bound)",
        ),
        slow(  # what is inside a mapping from channels has no key
            "differential",
            "privacy={weights: {class_path: fedlit.privacy.Plain, init_args: {codec: {bound: -1}}}}",
            "bound must be positive and finite, got -1.0",
        ),
        ("masking", "privacy.init_args.codec.init_args={fraction_bits: 20, bound: 0.01}", "RangeError: client 'clean'"),
    ],
)
def test_a_refusal_deep_in_the_configuration_is_one_line(privacy, argument, message):
    configs = ["--config", "experiments/digits_fedavg", "--config", f"privacy/{privacy}"]
    line = refusal("fit", *configs, f"--{STRATEGY}.{argument}")
    assert line.startswith("fedlit: ")
    assert "\n" not in line
    assert message in line


@pytest.mark.parametrize("words", [["--help"], ["-h"], []])
def test_help_has_every_command(words, capsys):
    main(words)
    printed = capsys.readouterr().out
    assert all(f"\n  {command} " in printed for command in (*COMMANDS, "fit", "validate", "test", "predict"))


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
@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_signal_ends_a_run_with_the_status_of_shells_and_without_a_summary(name, capsys):
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
    assert not summaries()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_command_runs_on_several_processes(capsys):
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
    one, two = summaries()
    assert [one[key] == two[key] for key in ("target_sha256", "oracle_accuracy", "rounds")] == [True] * 3


def in_a_process(words: list[str]) -> None:
    atexit._clear()  # what the process has to do that this one is a fork of
    atexit.register(print, "the end", flush=True)
    sys.argv = ["fedlit", *words]
    run()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("words", "status", "printed"),
    [
        (["list", "models"], 0, "SmallCNN"),
        (["export", "nowhere"], 1, "fedlit: RUN_DIR must be a folder that fedlit fit left"),
        (["list", "nothing"], 2, "argument KIND: invalid choice: 'nothing'"),
    ],
)
def test_the_process_of_a_command_ends_with_its_status_and_as_processes_do(words, status, printed):
    (ended,) = processes.run(in_a_process, words)
    assert ended.exit_code == status
    assert printed in ended.output
    assert ended.output.endswith("the end\n")


def test_a_null_for_a_part_of_a_part_is_none(tmp_path, monkeypatch):
    """The option's own parser would make it the text "None"."""
    monkeypatch.chdir(tmp_path)
    for null in ("null", "None"):
        given = [
            "fit",
            "--config",
            "data/pacs",
            f"--model.extractor.init_args.weights={null}",
            "--data.num_workers=null",
        ]
        args = normalise(given)
        assert args[3:] == [
            "--config={model: {extractor: {init_args: {weights: null}}}}",
            "--data.num_workers=null",
        ]
        words = ["--model.extractor.init_args.weights", null, "--data.num_workers", null]
        assert normalise([*given[:3], *words]) == [*args[:4], "--data.num_workers", "null"]
    arguments = Experiment(args[:4]).parsed.arguments
    assert arguments.model.init_args.extractor.init_args.weights is None
