"""ResNet against torchvision's own forward pass; no test downloads anything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.error import URLError

import pytest
import torch
import torchvision
from torch import nn

from fedlit.models import ResNet
from fedlit.models.backbone import Freeze
from refused import refused

Depth: TypeAlias = Literal[18, 50, 101]


@torch.no_grad()
@pytest.mark.parametrize(("depth", "width"), [(18, 512), pytest.param(50, 2048, marks=pytest.mark.slow)])
def test_features_are_those_of_torchvision_before_its_classifier(depth: Depth, width: int, tmp_path: Path) -> None:
    reference = getattr(torchvision.models, f"resnet{depth}")().eval()
    torch.save(reference.state_dict(), tmp_path / "resnet.pth")
    extractor = ResNet(depth, weights=str(tmp_path / "resnet.pth")).eval()
    x = torch.randn(2, 3, 64, 64)
    expected = reference.maxpool(reference.relu(reference.bn1(reference.conv1(x))))
    expected = reference.layer4(reference.layer3(reference.layer2(reference.layer1(expected)))).mean(dim=(2, 3))
    assert extractor(x).shape == (2, width)
    assert torch.allclose(extractor(x), expected, atol=1e-6)
    assert extractor.out_features == width


@pytest.mark.parametrize(("depth", "millions"), [(18, 11.7), (50, 25.6), (101, 44.5)])
def test_number_of_parameters_is_the_published_one_less_the_classifier(depth: Depth, millions: float) -> None:
    with torch.device("meta"):
        extractor = ResNet(depth)
    classifier = (extractor.out_features + 1) * 1000
    assert sum(p.numel() for p in extractor.parameters()) + classifier == pytest.approx(millions * 1e6, abs=0.06e6)


def test_a_file_without_the_classifier_loads_too(tmp_path: Path) -> None:
    first = ResNet(18)
    torch.save(first.network.state_dict(), tmp_path / "extractor.pth")
    second = ResNet(18, weights=str(tmp_path / "extractor.pth")).state_dict()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.state_dict().items())


@pytest.mark.parametrize(
    ("freeze", "trained"),
    [
        ("none", {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4"}),
        ("stem", {"layer1", "layer2", "layer3", "layer4"}),
        ("layer1", {"layer2", "layer3", "layer4"}),
        ("layer3", {"layer4"}),
        ("all", set()),
    ],
)
def test_frozen_parts_keep_weights_and_statistics_in_training(freeze: Freeze, trained: set[str]) -> None:
    extractor = copy.deepcopy(ResNet(18, freeze=freeze)).train()  # as each client gets one
    assert {name.split(".")[1] for name, p in extractor.named_parameters() if p.requires_grad} == trained
    before = {name: buffer.clone() for name, buffer in extractor.named_buffers() if name.endswith("running_mean")}
    extractor(torch.randn(4, 3, 32, 32))
    moved = {name.split(".")[1] for name, mean in before.items() if not torch.equal(extractor.get_buffer(name), mean)}
    assert moved == trained - {"conv1"}
    assert extractor.training
    assert not any(module.training for module in extractor.eval().modules())


def test_a_failed_download_names_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def no_network(*args: object, **kwargs: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr("torch.hub.download_url_to_file", no_network)
    with pytest.raises(RuntimeError, match="TORCH_HOME"):
        ResNet(18, weights="DEFAULT")


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("depth", lambda: ResNet(34)),  # type: ignore[arg-type]
        ("freeze", lambda: ResNet(18, freeze="layer4")),  # type: ignore[arg-type]
        ("weights", lambda: ResNet(18, weights="IMAGENET")),
    ],
)
def test_unknown_choices_are_refused(argument: str, call: Callable[[], object]) -> None:
    with refused(argument):
        call()


def test_a_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ResNet(18, weights=str(tmp_path / "nowhere.pth"))
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "other.pth")
    with pytest.raises(ValueError, match="state dict"):
        ResNet(18, weights=str(tmp_path / "other.pth"))
