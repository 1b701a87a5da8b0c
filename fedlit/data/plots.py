"""Figures of a data module's domains, for people; the target's true classes are shown as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from fedlit.federation.labels import UNLABELLED, known_labels
from fedlit.federation.nested import leaves, num_samples, take

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedlit.data.base import DomainDataModule

_MAX_POINTS = 500
"""Samples of each client in a scatter plot, evenly picked."""


def plot_images(data: DomainDataModule, columns: int) -> Figure:
    """Draw ``columns`` images of each client, of all of its classes in turn."""
    from matplotlib.figure import Figure

    clients, classes = data.check_roster(), data.class_names()
    figure = Figure(figsize=(1.1 * columns + 0.8, 1.3 * len(clients) + 0.3), layout="constrained")
    for row, client in zip(figure.subplots(len(clients), columns, squeeze=False), clients, strict=True):
        y = data.labels(client.name)
        present = [label for label in range(len(classes)) if bool((y == label).any())] or [UNLABELLED]
        labels = [present[column % len(present)] for column in range(columns)]
        positions = []
        for column, label in enumerate(labels):  # from all over the class, which may be sorted
            members = (y == label).nonzero().squeeze(1)
            positions.append(members[column // len(present) * len(members) // labels.count(label)])
        images = cast(Tensor, data.pixels(client.name, torch.stack(positions)))
        if images.shape[1] == 2:  # red and green, as in ColoredMNIST
            images = torch.cat([images, torch.zeros_like(images[:, :1])], dim=1)
        for axis, image, label in zip(row, images, labels, strict=True):
            axis.imshow(image.permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set_title(classes[label] if label >= 0 else "no label", fontsize=8)
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].set_ylabel(f"{client.name}\n({client.role})", fontsize=9)
    return figure


def plot_features(data: DomainDataModule) -> Figure:
    """Draw two principal components of all samples, and what is to be predicted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    scatter, labels = figure.subplots(1, 2, width_ratios=[1.2, 1])
    plot_components(data, scatter)
    plot_labels(data, labels)
    return figure


def plot_components(data: DomainDataModule, axis: Any) -> None:
    """Draw two principal components of all clients' samples together."""
    from sklearn.decomposition import PCA

    samples = []
    for client in data.check_roster():
        x = data._domain(client.name).x
        number = num_samples(x)
        positions = torch.linspace(0, number - 1, min(number, _MAX_POINTS)).round().long()
        picked = leaves(take(x, positions)).values()
        samples.append(torch.cat([leaf.reshape(len(leaf), -1).double() for leaf in picked], dim=1))
    components = PCA(2)
    points = np.split(components.fit_transform(torch.cat(samples).numpy()), np.cumsum([*map(len, samples)])[:-1])
    shares = components.explained_variance_ratio_
    for client, point in zip(data.check_roster(), points, strict=True):
        marker = "x" if client.is_target else "o"
        axis.scatter(*point.T, s=14, alpha=0.6, marker=marker, label=f"{client.name} ({client.role})")
    axis.set_xlabel(f"component 1 ({shares[0]:.0%} of the variance)")
    axis.set_ylabel(f"component 2 ({shares[1]:.0%} of the variance)")
    axis.set_title("Two principal components of all clients' samples")
    axis.legend(fontsize=8)


def plot_labels(data: DomainDataModule, axis: Any) -> None:
    """Draw each client's class shares, or in regression the density of what is to be predicted."""
    clients, classes = data.check_roster(), data.class_names()
    if data.task == "regression":
        for client in clients:
            y = data.labels(client.name)
            values = y.reshape(len(y), -1)[:, 0].numpy()
            axis.hist(values, bins=20, density=True, histtype="step", label=f"{client.name} (n={len(y)})")
        axis.set_xlabel(classes[0])
        axis.set_ylabel("density")
        axis.set_title("What is to be predicted")
        axis.legend(fontsize=8)
        return
    width = 0.8 / len(clients)
    for number, client in enumerate(clients):
        y = data.labels(client.name)
        counts = torch.bincount(y[known_labels(y)], minlength=len(classes)).double()
        left = torch.arange(len(classes)) + (number - (len(clients) - 1) / 2) * width
        total = counts.sum()
        shares = (counts / total.clamp(min=1)).numpy()
        axis.bar(left.numpy(), shares, width, label=f"{client.name} (n={int(total)})")
    slanted = {"rotation": 45, "ha": "right"} if len(classes) > 3 else {}
    axis.set_xticks(range(len(classes)), classes, **slanted)
    axis.set_ylim(0, 1.3 * axis.get_ylim()[1])  # room for the legend
    axis.set_ylabel("share of the client's samples")
    axis.set_title("Classes")
    axis.legend(fontsize=8, ncols=2)
