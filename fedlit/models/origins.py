"""Where published weights are from, and under which licence, as far as installed packages state it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum

_SWAG = "https://github.com/facebookresearch/SWAG/blob/main/LICENSE"
"""What torchvision's SWAG weights state; its README has the name of that licence."""

_UNSTATED = (None, "", "unknown", "other")
"""In place of a licence in timm's configurations."""


@dataclass(frozen=True)
class Origin:
    """Where a network's published weights are from.

    Args:
        source: Who publishes them, under which name.
        licence: As hubs of models write it (``"apache-2.0"``); ``None`` is unknown.
        link: To the licence or its source.
        note: What else its publisher says of it, a sentence.
    """

    source: str
    licence: str | None = None
    link: str | None = None
    note: str = ""


def unknown_file(path: Path, network: str) -> Origin:
    """Of a file whose name is none of those under which a network's weights are published."""
    return Origin(f"the file {path.name!r} for {network}")


def of_torchvision(network: str, entries: Iterable[WeightsEnum], path: Path | None = None) -> Origin:
    """Of weights of torchvision.

    Args:
        network: Name of the network.
        entries: Its weights.
        path: A file, which is that of the entry with its name; ``None`` is the one entry.
    """
    entries = [each for each in entries if path is None or each.url.endswith(f"/{path.name}")]
    if not entries:
        assert path is not None, "one of torchvision's entries was loaded"
        return unknown_file(path, network)
    source, stated = f"{entries[0]} of torchvision {version('torchvision')}", entries[0].meta.get("license")
    if stated is not None:
        return Origin(source, "cc-by-nc-4.0" if stated == _SWAG else stated, stated)
    note = (
        "This is the licence of torchvision, which says that weights may have terms of their own from the data that "
        "they were trained on."
    )
    return Origin(source, "bsd-3-clause", "https://github.com/pytorch/vision/blob/main/LICENSE", note)


def of_timm(library: Any, network: str, path: Path) -> Origin:
    """Of weights of timm: those that the network's name has after its point, or whose name the file has.

    Args:
        library: The package timm.
        network: Name of the network, with or without the name of its weights.
        path: The file.
    """
    candidates = [network] if "." in network else library.list_pretrained(f"{network}.*")
    configs = {name: library.get_pretrained_cfg(name) for name in candidates}
    if "." not in network:
        named = (path.name, path.stem)
        configs = {name: each for name, each in configs.items() if name in named or _file(each) == path.name}
    if len(configs) != 1:
        return unknown_file(path, f"timm/{network}")
    ((name, config),) = configs.items()
    page = config.hf_hub_id
    return Origin(
        f"{name} of timm {library.__version__}",
        None if config.license in _UNSTATED else config.license,
        f"https://huggingface.co/{page}" if page else config.url or None,
    )


def _file(config: Any) -> str | None:
    """Name of the file that one of timm's configurations states."""
    return config.url.rsplit("/", 1)[-1] if config.url else None


def of_package(package: str) -> Origin:
    """Of weights that a package brings: by its metadata, or else by the text of its licence."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return Origin(f"the package {package}")
    (licence, *_) = found.metadata.get_all("License-Expression") or [None]
    texts = (found.read_text(name) or "" for name in ("LICENSE", "licenses/LICENSE"))
    if licence is None and any("Apache License, Version 2.0" in text for text in texts):
        licence = "Apache-2.0"
    source = f"the package {package} {found.version}"
    return Origin(source, licence and licence.lower())
