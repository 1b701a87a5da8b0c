"""``fedlit export``: what it takes from a run's folder, and what it says to mistakes."""

from __future__ import annotations

import csv
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from commands import refusal
from fedlit.cli import main
from fedlit.data import Digits

SMALL = ["--config", "experiments/digits_fedavg", "--model.extractor.init_args.hidden=[8]"]


@pytest.fixture(scope="module")
def trained(once: Callable[..., Path]) -> Path:
    """The folder of a run of three rounds, which keeps the checkpoint of each."""

    def fit(folder: Path) -> None:
        keep = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.save_top_k=-1"]
        main(["fit", *SMALL, *keep, "--trainer.max_epochs=3", f"--trainer.default_root_dir={folder}", "--compare=null"])

    (run,) = once("exported", fit).glob("FedAvg/version_0")
    assert len(list((run / "checkpoints").glob("*.ckpt"))) == 3
    return run


@pytest.fixture
def run(trained: Path) -> Path:
    return Path(shutil.copytree(trained, "run"))


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


def by_command(checkpoint: Path) -> Tensor:
    """Probabilities that ``fedlit predict`` writes."""
    main(["predict", *SMALL, f"--ckpt_path={checkpoint}"])
    (path,) = Path("runs").rglob("predictions.csv")
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header[:2] == ["id", "predicted"]
    return torch.tensor([[float(cell) for cell in row[2:]] for row in rows])


def test_the_file_predicts_what_the_command_predicts(run, capsys):
    main(["export", str(run)])
    printed = capsys.readouterr().out
    assert f"checkpoint: {epoch(run, 2)}, after 3 rounds" in printed
    assert f"model of target 'fonts': {run / 'target.pt2'}, from (n, 64) to (n, 10)" in printed
    torch.testing.assert_close(predicted(run / "target.pt2"), by_command(epoch(run, 2)), atol=1e-6, rtol=0)


def test_of_several_checkpoints_the_one_of_most_rounds_is_taken_unless_another_is_given(run, capsys):
    os.utime(epoch(run, 0))  # the youngest file is not the newest model
    shutil.copyfile(epoch(run, 1), run / "checkpoints" / "last.ckpt")
    main(["export", str(run), "--output", "default.pt2"])
    main(["export", str(run), "--output", "first.pt2", "--ckpt_path", str(epoch(run, 0))])
    main(["export", str(run), "--output", "third.pt2", "--ckpt_path", str(epoch(run, 2))])
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("checkpoint")] == [
        f"checkpoint: {epoch(run, number)}, after {number + 1} rounds" for number in (2, 0, 2)
    ]
    default, first, third = (predicted(Path(f"{name}.pt2")) for name in ("default", "first", "third"))
    assert torch.equal(default, third)
    assert not torch.allclose(default, first)


def test_the_suffix_says_the_format(run):
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    main(["export", str(run), "--output", "target.onnx"])
    (found,) = onnxruntime.InferenceSession("target.onnx").run(None, {"inputs": samples().numpy()})
    torch.testing.assert_close(torch.from_numpy(found), by_command(epoch(run, 2)), atol=1e-5, rtol=0)


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
        (["run", "--output=model.pth"], r"output must end in one of .pt2, .onnx, .* got 'model.pth'"),
        (["run", "--output=nowhere/model.pt2"], "the folder 'nowhere', which is not there"),
        (["run", "--ckpt_path=other.ckpt"], "'other.ckpt' is no checkpoint of a federation"),
        (["run", "--ckpt_path=method.ckpt"], "'method.ckpt' is a checkpoint of another.Method, .*FedAvg"),
        (["run", "--ckpt_path=roster.ckpt"], "the checkpoint belongs to another federation"),
        (["run", "--ckpt_path=wide.ckpt"], "'wide.ckpt' does not fit the run's config.yaml: give a checkpoint of the"),
        (["run", "--ckpt_path=words.ckpt"], "'words.ckpt' cannot be read as a checkpoint: give one that fedlit fit"),
    ],
)
def test_mistakes_are_told(run, words, message):
    checkpoint = torch.load(epoch(run, 2), weights_only=True)
    torch.save({}, "other.ckpt")
    torch.save(checkpoint | {"method": "another.Method"}, "method.ckpt")
    target = checkpoint["clients"]["fonts"]
    wide = {name: tensor.repeat(2, *[1] * (tensor.dim() - 1)) for name, tensor in target["weights"].items()}
    torch.save(checkpoint | {"clients": checkpoint["clients"] | {"fonts": target | {"weights": wide}}}, "wide.ckpt")
    Path("words.ckpt").write_text("words")
    federation = checkpoint["federation"]
    torch.save(checkpoint | {"federation": federation | {"roster": federation["roster"][1:]}}, "roster.ckpt")
    line = refusal("export", *words)
    assert line.startswith("fedlit: ")
    assert re.search(message, line)
    assert not list(run.glob("target*"))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: [],
        lambda content: {"federation": 1},
        lambda content: {"federation": {}},
        lambda content: content | {"clients": []},
        lambda content: content | {"clients": {"fonts": 1}},
        lambda content: content | {"state_dict": 1},
        lambda content: {key: value for key, value in content.items() if key != "method"},
        lambda content: content | {"federation": content["federation"] | {"roster": 1}},
        lambda content: content | {"federation": content["federation"] | {"round_idx": "x"}},
        lambda content: content | {"federation": content["federation"] | {"round_idx": float("inf")}},
        lambda content: content | {"lr_schedulers": 1},
    ],
)
def test_a_strangers_checkpoint_is_refused_whatever_it_holds(run, change):
    torch.save(change(torch.load(epoch(run, 2), weights_only=True)), "strange.ckpt")
    assert refusal("export", "run", "--ckpt_path=strange.ckpt").startswith("fedlit: ")
    assert not list(run.glob("target*"))


@pytest.mark.parametrize("rounds", ["x", None, float("inf")])
def test_of_several_checkpoints_all_must_say_how_far_they_are(run, rounds):
    torch.save({"federation": {"round_idx": rounds}}, run / "checkpoints" / "strange.ckpt")
    assert "strange.ckpt' does not state how many rounds" in refusal("export", "run")


@pytest.mark.parametrize("place", [0, 200, 2000, -30])
def test_a_damaged_checkpoint_is_refused(run, place):
    content = bytearray(epoch(run, 2).read_bytes())
    content[place : place + 20 or None] = b"\xff" * 20
    Path("damaged.ckpt").write_bytes(content)
    assert refusal("export", "run", "--ckpt_path=damaged.ckpt").startswith("fedlit: ")


def test_a_run_without_a_checkpoint_is_told(run):
    shutil.rmtree(run / "checkpoints")
    assert "checkpoints' has no checkpoint: give --ckpt_path" in refusal("export", str(run))


def test_a_missing_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert refusal("export", str(run), "--output", "target.onnx").endswith("pip install 'fedlit[onnx]'")


def test_a_network_that_cannot_be_traced_is_told(run, monkeypatch):
    monkeypatch.setattr("fedlit.models.MLP.forward", lambda self, x: self.layers(x if x.sum() > 0 else -x))
    assert "fedlit: the target's network of FedAvg cannot be traced" in refusal("export", str(run))
