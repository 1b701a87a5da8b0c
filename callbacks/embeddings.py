"""Features of some samples in the plane, as a table for a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fedlit.callbacks.shared import class_names
from fedlit.federation import reveal_for_oracle
from fedlit.federation.labels import known_labels
from fedlit.module import FederatedModule
from fedlit.run.tasks import Classification

HEADER = ["client", "x", "y", "predicted", "label"]
MAX_SAMPLES = 150
"""Of a client in the table."""
_KEPT = 2000
"""Samples of a client that these are drawn from."""


class Embeddings:
    """Extracted features of clients' test samples, in the plane of their first two principal components.

    Features of different clients' samples never meet on a process that does not host them: the process of the target
    has those of its local clients alone, the other processes none.
    """

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []
        self._captured: dict[str, list[Tensor]] = {}
        self._kept: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def start_(self, module: FederatedModule) -> None:
        """Hook into the extractors, if this process hosts the target."""
        self.stop_()
        self._kept = {}
        if not module.federation.is_local(module.target):
            return
        for name, replica in module.replicas.named_children():
            extractor = getattr(replica, "extractor", None)
            if isinstance(extractor, torch.nn.Module):
                captured = self._captured[name] = []
                self._hooks.append(extractor.register_forward_hook(lambda _, __, out, to=captured: to.append(out)))

    def keep_(self, module: FederatedModule, outputs: Any, batch: Any) -> None:
        """Keep a batch of each client that has been predicted from its extractor's features."""
        for name, captured in self._captured.items():
            features = next((each for each in captured if isinstance(each, Tensor)), None)
            captured.clear()
            predicted = outputs.get(name) if isinstance(outputs, Mapping) else None
            if features is None or not isinstance(predicted, Tensor) or len(features) != len(predicted):
                continue
            kept = self._kept.setdefault(name, [])
            if sum(len(each) for each, *_ in kept) < _KEPT:
                labels = (
                    reveal_for_oracle(batch[name][1]) if len(batch[name]) > 1 else torch.full((len(predicted),), -1)
                )
                kept.append((features.detach().flatten(1).cpu(), predicted.detach().cpu(), labels.detach().cpu()))

    def end_(self, trainer: Trainer, module: FederatedModule) -> list[list[str]]:
        """A header and a row for each sample; nothing if nothing was predicted here."""
        self.stop_()
        kept = {name: [*map(torch.cat, zip(*batches, strict=True))] for name, batches in self._kept.items()}
        widths = {features.shape[1] for features, *_ in kept.values()}
        if module.target.name not in kept or len(widths) != 1:
            return []
        generator = torch.Generator().manual_seed(0)  # the same samples in every run
        for name, each in kept.items():
            some = torch.randperm(len(each[0]), generator=generator)[:MAX_SAMPLES].sort().values
            kept[name] = [tensor[some] for tensor in each]
        features = torch.cat([features for features, *_ in kept.values()]).double()
        if not features.isfinite().all():
            return []
        points = iter(_plane(features))
        choosing = isinstance(module.task, Classification)
        names = class_names(trainer, module) if choosing else []
        rows = [HEADER]
        for name, (_, outputs, labels) in kept.items():
            known = known_labels(labels).tolist() if choosing else []
            for place, (output, label) in enumerate(zip(outputs, labels.tolist(), strict=True)):
                x, y = next(points)
                texts = [names[int(output.argmax())], names[label] if known[place] else ""] if choosing else ["", ""]
                rows.append([name, f"{x:.4g}", f"{y:.4g}", *texts])
        return rows

    def stop_(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._captured = [], {}


def _plane(features: Tensor) -> list[list[float]]:
    """Coordinates along the first two principal components, shape (n, 2), of features, shape (n, d)."""
    from sklearn.decomposition import PCA

    found = PCA(min(2, *features.shape), svd_solver="full").fit_transform(features.numpy())
    rows: list[list[float]] = [[*row, 0.0][:2] for row in found.tolist()]
    return rows
