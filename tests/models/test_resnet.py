"""ResNet against torchvision's own forward pass; no test downloads anything."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.error import URLError

import pytest
import torch
import torchvision
from torch import Tensor, nn

from fedlit.models import ResNet
from fedlit.models.resnet import Freeze

Depth: TypeAlias = Literal[18, 50, 101]


def forward_up_to_avgpool(network: torchvision.models.ResNet, x: Tensor) -> Tensor:
    x = network.maxpool(network.relu(network.bn1(network.conv1(x))))
    x = network.layer4(network.layer3(network.layer2(network.layer1(x))))
    return x.mean(dim=(2, 3))


@pytest.mark.parametrize(("depth", "width"), [(18, 512), (50, 2048)])
def test_features_are_those_of_torchvision_before_its_classifier(depth: Depth, width: int, tmp_path: Path) -> None:
    reference = getattr(torchvision.models, f"resnet{depth}")().eval()
    torch.save(reference.state_dict(), tmp_path / "resnet.pth")
    extractor = ResNet(depth, weights=str(tmp_path / "resnet.pth")).eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        features = extractor(x)
        assert features.shape == (2, width)
        assert torch.allclose(features, forward_up_to_avgpool(reference, x), atol=1e-6)
    assert extractor.out_features == width


@pytest.mark.parametrize(("depth", "millions"), [(18, 11.7), (50, 25.6), (101, 44.5)])
def test_number_of_parameters_is_the_published_one_less_the_classifier(depth: Depth, millions: float) -> None:
    with torch.device("meta"):
        extractor = ResNet(depth)
    classifier = (extractor.out_features + 1) * 1000
    assert sum(p.numel() for p in extractor.parameters()) + classifier == pytest.approx(millions * 1e6, abs=0.06e6)


def test_a_file_without_the_classifier_loads_too(tmp_path: Path) -> None:
    path = tmp_path / "extractor.pth"
    first = ResNet(18)
    torch.save(first.network.state_dict(), path)
    second = ResNet(18, weights=str(path))
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_by_default_everything_is_trained() -> None:
    assert all(parameter.requires_grad for parameter in ResNet(18).parameters())


@pytest.mark.parametrize(
    ("freeze", "trained"),
    [
        ("stem", {"layer1", "layer2", "layer3", "layer4"}),
        ("layer1", {"layer2", "layer3", "layer4"}),
        ("layer3", {"layer4"}),
        ("all", set()),
    ],
)
def test_freezing_stops_at_the_named_part(freeze: Freeze, trained: set[str]) -> None:
    extractor = ResNet(18, freeze=freeze)
    assert {name.split(".")[1] for name, p in extractor.named_parameters() if p.requires_grad} == trained


def test_frozen_batch_norm_keeps_its_statistics_in_training_mode() -> None:
    # a deep copy, as each client gets one
    extractor = copy.deepcopy(ResNet(18, freeze="layer2")).train()
    statistics = {name: buffer for name, buffer in extractor.named_buffers() if name.endswith("running_mean")}
    before = {name: buffer.clone() for name, buffer in statistics.items()}
    extractor(torch.randn(4, 3, 32, 32))
    moved = {name.split(".")[1] for name, buffer in statistics.items() if not torch.equal(buffer, before[name])}
    assert moved == {"layer3", "layer4"}
    assert extractor.training
    extractor.eval()
    assert not any(module.training for module in extractor.modules())


def test_a_failed_download_names_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def no_network(*args: object, **kwargs: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr("torch.hub.download_url_to_file", no_network)
    with pytest.raises(RuntimeError, match=r"cannot download weights 'DEFAULT' from https://.*TORCH_HOME"):
        ResNet(18, weights="DEFAULT")


def test_unknown_weights_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'IMAGENET1K_V1'.*got 'IMAGENET'"):
        ResNet(18, weights="IMAGENET")


def test_a_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pth"):
        ResNet(18, weights=str(tmp_path / "nowhere.pth"))
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "other.pth")
    with pytest.raises(ValueError, match="does not hold a state dict of this ResNet"):
        ResNet(18, weights=str(tmp_path / "other.pth"))


def test_unknown_depth_and_freeze_are_refused() -> None:
    with pytest.raises(ValueError, match="depth must be 18, 50 or 101, got 34"):
        ResNet(34)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"freeze must be one of .* got 'layer4'"):
        ResNet(18, freeze="layer4")  # type: ignore[arg-type]
