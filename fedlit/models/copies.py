"""Checks that clients can train copies of a network: tied weights, compiled code, modules that join processes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable, Iterator
from contextlib import nullcontext, suppress
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Networks = TypeVar("Networks", bound=tuple[nn.Module, ...])

_COMPILED = "_compiled_call_impl"
"""Attribute of a module after its ``compile()``."""

_ADDRESS: Any = getattr(torch._C, "_data_address", None)
"""Returns the address of a tensor's data; ``data_ptr()``, which is public, would end the sharing by a copy."""

_WITHOUT_MODES: Any = getattr(torch._C, "DisableTorchFunction", nullcontext)
"""Within, `torch.device` does not look at every call, of which there are many with all clients' weights."""


def check_copyable(part: str, network: nn.Module) -> None:
    """Refuse a network of which clients could not train copies, and warn where copies are not compiled.

    Refused are TorchScript with weights to train, weights that are computed from others and kept, functions that hold
    modules, and modules that synchronise processes. ``part`` is the network's name in messages, as ``"extractor"``.
    """
    for name, module in network.named_modules(prefix=part):
        cls = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule) and any(param.requires_grad for param in module.parameters()):
            raise ValueError(
                f"{name} is TorchScript ({cls}), and a copy of it cannot be trained: give the module that it was made "
                "of, or freeze it (requires_grad_(False))"
            )
        if isinstance(module, DistributedDataParallel | nn.SyncBatchNorm):
            raise ValueError(
                f"{name} is {cls}, which synchronises processes, where each client trains by itself: give the module "
                "without it"
            )
        hooks = {key: each for key, each in vars(module).items() if key.endswith("_hooks") and isinstance(each, dict)}
        registered = [(key, hook) for key, each in hooks.items() for hook in each.values()]
        for attribute, value in [*vars(module).items(), *registered]:
            if isinstance(value, Tensor) and not value.is_leaf:
                raise ValueError(
                    f"{name}.{attribute} of {cls} is computed from other weights, and no client's copy could hold "
                    "it: take torch.nn.utils.parametrizations (such as its weight_norm), or compute it in forward"
                )
            held = None if attribute == _COMPILED or _copies_itself(module) else next(_held(value), None)
            if held is not None:
                raise ValueError(
                    f"{name}.{attribute} is a function that holds a {type(held).__name__}, whose weights all copies "
                    f"would share: make it a method of {cls}, or keep that module as an attribute. A compiled "
                    "forward is one of these: give torch.compile(network) in place of the network"
                )
    modules = network.named_modules(prefix=part)
    compiled = [name for name, module in modules if getattr(module, _COMPILED, None) is not None]
    if compiled:
        warnings.warn(
            f"clients' copies of {compiled} are not compiled, as compile() binds to one module: give "
            "torch.compile(network), whose copies are, or call it in none",
            stacklevel=2,
        )


def copied(networks: Networks) -> Networks:
    """Return a deep copy of networks whose parameters have the memory of theirs until either are written to."""
    known: dict[int, Any] = {}
    with _WITHOUT_MODES():
        for param in {param for network in networks for param in network.parameters()}:
            plain = lazily_copied(param.detach()) if type(param) is nn.Parameter else None
            if plain is not None:
                known[id(param)] = nn.Parameter(plain, param.requires_grad)
    return copy.deepcopy(networks, known)


def share_equal_(network: nn.Module, first: dict[str, nn.Parameter]) -> None:
    """Let parameters have the memory of the first of the same name, from which they are added, where they are equal."""
    with _WITHOUT_MODES():
        for name, param in network.named_parameters():
            known, where = first.setdefault(name, param), memory_of(param)
            if where is None or known is param or where == memory_of(known) or _form(param) != _form(known):
                continue
            if torch.equal(param, known) and not share_(param, known):
                first[name] = param  # memory of the first is a file's, say; this one's others can have


def share_(own: Tensor, given: Tensor) -> bool:
    """Let a parameter have the values of another tensor, in the same memory until either is written to.

    Returns:
        Whether it has; not where it is no parameter, they differ in form, or memory cannot be shared so.
    """
    if not (type(own) is nn.Parameter and _is_plain(own)):  # other tensors may be there twice, under two names
        return False
    form = own.shape, own.dtype, own.stride()
    plain = lazily_copied(given.detach()) if form == (given.shape, given.dtype, given.stride()) else None
    if plain is not None:
        own.data = plain
    return plain is not None


def memory_of(tensor: object) -> Hashable:
    """Return what is equal for tensors of one form in the same memory; ``None`` for any other object."""
    if _ADDRESS is None or not isinstance(tensor, Tensor) or not _is_plain(tensor):
        return None
    return _ADDRESS(tensor), tensor.shape, tensor.stride(), tensor.dtype


