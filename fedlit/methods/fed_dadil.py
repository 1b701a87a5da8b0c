"""FedDaDiL: federated dataset dictionary learning (Montesuma et al., 2024), algorithms 1 and 2.

Differences from the paper, where it leaves something open or does not work as printed:

- Atoms start at class means and variances of the sources' features, a secure mean in a separate round, with different
  noise for each. The paper does not state the start; its code draws from N(0, 1), as ``atom_start="random"`` does.
- Labels are stepped directly (as in the paper), and projected to the simplex; the code takes softmax of free numbers,
  whose mean over clients is not that of the probabilities.
- Samples of a batch weigh so that its classes weigh the same, as the atoms' do, since other proportions are transported
  across classes. The paper's samples weigh the same; its code balances the sources' batches. The target's classes are
  those of the nearest class mean of its barycenter.
- ``label_cost="adaptive"`` is the code's, another function for each batch; the paper's beta is a number.
- The classifier of a reconstruction is fitted to the barycenter's points; the paper prints the target's samples.
- Coordinates start at 1/K; the code starts outside the simplex.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlit.checks import check_count, check_one_of, check_positive
from fedlit.federation import Channel, Client, RosterError, Summed
from fedlit.federation.leaks import warn_of_lone_classes
from fedlit.federation.lone_classes import (
    CLASS_SOURCES,
    LoneClasses,
    check_lone_classes,
    class_sources,
    find_lone_classes,
)
from fedlit.federation.streams import stable_seed
from fedlit.functional import balanced_weights, joint_ot_loss, nearest_class_mean, wasserstein_barycenter
from fedlit.functional.wasserstein import LabelCost, check_entropy, check_label_cost
from fedlit.models import Dictionary, DictionaryReplica, feature_width
from fedlit.models.copies import copied
from fedlit.models.dictionary import STAYS_LOCAL
from fedlit.module import Batch, FederatedModule
from fedlit.run.component import RUN_SETTINGS, Phase, PhaseSettings
from fedlit.run.options import ReplicaSpec, Requires
from fedlit.run.replicas import Replicas
from fedlit.run.run import Run
from fedlit.run.warmup import WarmUp
from fedlit.run.weights import Weighting


class ClassMoments(Phase):
    """A round in which the sources send the class moments of their features, from which the atoms start.

    Args:
        method: Of which it is a phase.
    """

    rounds = 1

    def __init__(self, method: FedDaDiL) -> None:
        self._method = method
        self._run = method.run

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
        self._method.start_atoms_()

    def on_return(self, public: Mapping[str, Any], clients: Collection[str]) -> None:
        """Let clients that were disconnected when the atoms started fetch the moments."""
        if self._run.clock.round_idx > self._run.clock.warmup_rounds:
            self._method.place_atoms_(self._run.federation.catch_up("class_moments", absent_too=True))


class FedDaDiL(FederatedModule):
    r"""Labelled atoms, of which each client's data are a barycenter (Montesuma et al., 2024, Algorithms 1 and 2).

    .. math:: \min_{P, \alpha} \frac{1}{N} \sum_\ell \mathcal{T}(\hat Q_\ell, B(\alpha_\ell; P))

    Phase 1 (``warmup_rounds``) trains an encoder by FedAvg over the sources; not needed with `Features`. One more round
    sends all clients the class moments of the sources' features, at which the atoms start by default. In phase 2
    clients move atoms and coordinates on mini-batches of samples and atoms; a round ends with the mean of the atoms.
    (The paper's E local epochs are ``local_steps`` = E ceil(n / n_b).) The target predicts by a classifier of its
    reconstruction (R) or those of the atoms (E); logged: ``oracle/target/reconstruction/acc`` and
    ``oracle/target/ensemble/acc``.

    Args:
        num_atoms: Number K of atoms.
        atom_size: Points n of an atom, at least the number of classes C.
        atom_batch_size: Maximum of points n_b of an atom in a local step, at least C with balanced sampling; ``None``
            takes all. The paper's n_b is also the data module's ``batch_size``.
        atom_start: ``"class_moments"``, or ``"random"``: points are drawn from a normal distribution around 0, of
            variance 1, or 1/d with ``unit_norm``; nothing is sent for it.
        sampling: How points are drawn in a pass: ``"balanced"`` over the classes at which they started, or
            ``"uniform"``.
        sample_weights: Weights of a batch's samples: ``"balanced"`` over its classes (at the target, of the nearest
            class mean of the barycenter), or ``"uniform"`` (the paper).
        label_cost: beta, or ``"adaptive"``: see `joint_cost`.
        num_iterations: Maximum of updates of a barycenter.
        entropy: Weight of the plans' entropy in units of their largest cost (Sinkhorn); ``None`` is exact transport,
            on the CPU. See `transport_plan`.
        atom_lr: Learning rate of points, in units of features.
        simplex_lr: Learning rate of labels and coordinates.
        predict_with: ``"reconstruction"`` (R) or ``"ensemble"`` (E).
        penalty: Of the classifiers, see `softmax_regression`.
        unit_norm: Scale features to length 1 in phase 2.
        encoder: Optimizer, batch_size and local_steps of phase 1, where they are not those of phase 2, as for an
            encoder of images: see `fedlit.PhaseSettings`.
        lone_classes: Where a backend hides the class moments, those of a class that one source alone has are its own:
            ``"leave_out"``, and the class starts as one that no source has, or ``"send"`` them.
        weighting: Weights of clients in a mean.
        kwargs: See `FederatedModule`.

    Raises:
        ValueError: If an argument is out of range.
        RosterError: At the end of the round of class moments, if there is one and no source participated in it.

    Notes:
        Atoms are K n (d + C) numbers each way. Coordinates never leave a client. The change of a client's atoms reveals
        something of gradients on its data; a backend hides it among the clients. Of a class that two sources have,
        each of the two can compute the other's moments. With ``lone_classes="send"`` a `PrivacyWarning` warns a source
        of classes that it alone has, as the moments of these are its own.
    """

    replicas: Replicas[DictionaryReplica]
    requires: ClassVar[Requires] = Requires(
        unlabelled_target=True, ignores_target_labels=True, tasks=("classification",), class_weights=False
    )
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(local=STAYS_LOCAL, frozen_statistics=True)
    alternative_names: ClassVar[tuple[str, ...]] = ("reconstruction", "ensemble")
    watched_by: ClassVar[tuple[str, ...]] = ("fedlit.callbacks.DictionaryPictures",)

    def __init__(
        self,
        *args: Any,
        num_atoms: int = 3,
        atom_size: int = 200,
        atom_batch_size: int | None = None,
        atom_start: Literal["class_moments", "random"] = "class_moments",
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
        encoder: PhaseSettings = RUN_SETTINGS,
        lone_classes: LoneClasses = "leave_out",
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, weighting=weighting, **kwargs)
        check_count("num_atoms (K)", num_atoms, 1)
        check_count("atom_size (n)", atom_size, self.num_classes, way_out="each class needs a point")
        check_count("num_iterations", num_iterations, 1)
        for name, rate in (("atom_lr", atom_lr), ("simplex_lr", simplex_lr), ("penalty", penalty)):
            check_positive(name, rate)
        check_label_cost(label_cost)
        check_entropy(entropy)
        check_one_of("atom_start", atom_start, ("class_moments", "random"))
        for name, choice in (("sampling", sampling), ("sample_weights", sample_weights)):
            check_one_of(name, choice, ("balanced", "uniform"))
        if atom_batch_size is not None:
            minimum = self.num_classes if sampling == "balanced" else 1  # a point of each class
            check_count("atom_batch_size (n_b)", atom_batch_size, minimum, f"with sampling={sampling!r}")
        check_one_of("predict_with", predict_with, ("reconstruction", "ensemble"))
        check_lone_classes(lone_classes)
        self.width = feature_width(self.originals[0])
        self.num_atoms = num_atoms
        self.atom_size = atom_size
        self.atom_batch_size = min(atom_size, atom_batch_size or atom_size)
        self.atom_start = atom_start
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
        self.encoder_settings = encoder
        self.lone_classes = lone_classes

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Class moments, if the atoms start from them, and the atoms."""
        atoms = Summed("atoms", "points and labels of the atoms")
        if self.atom_start == "random":
            return (atoms,)
        contents = "sums of features and their squares by class"
        moments = Summed("class_moments", contents, "sources", how_often="once", fixed=True)
        first = (class_sources(moments),) if self.lone_classes == "leave_out" else ()
        return moments, *first, atoms

    # ---------------------------------------------------------------- local steps (algorithm 2)

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Return f_l, the cost of transport from a batch to the barycenter of a batch of the atoms (equation 11)."""
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
        """Return weights of a batch's samples, shape (n,), of sum 1; ``None`` are equal ones.

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
        """Return the barycenter of points of the atoms, (num_points, d), and its class probabilities, (num_points, C).

        The default of ``num_points`` is the size of the atom with the largest coordinate.
        """
        found = wasserstein_barycenter(
            points, labels, coordinates, num_points, self.label_cost, None, self.num_iterations, entropy=self.entropy
        )
        assert found.labels is not None  # as some were given
        return found.support, found.labels

    @torch.no_grad()
    def encode(self, client: Client, inputs: Tensor) -> Tensor:
        """Return features of a batch, shape (batch, d), without gradient and with fixed statistics."""
        replica = self.replicas[client]
        replica.extractor.eval()
        return replica.features(inputs)

    def rows(self, client: Client) -> list[Tensor]:
        """Return points of each atom for this local step, at most n_b; a pass over an atom takes all."""
        steps = math.ceil(self.atom_size / self.atom_batch_size)
        turn, step = divmod(self.federation.batch_idx, steps)
        generator = torch.Generator().manual_seed(
            stable_seed(self.federation.seed, "atoms", client.name, self.federation.round_idx, turn)
        )
        orders = [self.order(generator).to(self.device) for _ in range(self.num_atoms)]
        return [order.tensor_split(steps)[step] for order in orders]

    def order(self, generator: torch.Generator) -> Tensor:
        """Return a permutation of an atom's points, shape (n,); balanced, each C in a row are one of each class."""
        shuffled = torch.randperm(self.atom_size, generator=generator)
        if self.sampling == "uniform":
            return shuffled
        classes = shuffled % self.num_classes  # at which points started
        turns = F.one_hot(classes, self.num_classes).cumsum(dim=0).gather(1, classes[:, None]).squeeze(1)
        return shuffled[turns.argsort(stable=True)]

    # ---------------------------------------------------------------- rounds (algorithm 1)

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of encoder and classifier, of class moments (one round, if any), and of the atoms."""
        encoder = WarmUp(self.run, self.label_loss, ("extractor", "classifier"), self.encoder_settings)
        return (encoder, self) if self.atom_start == "random" else (encoder, ClassMoments(self), self)

    def on_round_start(self, run: Run) -> None:
        """Draw atoms that start at random; let clients that were absent fetch the newest, and first the encoder."""
        if self.atom_start == "random":
            run.weights.finish_warmup()
            self.draw_atoms_()
        run.weights.catch_up("atoms")
        for client in self.federation.local_clients:
            if client.name in run.federation.roster.returned:
                self.replicas[client].fitted.fill_(False)

    def on_round_end(self, run: Run) -> None:
        """Average all clients' atoms (equation 12)."""
        for client in self.federation.local_clients:
            self.replicas[client].project_()
            self.replicas[client].fitted.fill_(False)
        run.weights.average_("atoms", among=self.clients, part="dictionary")

    def count(self, client: Client) -> Tensor:
        """Return a local source's sums by class of features, their squares, and numbers, shape (C, 2d + 1)."""
        total = torch.zeros(self.num_classes, 2 * self.width + 1, dtype=torch.float64, device=self.device)
        for _, inputs, labels in self.run.samples.labelled([client]):
            with self.trainer.precision_plugin.forward_context():
                z = self.encode(client, inputs).double()
            classes = F.one_hot(labels, self.num_classes).double()
            total += torch.cat([classes.T @ z, classes.T @ z.square(), classes.sum(dim=0)[:, None]], dim=1)
        return total

    @torch.no_grad()
    def start_atoms_(self) -> None:
        """Draw points of each class around its mean over the sources, with its variance, anew for each atom.

        A class that no source sends moments of starts around the mean of all.
        """
        federation = self.federation
        if all(client.is_target for client in federation.present("class_moments")):
            raise RosterError(
                f"round {federation.round_idx} gathers the class moments of the sources, but none participates: "
                "give a participation with sources in the first round after warmup_rounds"
            )
        local = [client for client in self.sources if federation.is_local(client)]
        sums = {client.name: self.count(client) for client in local}
        counts, follows = {name: each[:, -1] for name, each in sums.items()}, "atoms start there around the mean of all"
        for name, lone in find_lone_classes(federation, CLASS_SOURCES, counts, follows, absent_too=True).items():
            if name in sums:
                sums[name][lone] = 0
        means = {name: {"moments": each / each[:, -1].sum().clamp(min=1)} for name, each in sums.items()}
        self.place_atoms_(federation.mean("class_moments", means, absent_too=True), means)

    def noise(self) -> Tensor:
        """Return numbers of mean 0 and variance 1, equal at all clients, shape (K, n, d)."""
        generator = torch.Generator().manual_seed(stable_seed(self.federation.seed, "initial atoms"))
        return torch.randn(self.num_atoms, self.atom_size, self.width, generator=generator)

    @torch.no_grad()
    def draw_atoms_(self) -> None:
        """Draw the points of local clients' atoms at random, where there are none yet."""
        spread = self.width**-0.5 if self.unit_norm else 1.0
        for client in self.federation.local_clients:
            replica = self.replicas[client]
            if not replica.started:
                replica.dictionary.points.copy_(spread * self.noise())
                replica.started.fill_(True)

    @torch.no_grad()
    def place_atoms_(
        self,
        received: Mapping[str, Mapping[str, Tensor]],
        sent: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({}),
    ) -> None:
        """Start the atoms of local clients at the mean of the moments that they received, and warn of lone classes."""
        federation, noise = self.federation, self.noise()
        for name, mean in received.items():
            moments = mean["moments"].double()
            if name in sent:
                channel, own = federation.channels["class_moments"], sent[name]["moments"]
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
        """Fit local clients' classifiers to the dictionary, where it has moved since."""
        for client in self.federation.local_clients:
            replica = self.replicas[client]
            if replica.started and not replica.fitted:
                atoms = client.is_target or self.predict_with == "ensemble"
                replica.fit_(self.reconstruct(client), self.penalty, atoms)

    def alternatives(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return both predictions, by reconstruction and by ensemble, once they are fitted."""
        replica = self.replicas[self.target]
        if not replica.fitted:
            return {}
        features = replica.features(inputs)
        return {"reconstruction": replica.by_reconstruction(features), "ensemble": replica.by_ensemble(features)}

    @torch.no_grad()
    def reconstruct(self, client: Client, num_points: int | None = None) -> tuple[Tensor, Tensor]:
        """Return a local client's barycenter of the whole atoms (equation 14), as `barycenter`, by default of n points.

        Raises:
            RuntimeError: If there is no dictionary yet.
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
        """Return a labelled summary of the target, where it is hosted: a barycenter with few points per class.

        Features have shape (samples_per_class C, d), class probabilities (samples_per_class C, C).

        Raises:
            ValueError: If ``samples_per_class`` is less than 1.
            RuntimeError: If there is no dictionary yet.
        """
        check_count("samples_per_class", samples_per_class, 1)
        return self.reconstruct(self.target, samples_per_class * self.num_classes)

    # ---------------------------------------------------------------- set-up and hooks

    def build_replica(self) -> nn.Module:
        """Return copies of encoder and classifier, and a dictionary."""
        extractor, classifier = copied(self.originals)
        dictionary = Dictionary(self.num_atoms, self.atom_size, self.width, self.num_classes)
        return DictionaryReplica(extractor, classifier, dictionary, self.unit_norm, self.predict_with == "ensemble")

    def client_param_groups(self) -> list[dict[str, Any]]:
        """Return three groups per local client: networks, points, and parameters on a simplex."""
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
        """Forget the dictionary of an earlier run."""
        super().on_fit_start()
        last_step = 0 if self.atom_start == "random" else math.inf  # of the first round, that there are no atoms yet
        if (self.federation.round_idx, self.federation.batch_idx) <= (self.warmup_rounds, last_step):
            for client in self.federation.local_clients:
                replica = self.replicas[client]
                replica.started.fill_(False)
                replica.fitted.fill_(False)
                replica.extractor.train()
