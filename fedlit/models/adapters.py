"""Networks of which small adapters alone are trained, and sent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, Self, TypeAlias, get_args

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedlit.checks import check, check_at_least, check_one_of, check_positive
from fedlit.models.batchnorm import batchnorm_layers
from fedlit.models.replica import feature_width

AdapterKind: TypeAlias = Literal["lora", "dora"]


class Adapters(nn.Module):
    """A network whose weights stay as they are, with low-rank adapters beside its layers, by peft (extra ``peft``).

    A layer of weight W (out, in) computes (W + alpha / rank B A) x, with A (rank, in) drawn at random and B (out, rank)
    0, so that training starts at the network (LoRA, Hu et al., ICLR 2022); DoRA (Liu et al., ICML 2024) also trains the
    norms of the sum's rows. Clients send adapters and classifier alone, as frozen weights are equal everywhere. The
    mean of several clients' A and B is not that of their products B A (FedIT, Zhang et al., ICASSP 2024); with
    ``fixed_a`` it is, as all have one A (FFA-LoRA, Sun et al., ICLR 2024). BatchNorm stays in evaluation mode.

    Args:
        network: Of features, with their width in ``out_features``, such as `Backbone` with published weights.
        kind: ``"lora"`` or ``"dora"``.
        rank: Of the product B A, at least 1.
        alpha: Scale of it before the division by ``rank``; ``None`` is 2 ``rank``.
        layers: Names of linear and convolutional layers that get adapters, or ends of names (``["qkv", "fc1"]``);
            ``None`` is all linear layers. Layers of classes below ``nn.Linear`` and ``nn.Conv2d`` get none, nor does
            ``nn.MultiheadAttention``; the groups of a convolution divide ``rank``.
        fixed_a: Train B alone.

    Raises:
        ValueError: If an argument is out of its range, or a name is of no such layer.
        ImportError: If peft is missing.
    """

    out_features: int  # by which the catalogue knows an extractor

    def __init__(
        self,
        network: nn.Module,
        kind: AdapterKind = "lora",
        rank: int = 8,
        alpha: float | None = None,
        layers: Sequence[str] | None = None,
        fixed_a: bool = False,
    ) -> None:
        super().__init__()
        check_one_of("kind", kind, get_args(AdapterKind))
        check_at_least("rank", rank, 1)
        if alpha is not None:
            check_positive("alpha", alpha)
        self.out_features = feature_width(network)
        _check_network(network)
        targets = "|".join(re.escape(name) for name in _layers(network, layers, rank))
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ImportError("Adapters need peft: pip install 'fedlit[peft]'") from error
        scale = 2 * rank if alpha is None else alpha
        config = LoraConfig(r=rank, lora_alpha=scale, target_modules=targets, use_dora=kind == "dora")  # type: ignore[arg-type]
        network.requires_grad_(False)
        for module in network.modules():
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0  # in evaluation it would take its layers' weights past the adapters
        self.network: nn.Module = inject_adapter_in_model(config, network)
        for name, param in self.network.named_parameters():
            if fixed_a and ".lora_A." in name:
                param.requires_grad_(False)
        self._all_called = False
        self.train()

    @property
    def preprocessing(self) -> dict[str, Any]:
        """See `Backbone`."""
        found: dict[str, Any] = getattr(self.network, "preprocessing", {})
        return found

    def train(self, mode: bool = True) -> Self:
        """Switch training mode; BatchNorm stays in evaluation mode, so its statistics stay as they are."""
        super().train(mode)
        for layer in batchnorm_layers(self.network).values():
            layer.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Features, shape (batch, out_features).

        Raises:
            ValueError: If the network computes past the adapters of some layers, whose weights it reads itself.
        """
        if self._all_called:
            features: Tensor = self.network(x)
            return features
        adapted = {name: module for name, module in self.network.named_modules() if hasattr(module, "lora_A")}
        called: set[nn.Module] = set()
        handles = [each.register_forward_hook(lambda module, _, __: called.add(module)) for each in adapted.values()]
        try:
            features = self.network(x)
        finally:
            for handle in handles:
                handle.remove()
        past = [name for name, module in adapted.items() if module not in called]
        ends = dict.fromkeys(name.rpartition(".")[2] for name, module in adapted.items() if module in called)
        check(not past, "layers", "those that the network calls", past[:4], f"it calls {', '.join(ends) or 'none'}")
        self._all_called = True
        return features


def _check_network(network: nn.Module) -> None:
    """Refuse networks that peft cannot take."""
    kind = type(network).__name__
    adapted = any(type(module).__module__.startswith("peft.") for module in network.modules())
    check(not adapted, "network", "one without adapters", kind)
    check(type(network) not in (nn.Linear, nn.Conv2d), "network", "more than a layer", kind, "wrap it")
    lazy = any(is_lazy(param) for param in network.parameters())
    check(not lazy, "network", "one that knows its widths", kind, "give in_features, or the like")


def _layers(network: nn.Module, given: Sequence[str] | None, rank: int) -> list[str]:
    """Whole names of the layers that get adapters. Layers of other classes compute in ways that peft does not know."""
    check(not isinstance(given, str), "layers", "a list of names", given, f"write [{given}]")
    fitting = {name: module for name, module in network.named_modules() if type(module) in (nn.Linear, nn.Conv2d)}
    kind = type(network).__name__
    if given is None:
        found = [name for name, module in fitting.items() if isinstance(module, nn.Linear)]
        has = (
            f"{kind} has layers nn.Conv2d {', '.join([*fitting][:4])}" if fitting else f"{kind} has no nn.Conv2d either"
        )
        check(bool(found), "layers", "given for a network without layers nn.Linear", given, has)
    else:
        found = []
        check(len(given) > 0, "layers", "names, or none for all linear layers", given)
        ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in fitting)) or "nothing"
        rule = "names, or ends of names, of layers nn.Linear and nn.Conv2d (and not of classes below them)"
        for each in given:
            matches = [name for name in fitting if name == each or name.endswith(f".{each}")]
            check(bool(matches), "layers", rule, each, f"{kind} has layers that end in {ends}")
            found += matches
    names: dict[nn.Module, list[str]] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    for name in found:
        layer, alike = fitting[name], names[fitting[name]]
        check(len(alike) == 1, "layers", "those that the network has once", alike, "leave these out")
        if isinstance(layer, nn.Conv2d):
            check(rank % layer.groups == 0, "rank", f"a multiple of the {layer.groups} groups of layer '{name}'", rank)
            simple = set(layer.dilation) == {1} and layer.padding_mode == "zeros"
            way = f"dilation {layer.dilation} and padding {layer.padding_mode!r}"
            check(simple, "layers", "convolutions without dilation that pad by zeros", name, f"this one has {way}")
    return [*dict.fromkeys(found)]
