"""kNN-Per (Marfoq, Neglia, Kameni and Vidal, ICML 2022), Algorithm 1.

Differences from the paper: lambda is given, and the same for all; the paper has each client choose it on validation
data (Jiang et al., ICLR 2024, report the best on the test data). The datastore holds all labelled training samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedlit import ReplicaSpec, Requires, Run
from fedlit.checks import check_between, check_count
from fedlit.methods.fedavg import FedAvg
from fedlit.models import Replica
from fedlit.models.copies import copied
from fedlit.run.local import evaluating
from fedlit.run.replicas import Replicas


def knn_probabilities(
    queries: Tensor, embeddings: Tensor, labels: Tensor, num_classes: int, num_neighbors: int
) -> Tensor:
    r"""Class probabilities (b, C) of queries (b, p) from the nearest embeddings (n, p), with weights exp(-distance).

    .. math:: p(c \mid x) \propto \sum_{i \in N_k(x)} 1\{y_i = c\} \, e^{-\lVert\phi(x) - \phi_i\rVert_2}

    Labels y_i are int64, shape (n,). Of fewer than ``num_neighbors`` embeddings (at least one is needed) all count.
    """
    # The usual expansion |a|^2 - 2ab + |b|^2 would give a sample a distance to itself.
    distances = torch.cdist(queries, embeddings, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distances.topk(min(num_neighbors, len(labels)), largest=False)
    weights = (-nearest.values).softmax(dim=1)  # far from all, every exp(-distance) would be 0
    return weights.new_zeros(queries.shape[0], num_classes).scatter_add_(1, labels[nearest.indices], weights)


class MemorisingReplica(Replica):
    """A client's network and its datastore: embeddings and classes of its labelled training samples.

    ``lam`` is the share of the neighbours in the prediction.
    """

    embeddings: Tensor
    labels: Tensor

    def __init__(self, extractor: nn.Module, classifier: nn.Module, lam: float, num_neighbors: int) -> None:
        super().__init__(extractor, classifier)
        self.lam = lam
        self.num_neighbors = num_neighbors
        self.register_buffer("embeddings", torch.empty(0, 0))
        self.register_buffer("labels", torch.empty(0, dtype=torch.int64))
        self.register_load_state_dict_pre_hook(_make_room)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """Log of lam p_kNN + (1 - lam) p_w; with an empty datastore, the logits of w."""
        features = self.extractor(x)
        logits: Tensor = self.classifier(features)
        if not len(self.labels):
            return logits
        exact = torch.promote_types(features.dtype, torch.float32)  # distances have no half precision
        own = logits.to(exact).softmax(dim=1)
        near = knn_probabilities(
            features.to(exact), self.embeddings.to(exact), self.labels, own.shape[1], self.num_neighbors
        )
        mixed = torch.lerp(own, near, self.lam)
        return mixed.clamp(min=torch.finfo(mixed.dtype).tiny).log()  # log 0 would make entropies NaN

    def memorise_(self, embeddings: Tensor, labels: Tensor) -> None:
        """Fill the datastore."""
        self.embeddings, self.labels = embeddings, labels

    def forget_(self) -> None:
        """Empty the datastore."""
        self.embeddings, self.labels = self.embeddings.new_empty(0, 0), self.labels.new_empty(0)


def _make_room(replica: MemorisingReplica, state: Mapping[str, Tensor], prefix: str, *_: Any) -> None:
    """Give the datastore the size of the one that is about to be loaded."""
    for name in ("embeddings", "labels"):
        if f"{prefix}{name}" in state:
            setattr(replica, name, getattr(replica, name).new_empty(state[f"{prefix}{name}"].shape))


class KNNPer(FedAvg):
    """FedAvg of w, predicting lam p_kNN + (1 - lam) p_w at each client (Marfoq et al., ICML 2022, Algorithm 1).

    Training is FedAvg's. For evaluation, each client embeds its labelled training samples by the extractor that it then
    has, and keeps them in its datastore: when a validation starts, when a checkpoint is written, and at the end of
    training. Other parts of training predict with w alone. With `Features`, which passes inputs on, the neighbours are
    those of the inputs.

    The datastore never leaves its client. But a checkpoint holds those of all clients, as it does their weights: a
    number per feature and labelled training sample.

    Args:
        lam: Share lambda of the neighbours in [0, 1]: 0 is FedAvg, 1 is the neighbours alone.
        num_neighbors: Number k of neighbours, at least 1; all labelled samples of a client that has fewer.

    Raises:
        RosterError: When training starts, if the target has no labels.
        TypeError: When training ends, if the data did not come from a `FederatedLoader`.
    """

    replicas: Replicas[MemorisingReplica]
    requires: ClassVar[Requires] = Requires(target_labels=True, tasks=("classification",))
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(local=("embeddings", "labels"))

    def __init__(self, *args: Any, lam: float = 0.5, num_neighbors: int = 10, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_between("lam (lambda)", lam, 0, 1, "it is the share of the neighbours")
        check_count("num_neighbors (k)", num_neighbors, 1)
        self.lam = lam
        self.num_neighbors = num_neighbors
        self.run.weights.watchers.append(self.forget_)

    def build_replica(self) -> MemorisingReplica:
        """A network and an empty datastore."""
        return MemorisingReplica(*copied(self.originals), self.lam, self.num_neighbors)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """As FedAvg; what was memorised is out of date from here on."""
        self.forget_()
        return super().training_step(batch, batch_idx)

    def forget_(self, received: Mapping[str, Mapping[str, Tensor]] | None = None) -> None:
        """Empty the datastores of local clients, which weights that were received put out of date."""
        for client in self.federation.local_clients:
            self.replicas[client].forget_()

    def on_evaluation_start(self, run: Run) -> None:
        """Fill empty datastores of local clients, where there are training data to fill them from."""
        empty = [client for client in self.federation.local_clients if not len(self.replicas[client].labels)]
        if not empty or not run.is_attached or run.trainer.train_dataloader is None:
            return
        samples: dict[str, list[tuple[Tensor, Tensor]]] = {client.name: [] for client in empty}
        # inference tensors, such as validation would make, could not be loaded into later
        with torch.inference_mode(False), evaluating(self):
            for name, inputs, labels in self.run.samples.labelled(empty):
                with self.trainer.precision_plugin.forward_context():
                    features = self.replicas[name].extractor(inputs)
                samples[name].append((features, labels))
            for name, parts in samples.items():
                self.replicas[name].memorise_(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Fill the datastores first, so that the checkpoint predicts as the clients do."""
        self.on_evaluation_start(self.run)
        checkpoint["state_dict"] = self.state_dict()  # Lightning took it with datastores as they were
        super().on_save_checkpoint(checkpoint)
