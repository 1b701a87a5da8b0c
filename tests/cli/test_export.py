"""``fedlit export``: what it takes from a run's folder, and what it says to mistakes."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedlit
from commands import refusal
from fedlit.cli import main
from fedlit.data import Digits
from refused import slow

SMALL = ["--config", "experiments/digits_fedavg", "--model.extractor.init_args.hidden=[8]"]


@pytest.fixture
def run(exported: Path) -> Path:
    return Path(shutil.copytree(exported, "run"))


def epoch(run: Path, number: int) -> Path:
    (path,) = (run / "checkpoints").glob(f"epoch={number}-*.ckpt")
    return path


def samples() -> Tensor:
    data = Digits(target="fonts", flatten=True, seed=0)
    dataset = data.dataset("fonts", "test")
    return dataset.batch(torch.arange(len(dataset)))[0]


def predicted(path: Path) -> Tensor:
    network = torch.export.load(path).module()
    with torch.no_grad():
        return network(samples())


@pytest.fixture(scope="module")
def by_command(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Probabilities that ``fedlit predict`` writes."""
    root = tmp_path_factory.mktemp("predicted")
    main(["predict", *SMALL, f"--ckpt_path={epoch(exported, 2)}", f"--trainer.default_root_dir={root}"])
    (path,) = root.rglob("predictions.csv")
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header[:2] == ["id", "predicted"]
    return torch.tensor([[float(cell) for cell in row[2:]] for row in rows])


def test_the_file_predicts_what_the_command_predicts(run, by_command, capsys):
    os.utime(epoch(run, 0))  # the youngest file is not the newest model
    shutil.copyfile(epoch(run, 1), run / "checkpoints" / "last.ckpt")
    main(["export", str(run)])
    printed = capsys.readouterr().out
    assert f"checkpoint: {epoch(run, 2)}, after 3 rounds" in printed
    assert f"model of target 'fonts': {run / 'target.pt2'}, from (n, 64) to (n, 10)" in printed
    torch.testing.assert_close(predicted(run / "target.pt2"), by_command, atol=1e-6, rtol=0)


def test_another_checkpoint_than_the_one_of_most_rounds_is_taken_where_it_is_given(run, by_command, capsys):
    main(["export", str(run), "--output", "first.pt2", "--ckpt_path", str(epoch(run, 0))])
    assert f"checkpoint: {epoch(run, 0)}, after 1 rounds" in capsys.readouterr().out.splitlines()
    assert not torch.allclose(predicted(Path("first.pt2")), by_command)


@pytest.mark.slow
def test_the_suffix_says_the_format(run, by_command):
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    main(["export", str(run), "--output", "target.onnx"])
    (found,) = onnxruntime.InferenceSession("target.onnx").run(None, {"inputs": samples().numpy()})
    torch.testing.assert_close(torch.from_numpy(found), by_command, atol=1e-5, rtol=0)


def test_a_folder_with_safetensors_has_the_runs_scores_if_it_is_of_its_last_round(run, by_command, capsys):
    main(["export", str(run), "--format", "safetensors"])
    assert f"what it takes and gives: {run / 'target' / 'README.md'}" in capsys.readouterr().out
    model = fedlit.load(run / "target")
    torch.testing.assert_close(model(samples()), by_command, atol=1e-6, rtol=0)
    accuracy = json.loads((run / "summary.json").read_text())["oracle_accuracy"]
    card = (run / "target" / "README.md").read_text()
    assert f"- type: accuracy\n      value: {round(accuracy, 6)}\n" in card
    main(["export", str(run), "--output", "first", "--ckpt_path", str(epoch(run, 0))])
    assert "model-index" not in Path("first/README.md").read_text()
    with pytest.raises(SystemExit):
        main(["export", str(run), "--format", "onnx", "--output", "target.pt2"])
    assert "--output of --format onnx must end in .onnx, got 'target.pt2'" in capsys.readouterr().err


