"""FedDaDiL: federated dataset dictionary learning (Montesuma et al., 2024), algorithms 1 and 2.

Differences from the paper, where it leaves something open or does not work as printed:

- Atoms start at class means and variances of the sources' features, with different noise for each atom. A secure mean
  sends these to all clients, in a separate round. The paper does not state the start; its code draws from N(0, 1).
- Labels are stepped directly, as in the paper, and projected to the simplex after each step; the code takes softmax of
  free numbers, whose mean over clients is not the mean of the probabilities.
- Samples of a batch weigh so that its classes weigh the same, as the atoms' do: to carry other proportions onto them
  takes samples of one class to points of another. The paper's weigh the same; its code deals out the sources' samples
  by class, and the target's as they come. Here the target's are of the nearest class mean of its barycenter.
- ``label_cost="adaptive"`` is the code's; the paper's beta is a number. With it the loss is another function for each
  batch.
- The classifier of a reconstruction is fitted to the barycenter's points; the paper prints the target's own there.
- Coordinates start at 1/K; the code starts outside of the simplex.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlit.checks import check, check_at_least, check_one_of, check_positive
from fedlit.federation import Channel, Client, RosterError, Summed
from fedlit.federation.leaks import warn_of_lone_classes
from fedlit.federation.streams import stable_seed
from fedlit.functional import balanced_weights, joint_ot_loss, nearest_class_mean, wasserstein_barycenter
from fedlit.functional.wasserstein import LabelCost, check_entropy, check_label_cost
from fedlit.models import Dictionary, DictionaryReplica, feature_width
from fedlit.models.dictionary import STAYS_LOCAL
from fedlit.module import Batch, FederatedModule
from fedlit.run.component import Phase
from fedlit.run.options import ReplicaSpec, Requires
from fedlit.run.replicas import Replicas
from fedlit.run.run import Run
from fedlit.run.warmup import WarmUp
from fedlit.run.weights import Weighting


class ClassMoments(Phase):
    """A round in which the sources send the class moments of their features, from which the atoms start.

    Args:
        run: That it belongs to.
        start_atoms: Sends them, and sets the atoms.
    """

    rounds = 1

    def __init__(self, run: Run, start_atoms: Callable[[], None]) -> None:
        self._run = run
        self._start_atoms = start_atoms

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """The sources."""
        return self._run.sources

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """None, before there are atoms."""
        return {}

    def on_round_start(self, run: Run) -> None:
        """Let clients that were absent at the end of the warm-up fetch its result."""
        run.weights.finish_warmup()

    def on_round_end(self, run: Run) -> None:
        """Start the atoms."""
        self._start_atoms()


class FedDaDiL(FederatedModule):
    r"""Labelled atoms, of which each client's data are a barycenter (Montesuma et al., 2024, Algorithms 1 and 2).

    .. math:: \min_{P, \alpha} \frac{1}{N} \sum_\ell \mathcal{T}(\hat Q_\ell, B(\alpha_\ell; P))

    Phase 1 (``warmup_rounds``) trains an encoder by FedAvg over the sources; with given features (`Features`) it may be
    left out. One more round sends all clients the class moments of the sources' features, at which the atoms start. In
    phase 2 every client moves atoms and coordinates in local steps, on mini-batches of its samples and of the atoms; a
    round ends with the mean of the atoms. (E local epochs of the paper are ``local_steps`` = E ceil(n / n_b).) The
    target predicts with a classifier of its reconstruction (R) or with those of the atoms (E); the accuracy of both is
    logged, as ``oracle/target/reconstruction/acc`` and ``oracle/target/ensemble/acc``.

    Args:
        num_atoms: Number K of atoms.
        atom_size: Points n of an atom, at least the number of classes C.
        atom_batch_size: Most points n_b of an atom in a local step, at least C with balanced sampling; ``None`` takes
            all. The paper's n_b is also that of samples, the data module's ``batch_size``.
        sampling: How points are dealt out to the local steps of a pass: ``"balanced"`` over the classes at which they
            started (the code: to which they lean), or ``"uniform"``.
        sample_weights: How samples of a batch weigh: ``"balanced"`` over its classes, the target's being those of
            the nearest class mean of the barycenter, or ``"uniform"`` (the paper).
        label_cost: beta, or ``"adaptive"``: see `joint_cost`.
        num_iterations: Most updates of a barycenter.
        entropy: Weight of the entropy of all plans, in units of their largest cost (Sinkhorn), which stays on the
            device; ``None`` is exact transport, on the CPU. See `transport_plan`.
        atom_lr: Learning rate of points, in units of features.
        simplex_lr: Learning rate of labels and coordinates.
        predict_with: ``"reconstruction"`` (R) or ``"ensemble"`` (E).
        penalty: Of the classifiers, see `softmax_regression`.
        unit_norm: Scale features to length 1 in phase 2.
        weighting: Weights of clients in a mean.
        kwargs: See `FederatedModule`; the optimizer is that of both phases.

    Raises:
        ValueError: If an argument is out of range.
        RosterError: At the end of the round of class moments, if no source participated in it.

    Notes:
        Atoms are K n (d + C) numbers each way. Coordinates never leave a client. But a client's atoms, less those it
        was sent, reveal something of gradients on its data; a backend hides that among the clients. The class moments
        of a class that one source alone has are that source's own, whatever the backend: a `PrivacyWarning` warns it.
    """

    replicas: Replicas[DictionaryReplica]
    requires: ClassVar[Requires] = Requires(unlabelled_target=True, tasks=("classification",), class_weights=False)
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(local=STAYS_LOCAL, frozen_statistics=True)
    alternative_names: ClassVar[tuple[str, ...]] = ("reconstruction", "ensemble")
    watched_by: ClassVar[tuple[str, ...]] = ("fedlit.callbacks.DictionaryPictures",)

    def __init__(
        self,
        *args: Any,
        num_atoms: int = 3,
        atom_size: int = 200,
        atom_batch_size: int | None = None,
        sampling: Literal["balanced", "uniform"] = "balanced",
        sample_weights: Literal["balanced", "uniform"] = "balanced",
        label_cost: LabelCost = "adaptive",
        num_iterations: int = 10,
        entropy: float | None = None,
        atom_lr: float = 1e-3,
        simplex_lr: float = 1e-2,
        predict_with: Literal["reconstruction", "ensemble"] = "reconstruction",
        penalty: float = 1e-3,
        unit_norm: bool = True,
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, weighting=weighting, **kwargs)
        for name, value, least in (
            ("num_atoms (K)", num_atoms, 1),
            ("atom_size (n)", atom_size, self.num_classes),
            ("atom_batch_size (n_b)", atom_size if atom_batch_size is None else atom_batch_size, 1),
            ("num_iterations", num_iterations, 1),
        ):
            check(value >= least, name, f"at least {least}", value)
        for name, rate in (("atom_lr", atom_lr), ("simplex_lr", simplex_lr), ("penalty", penalty)):
            check_positive(name, rate)
        check_label_cost(label_cost)
        check_entropy(entropy)
        for name, choice in (("sampling", sampling), ("sample_weights", sample_weights)):
            check_one_of(name, choice, ("balanced", "uniform"))
        if sampling == "balanced" and atom_batch_size is not None and atom_batch_size < self.num_classes:
            raise ValueError(
                f"atom_batch_size (n_b) must be at least {self.num_classes}, a point of each class, with "
                f"sampling='balanced', got {atom_batch_size}: raise it, or take sampling='uniform'"
            )
        check_one_of("predict_with", predict_with, ("reconstruction", "ensemble"))
        self.width = feature_width(self.originals[0])
        self.num_atoms = num_atoms
        self.atom_size = atom_size
        self.atom_batch_size = min(atom_size, atom_batch_size or atom_size)
        self.sampling = sampling
        self.sample_weights = sample_weights
        self.label_cost = label_cost
        self.num_iterations = num_iterations
        self.entropy = entropy
        self.atom_lr = atom_lr
        self.simplex_lr = simplex_lr
        self.predict_with = predict_with
        self.penalty = penalty
        self.unit_norm = unit_norm

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Class moments, from which the atoms start, and the atoms."""
        return (
            Summed(
                "class_moments", "sums of features and their squares by class", "sources", how_often="once", fixed=True
            ),
            Summed("atoms", "points and labels of the atoms"),
        )

    # ---------------------------------------------------------------- local steps (algorithm 2)

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Everyone, the target on its unlabelled samples."""
        return self.clients

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """f_l: cost of transport between a batch and the barycenter of a batch of the atoms (equation 11)."""
        replica = self.replicas[client]
        replica.project_()
        replica.fitted.fill_(False)  # the atoms are about to move
        features = self.encode(client, batch[0])
        rows = self.rows(client)
        points = [atom[row] for atom, row in zip(replica.dictionary.points, rows, strict=True)]
        labels = [atom[row] for atom, row in zip(replica.dictionary.labels, rows, strict=True)]
        support, shares = self.barycenter(points, labels, replica.coordinates)
        if client.is_target:  # its labels are hidden
            weights = self.weights(features, None, (support, shares))
            return joint_ot_loss(features, support, entropy=self.entropy, weights=weights)
        classes = F.one_hot(batch[1], self.num_classes).to(features.dtype)
        weights = self.weights(features, classes, (support, shares))
        return joint_ot_loss(features, support, classes, shares, self.label_cost, self.entropy, weights)

    def weights(self, features: Tensor, classes: Tensor | None, barycenter: tuple[Tensor, Tensor]) -> Tensor | None:
        """Weights of a batch's samples, shape (n,), with sum 1; ``None`` are equal ones.

        Classes are one-hot, shape (n, C); ``None`` takes those of the nearest class means of the barycenter.
        """
        if self.sample_weights == "uniform":
            return None
        if classes is None:
            classes = F.one_hot(nearest_class_mean(features, *barycenter), self.num_classes)
        return balanced_weights(classes)

    def barycenter(
        self, points: list[Tensor], labels: list[Tensor], coordinates: Tensor, num_points: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Barycenter of some points of the atoms, shape (num_points, d), and its class probabilities (num_points, C).

        Without ``num_points`` it has as many as the atom with the largest coordinate.
        """
        found = wasserstein_barycenter(
            points, labels, coordinates, num_points, self.label_cost, None, self.num_iterations, entropy=self.entropy
        )
        assert found.labels is not None  # as some were given
        return found.support, found.labels

    @torch.no_grad()
    def encode(self, client: Client, inputs: Tensor) -> Tensor:
        """Features of a batch, shape (batch, d), without gradient and with statistics that stand still."""
        replica = self.replicas[client]
        replica.extractor.eval()
        return replica.features(inputs)

    def rows(self, client: Client) -> list[Tensor]:
        """Points of each atom in this local step, at most n_b: a pass over an atom deals out all, in equal batches."""
        steps = math.ceil(self.atom_size / self.atom_batch_size)
        turn, step = divmod(self.federation.batch_idx, steps)
        generator = torch.Generator().manual_seed(
            stable_seed(self.federation.seed, "atoms", client.name, self.federation.round_idx, turn)
        )
        orders = [self.order(generator).to(self.device) for _ in range(self.num_atoms)]
        return [order.tensor_split(steps)[step] for order in orders]

    def order(self, generator: torch.Generator) -> Tensor:
        """A permutation of an atom's points, shape (n,); balanced, each C in a row are one of each class."""
        shuffled = torch.randperm(self.atom_size, generator=generator)
        if self.sampling == "uniform":
            return shuffled
        classes = shuffled % self.num_classes  # at which points started
        turns = F.one_hot(classes, self.num_classes).cumsum(dim=0).gather(1, classes[:, None]).squeeze(1)
        return shuffled[turns.argsort(stable=True)]

    # ---------------------------------------------------------------- rounds (algorithm 1)

    def phases(self) -> tuple[Phase, ...]:
        """Encoder and classifier, as there is nothing in the atoms yet; a round of class moments; and the atoms."""
        encoder = WarmUp(self.run, self.label_loss, parts=("extractor", "classifier"))
        return encoder, ClassMoments(self.run, self.start_atoms_), self

    def on_round_start(self, run: Run) -> None:
        """Clients that were absent fetch the others' atoms."""
        run.weights.catch_up("atoms")

    def on_round_end(self, run: Run) -> None:
        """The mean of all clients' atoms (equation 12)."""
        for client in self.federation.local_clients:
            self.replicas[client].project_()
            self.replicas[client].fitted.fill_(False)
        run.weights.average_("atoms", among=self.clients, part="dictionary")

    def count(self, client: Client) -> Tensor:
        """A local source's sums by class over all its samples: features, their squares, and numbers, (C, 2d + 1)."""
        total = torch.zeros(self.num_classes, 2 * self.width + 1, dtype=torch.float64, device=self.device)
        for _, inputs, labels in self.run.samples.labelled([client]):
            with self.trainer.precision_plugin.forward_context():
                z = self.encode(client, inputs).double()
            classes = F.one_hot(labels, self.num_classes).double()
            total += torch.cat([classes.T @ z, classes.T @ z.square(), classes.sum(dim=0)[:, None]], dim=1)
        return total

    @torch.no_grad()
    def start_atoms_(self) -> None:
        """Points of each class around its mean over the sources, with its variance; another draw for each atom.

        A class that none of them has starts around the mean of all.
        """
        federation = self.federation
        if all(client.is_target for client in federation.present("class_moments")):
            raise RosterError(
                f"round {federation.round_idx} gathers the class moments of the sources, but none participates: "
                "give a participation with sources in the first round after warmup_rounds"
            )
        local = [client for client in self.sources if federation.is_local(client)]
        sums = {client.name: self.count(client) for client in local}
        means = {name: {"moments": each / each[:, -1].sum()} for name, each in sums.items()}
        received = federation.mean("class_moments", means, absent_too=True)
        generator = torch.Generator().manual_seed(stable_seed(federation.seed, "initial atoms"))
        noise = torch.randn(self.num_atoms, self.atom_size, self.width, generator=generator)
        for name, mean in received.items():
            moments = mean["moments"].double()
            if name in means:
                channel, own = federation.channels["class_moments"], means[name]["moments"]
                warn_of_lone_classes(channel, name, own[:, -1], moments[:, -1])
            moments = torch.where(moments[:, -1:] > 0, moments, moments.sum(dim=0))
            shares = moments[:, -1:]
            centres, squares = moments[:, : self.width] / shares, moments[:, self.width : -1] / shares
            spread = (squares - centres.square()).clamp(min=0).sqrt()
            dictionary = self.replicas[name].dictionary
            classes = dictionary.labels[0].argmax(dim=1)
            dictionary.points.copy_(centres[classes] + spread[classes] * noise.to(spread))
            self.replicas[name].started.fill_(True)

    # ---------------------------------------------------------------- predictions (section 3.4)

    def on_evaluation_start(self, run: Run) -> None:
        """Fit local clients' classifiers to the dictionary as it stands, where there is one and it has moved since."""
        for client in self.federation.local_clients:
            replica = self.replicas[client]
            if replica.started and not replica.fitted:
                atoms = client.is_target or self.predict_with == "ensemble"
                replica.fit_(self.reconstruct(client), self.penalty, atoms)

    def alternatives(self, inputs: Tensor) -> dict[str, Tensor]:
        """Both predictions, by reconstruction and by ensemble, once they are fitted."""
        replica = self.replicas[self.target]
        if not replica.fitted:
            return {}
        features = replica.features(inputs)
        return {"reconstruction": replica.by_reconstruction(features), "ensemble": replica.by_ensemble(features)}

    @torch.no_grad()
    def reconstruct(self, client: Client, num_points: int | None = None) -> tuple[Tensor, Tensor]:
        """A local client's barycenter of the whole atoms (equation 14), of ``num_points``, or as many as an atom has.

        Returns points of shape (num_points, d) and class probabilities of shape (num_points, C). Before there is a
        dictionary it raises a `RuntimeError`.
        """
        replica = self.replicas[client]
        if not replica.started:
            raise RuntimeError(
                f"there is no dictionary before round {self.warmup_rounds} ends (warmup_rounds={self.warmup_rounds}, "
                f"counted from 0), but training stands at round {self.federation.round_idx}: train for longer"
            )
        labels, coordinates = replica.projected()  # within a round gradients have moved them
        return self.barycenter(list(replica.dictionary.points), list(labels), coordinates, num_points)

    def distill(self, samples_per_class: int) -> tuple[Tensor, Tensor]:
        """A labelled summary of the target, where it is hosted: a barycenter of the atoms with few points per class.

        Returns features of shape (samples_per_class C, d) and class probabilities of shape (samples_per_class C, C).

        Raises:
            ValueError: If ``samples_per_class`` is less than 1.
            RuntimeError: If there is no dictionary yet.
        """
        check_at_least("samples_per_class", samples_per_class, 1)
        return self.reconstruct(self.target, samples_per_class * self.num_classes)

    # ---------------------------------------------------------------- set-up and hooks

    def build_replica(self) -> nn.Module:
        """Copies of encoder and classifier, and a dictionary."""
        extractor, classifier = copy.deepcopy(self.originals)
        dictionary = Dictionary(self.num_atoms, self.atom_size, self.width, self.num_classes)
        return DictionaryReplica(extractor, classifier, dictionary, self.unit_norm, self.predict_with == "ensemble")

    def client_param_groups(self) -> list[dict[str, Any]]:
        """Three parameter groups per local client: networks, points, and what lives on a simplex."""
        groups: list[dict[str, Any]] = []
        for client in self.federation.local_clients:
            replica = self.replicas[client]
            own = [replica.dictionary.points, replica.dictionary.labels, replica.coordinates]
            known = {id(param) for param in own}
            networks = [p for p in replica.parameters() if p.requires_grad and id(p) not in known]
            groups.append({"params": networks, "client": client.name})
            groups.append({"params": own[:1], "client": client.name, "lr": self.atom_lr})
            groups.append({"params": own[1:], "client": client.name, "lr": self.simplex_lr})
        return groups

    def on_fit_start(self) -> None:
        """A run that starts afresh has no dictionary yet, whatever one before it has left."""
        super().on_fit_start()
        if self.federation.round_idx <= self.warmup_rounds:
            for client in self.federation.local_clients:
                replica = self.replicas[client]
                replica.started.fill_(False)
                replica.fitted.fill_(False)
                replica.extractor.train()