def lazily_copied(tensor: Tensor) -> Tensor | None:
    """Return a tensor in the memory of another one, until either is written to; ``None`` where they cannot share it."""
    lazily = getattr(torch, "_lazy_clone", None)  # not a public name
    if lazily is None or not _is_plain(tensor):
        return None
    try:
        plain: Tensor = lazily(tensor)
    except RuntimeError:  # memory of several processes
        return None
    return plain


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.layout, tensor.device


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is of torch's own classes, on a CPU, and has all of its memory, which torch has allocated.

    Memory of NumPy, of files (`torch.load`) and of safetensors is not, has no allocator, and ends the process if it is
    shared lazily and then written to.
    """
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return is_whole(tensor) and not tensor.is_inference() and tensor.untyped_storage().resizable()


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor has all of its memory, and is no view of a part."""
    size = tensor.numel() * tensor.element_size()
    return bool(size > 0 and tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size)


def forget_compiled_(network: nn.Module) -> None:
    """Remove compiled code from a copy of a network, as that would run the original's weights."""
    for module in network.modules():
        vars(module).pop(_COMPILED, None)


def _held(value: object, depth: int = 3) -> Iterator[nn.Module]:
    """Modules with weights to train in the closure of a function, which is the same in all copies."""
    if not isinstance(value, FunctionType) or not depth:
        return
    for cell in value.__closure__ or ():
        with suppress(ValueError):  # of one that is not filled yet
            inner: object = cell.cell_contents
            owner = inner.__self__ if isinstance(inner, MethodType) else inner
            if isinstance(owner, nn.Module) and any(param.requires_grad for param in owner.parameters()):
                yield owner
            yield from _held(inner, depth - 1)


def _copies_itself(module: nn.Module) -> bool:
    """True if its class defines copies, as that of torch.compile(network), which makes its functions anew."""
    module_type: Any = type(module)
    return hasattr(module_type, "__deepcopy__") or module_type.__setstate__ is not nn.Module.__setstate__


def tied_weights(network: nn.Module) -> list[tuple[str, str]]:
    """Parameters and buffers with several names: the first name and another one, for each further name."""
    first: dict[int, str] = {}
    named = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
    pairs = [(first.setdefault(id(tensor), name), name) for name, tensor in named]
    return [(name, other) for name, other in pairs if name != other]


def check_tied(extractor: nn.Module, classifier: nn.Module, apart: str, stays_local: tuple[str, ...]) -> None:
    """Refuse weights that copies of the networks could not share as the networks themselves do.

    ``apart`` states why extractor and classifier can share no weight, and is empty where they can; ``stays_local`` has
    prefixes of names that never leave a client.
    """
    both = nn.ModuleDict({"extractor": extractor, "classifier": classifier})
    for name, other in tied_weights(both):
        crossing = name.startswith("extractor.") != other.startswith("extractor.")
        if crossing and (apart or name.startswith(stays_local) != other.startswith(stays_local)):
            reason = apart or "one of both stays at its client, and the other is averaged"
            raise ValueError(
                f"{name!r} and {other!r} are one weight, but {reason}: give the classifier weights of its own, or take "
                "a method that trains and averages both together, such as FedAvg"
            )
    for (device, _, end, name), (next_device, start, _, other) in pairwise(sorted(_memory(both))):
        if device == next_device and start < end:
            first, second = sorted((name, other), reverse=True)
            raise ValueError(
                f"{first!r} and {second!r} share memory but are two parameters, which a client's copy of the networks "
                "would separate: assign the same Parameter to both, or give each its own memory"
            )


def check_part(replica: nn.Module, within: tuple[str, ...]) -> None:
    """Raise a `ValueError` if a weight with one of these prefixes is tied to a weight without."""
    for name, other in tied_weights(replica):
        if name.startswith(within) != other.startswith(within):
            raise ValueError(
                f"{name!r} and {other!r} are one weight, which cannot be averaged as part of {list(within)} alone: "
                "average all parts that have it, or give each part weights of its own"
            )


def _memory(network: nn.Module) -> list[tuple[str, int, int, str]]:
    """Device, first address, address after the last, and name of each parameter that is an ordinary tensor."""
    extents = []
    for name, param in network.named_parameters():
        ordinary = type(param) is nn.Parameter and param.layout is torch.strided and not param.is_meta
        if ordinary and param.numel():
            extent = 1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
            start = param.data_ptr()
            extents.append((str(param.device), start, start + extent * param.element_size(), name))
    return extents
