"""ResNets of torchvision as feature extractors, pretrained or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor, nn

from fedlit.checks import check_one_of
from fedlit.models.backbone import check_file, load_file, preprocessing_of

Freeze: TypeAlias = Literal["none", "stem", "layer1", "layer2", "layer3", "all"]

# the parts of torchvision's ResNet in forward order; ``freeze`` names the last part that is kept fixed
_PARTS_OF: dict[str, tuple[str, ...]] = {
    "none": (),
    "stem": ("conv1", "bn1"),
    "layer1": ("layer1",),
    "layer2": ("layer2",),
    "layer3": ("layer3",),
    "all": ("layer4",),
}


class ResNet(nn.Module):
    """ResNet of torchvision without its classifier: features are the globally averaged last feature maps.

    Args:
        depth: 18 (features of width 512), 50 or 101 (2048).
        weights: ``None`` (random), a name of torchvision's weights (``"DEFAULT"``, ``"IMAGENET1K_V1"``,
            ``"IMAGENET1K_V2"``), downloaded into torch's hub cache at first use, or the path of a state dict ending
            in ``.pth`` or ``.pt``.
        freeze: Last part that is not trained, counted from the input: ``"none"``, ``"stem"``, ``"layer1"``,
            ``"layer2"``, ``"layer3"`` or ``"all"``. Frozen parts keep their BatchNorm statistics too.

    Attributes:
        out_features: Width of the features.
        preprocessing: Of the images that the pretrained network was trained on; see `Backbone`.

    Raises:
        ValueError: If ``depth``, ``weights`` or ``freeze`` is unknown, or the file holds another network.
        FileNotFoundError: If ``weights`` is a path and nothing is there.
        RuntimeError: If the weights cannot be downloaded.
    """

    out_features: int
    preprocessing: dict[str, Any]

    def __init__(self, depth: Literal[18, 50, 101] = 18, weights: str | None = None, freeze: Freeze = "none") -> None:
        super().__init__()
        # imported here because it costs a second, which every user of fedlit.models would pay
        from torchvision import models

        check_one_of("depth", depth, (18, 50, 101))
        check_one_of("freeze", freeze, get_args(Freeze))
        entries = getattr(models, f"ResNet{depth}_Weights")
        file = Path(weights) if weights is not None and weights.endswith((".pth", ".pt")) else None
        if file is not None:
            check_file(file)
        elif weights is not None:
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
        self.depth = depth
        self.freeze = freeze
        self.out_features = network.fc.in_features
        network.fc = nn.Identity()
        self.preprocessing = {} if choice is None else preprocessing_of([choice])
        if file is not None:
            load_file(network, file, ("fc.",))
            self.preprocessing = preprocessing_of(entries, file)
        self.network: nn.Module = network
        for part in self._frozen():
            part.requires_grad_(False)
        self.train()

    def _frozen(self) -> list[nn.Module]:
        fixed = get_args(Freeze)[: get_args(Freeze).index(self.freeze) + 1]
        return [self.network.get_submodule(part) for stage in fixed for part in _PARTS_OF[stage]]

    def train(self, mode: bool = True) -> ResNet:
        """Switch training mode; frozen parts stay in evaluation mode, so their BatchNorm statistics stay fixed."""
        super().train(mode)
        for part in self._frozen():
            part.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, out_features) of images (batch, 3, height, width)."""
        features: Tensor = self.network(x)
        return features