def test_devices_and_backends_of_the_run_are_not_needed(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "tenseal", None)
    config = run / "config.yaml"
    text = config.read_text()
    changed = text.replace("accelerator: cpu", "accelerator: cuda").replace("devices: auto", "devices: 8")
    changed = changed.replace("privacy: null", "privacy: {class_path: fedlit.privacy.CKKS}", 1)
    assert changed.count("cuda") == changed.count("devices: 8") == changed.count("CKKS") == 1
    config.write_text(changed)
    main(["export", str(run)])
    assert (run / "target.pt2").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], r"RUN_DIR must be a folder that fedlit fit left, but 'nowhere/config.yaml' is not there"),
        (["run", "--ckpt_path=nowhere.ckpt"], "'nowhere.ckpt' is not a file"),
        (["run", "--output=model.pth"], r"output must end in .pt2 or .onnx, or have no ending, .* got 'model.pth'"),
        (["run", "--output=nowhere/model.pt2"], "the folder 'nowhere', which is not there"),
    ],
)
def test_mistakes_are_told(run, words, message):
    line = refusal("export", *words)
    assert line.startswith("fedlit: ")
    assert re.search(message, line)
    assert not list(run.glob("target*"))


def wide(content: Any) -> Any:
    """A checkpoint whose target has a network of twice the width."""
    target = content["clients"]["fonts"]
    weights = {name: tensor.repeat(2, *[1] * (tensor.dim() - 1)) for name, tensor in target["weights"].items()}
    return content | {"clients": content["clients"] | {"fonts": target | {"weights": weights}}}


def of_federation(content: Any, **changes: Any) -> Any:
    return content | {"federation": content["federation"] | changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: {}, "'strange.ckpt' is no checkpoint of a federation"),
        slow(lambda content: content | {"method": "another.Method"}, "is a checkpoint of another.Method, .*FedAvg"),
        slow(lambda content: of_federation(content, roster=content["federation"]["roster"][1:]), "another federation"),
        (wide, "'strange.ckpt' does not fit the run's config.yaml: give a checkpoint of the"),
        slow(lambda content: of_federation(content, round_idx=float("inf")), ""),
        slow(lambda content: content | {"lr_schedulers": 1}, ""),
    ],
)
def test_a_strangers_checkpoint_is_refused_whatever_it_holds(run, change, message):
    torch.save(change(torch.load(epoch(run, 2), weights_only=True)), "strange.ckpt")
    line = refusal("export", "run", "--ckpt_path=strange.ckpt")
    assert line.startswith("fedlit: ")
    assert re.search(message, line)
    assert not list(run.glob("target*"))


def test_of_several_checkpoints_all_must_say_how_far_they_are(run):
    torch.save({"federation": {"round_idx": None}}, run / "checkpoints" / "strange.ckpt")
    assert "strange.ckpt' does not state how many rounds" in refusal("export", "run")


@pytest.mark.parametrize("place", [slow(0), -30])
def test_a_damaged_checkpoint_is_refused(run, place):
    content = bytearray(epoch(run, 2).read_bytes())
    content[place : place + 20 or None] = b"\xff" * 20
    Path("damaged.ckpt").write_bytes(content)
    assert "'damaged.ckpt' cannot be read" in refusal("export", "run", "--ckpt_path=damaged.ckpt")


def test_a_run_without_a_checkpoint_is_told(run):
    shutil.rmtree(run / "checkpoints")
    assert "checkpoints' has no checkpoint: give --ckpt_path" in refusal("export", str(run))


def test_a_missing_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert refusal("export", str(run), "--output", "target.onnx").endswith("pip install 'fedlit[onnx]'")


def test_a_network_that_cannot_be_traced_is_told(run, monkeypatch):
    monkeypatch.setattr("fedlit.models.MLP.forward", lambda self, x: self.layers(x if x.sum() > 0 else -x))
    assert "fedlit: the target's network of FedAvg cannot be traced" in refusal("export", str(run))
