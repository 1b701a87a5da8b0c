"""DictionaryPictures: the dictionary of FedDaDiL as pictures of its atoms and of each client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fedlit.callbacks.shared import colors_of, is_dry, log_folder, over_rounds, write_rows
from fedlit.methods import FedDaDiL
from fedlit.run.component import Component
from fedlit.run.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_SAMPLES = 1000
"""Of the target in a picture."""


class DictionaryPictures(Callback, Component):
    """Draw FedDaDiL's atoms, each client's coordinates and transport cost, and the target by its reconstruction.

    At the end of a fit, into the Trainer's ``log_dir``, or its ``default_root_dir``:

    - ``dictionary_atoms.png``, from process 0: how much of each atom's label mass is of each class.
    - ``dictionary_CLIENT.png`` and ``.csv``, from the process that hosts the client: its barycentric coordinates and
      its cost of transport f_l (mean over the local steps of a round), by round. The target's picture has its samples
      of the last validation too, coloured by predicted class, next to the points of its barycenter, coloured by label,
      in the plane of the principal components of both.

    Coordinates are private: a picture holds those of one client and stays where that client is. Nothing is written
    under ``fast_dev_run``.

    Attributes:
        rounds: By client and round of phase 2: its coordinates and, last, its cost, ``NaN`` where it did not train.

    Raises:
        TypeError: When a run starts, if the module is no `FedDaDiL`.
    """

    def __init__(self) -> None:
        self.rounds: dict[str, dict[int, list[float]]] = {}
        self._seen: list[tuple[Tensor, Tensor]] = []  # the target's features and predicted classes

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the rounds before this one, if this run resumes, and nothing else."""
        now = _dadil(pl_module).federation.round_idx
        self.rounds = {
            client: {round_idx: row for round_idx, row in rounds.items() if round_idx < now}
            for client, rounds in self.rounds.items()
        }

    def on_round_end(self, run: Run) -> None:
        """Collect coordinates and costs, once there are atoms."""
        dadil, round_idx = _dadil(run.module), run.clock.round_idx
        if round_idx <= run.clock.warmup_rounds:
            return
        costs = run.record.mean_losses()
        for client in dadil.federation.local_clients:
            coordinates = dadil.replicas[client].coordinates.detach().tolist()
            row = [*coordinates, costs.get(client.name, float("nan"))]
            self.rounds.setdefault(client.name, {})[round_idx] = row

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the features of earlier rounds."""
        self._seen.clear()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Keep the target's features, if it is hosted here."""
        module = _dadil(pl_module)
        name = module.target.name
        if isinstance(outputs, Mapping) and name in outputs:
            features = module.encode(module.target, batch[name][0])
            self._seen.append((features.cpu(), outputs[name].argmax(dim=1).cpu()))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the pictures and tables."""
        module = _dadil(pl_module)
        folder = log_folder(trainer)
        if is_dry(trainer) or not self.rounds:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if module.federation.is_local(module.target):  # process 0 may be the server's alone
            self.plot_atoms(module).savefig(folder / "dictionary_atoms.png", dpi=120)
        for client in module.federation.local_clients:
            if client.name in self.rounds:
                rounds = self.rounds[client.name]
                coordinates = [f"coordinate_{atom + 1}" for atom in range(len(next(iter(rounds.values()))) - 1)]
                rows = [[round_idx, *rounds[round_idx]] for round_idx in sorted(rounds)]
                header = ["round", *coordinates, "transport_cost"]
                write_rows(folder / f"dictionary_{client.name}.csv", [header, *rows])
                self.plot_client(module, client.name).savefig(folder / f"dictionary_{client.name}.png", dpi=120)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put each client's rounds under its name."""
        for client, rounds in self.rounds.items():
            checkpoint.setdefault("clients", {}).setdefault(client, {})["pictures"] = dict(rounds)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on with the rounds of a checkpoint."""
        local = [client.name for client in _dadil(pl_module).federation.local_clients]
        kept = {name: checkpoint.get("clients", {}).get(name, {}).get("pictures", {}) for name in local}
        self.rounds = {name: dict(rounds) for name, rounds in kept.items() if rounds}

    def plot_atoms(self, module: FedDaDiL) -> Figure:
        """Share of each class in each atom's labels, as stacked bars; on the process that hosts the target."""
        from matplotlib.figure import Figure

        labels = module.replicas[module.target].dictionary.labels.detach().double().cpu()
        shares = labels.mean(dim=1).numpy()  # of atom and class
        figure = Figure(figsize=(1.6 * len(shares) + 3.5, 4.2), layout="constrained")
        axis = figure.subplots()
        places, foot = np.arange(len(shares)), np.zeros(len(shares))
        for label, color in enumerate(colors_of(shares.shape[1])):
            axis.bar(places, shares[:, label], 0.7, foot, color=color, edgecolor="white", linewidth=0.5, label=label)
            foot += shares[:, label]
        axis.set_xticks(places, [f"atom {place + 1}" for place in places])
        axis.set_ylim(0, 1)
        axis.set_title("classes of the atoms' labels, shares")
        figure.legend(title="class", loc="outside right center", fontsize=8, frameon=False, reverse=True)
        return figure

    def plot_client(self, module: FedDaDiL, client: str) -> Figure:
        """Coordinates and cost of a client that this process hosts over rounds; the target's reconstruction, too.

        Raises:
            ValueError: If no round of it has been collected.
        """
        from matplotlib.figure import Figure

        if not self.rounds.get(client):
            raise ValueError(
                f"client must be one with a collected round, got {client!r} of {sorted(self.rounds)}: fit FedDaDiL "
                "with this callback"
            )
        embeds = client == module.target.name and bool(self._seen)
        figure = Figure(figsize=(15.5 if embeds else 9.5, 4.4), layout="constrained")
        axes = figure.subplots(1, 3 if embeds else 2, squeeze=False, width_ratios=[1, 1, 1.6][: 3 if embeds else 2])[0]
        rounds = sorted(self.rounds[client])
        rows = np.array([self.rounds[client][round_idx] for round_idx in rounds])
        few = "." if len(rounds) == 1 else ""
        axes[0].plot(rounds, rows[:, :-1], marker=few, label=[f"atom {atom + 1}" for atom in range(rows.shape[1] - 1)])
        axes[0].set_ylim(-0.03, 1.03)
        axes[0].set_title(rf"barycentric coordinates $\alpha$ of {client}")
        axes[0].legend(fontsize=9, frameon=False)
        axes[1].plot(rounds, rows[:, -1], marker=few, color="black")
        axes[1].set_ylim(bottom=0)
        axes[1].set_title(rf"transport cost $f_\ell$ of {client}")
        for axis in axes[:2]:
            over_rounds(axis)
        if embeds:
            self._draw_plane(axes[2], module)
        return figure

    def _draw_plane(self, axis: Axes, module: FedDaDiL) -> None:
        from sklearn.decomposition import PCA

        features, predicted = map(torch.cat, zip(*self._seen, strict=True))
        kept = torch.linspace(0, len(features) - 1, min(len(features), _MAX_SAMPLES)).round().long()
        points, labels = (each.cpu() for each in module.reconstruct(module.target))
        plane = PCA(2, random_state=0).fit_transform(torch.cat([features[kept], points]).double().numpy())
        colors = np.array(colors_of(module.num_classes))
        samples, drawn = plane[: len(kept)], plane[len(kept) :]
        of_class = colors[labels.argmax(dim=1).numpy()]
        axis.scatter(samples[:, 0], samples[:, 1], s=14, c=colors[predicted[kept].numpy()], alpha=0.45, linewidths=0)
        axis.scatter(drawn[:, 0], drawn[:, 1], s=34, marker="P", c=of_class, edgecolors="black", linewidths=0.5)
        sample, point = "samples of the target, by predicted class", "points of its barycenter, by label"
        axis.scatter([], [], s=14, c="grey", alpha=0.6, label=sample)
        axis.scatter([], [], s=34, c="grey", marker="P", edgecolors="black", linewidths=0.5, label=point)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=2, frameon=False)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_title(f"{module.target.name} and its reconstruction, principal components")


def _dadil(module: LightningModule) -> FedDaDiL:
    if not isinstance(module, FedDaDiL):
        raise TypeError(
            f"DictionaryPictures draws what FedDaDiL learns, got {type(module).__name__}: train FedDaDiL, or remove "
            "the callback"
        )
    return module
