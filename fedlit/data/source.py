"""What a data set states about itself: its domains, its classes and how a domain is loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from fedlit.data.raw_inputs import RawInputs
from fedlit.data.samples import Domain, Transform
from fedlit.federation.labels import TaskName


class DomainSource(ABC):
    """Domains with one set of classes, loaded one at a time.

    Attributes:
        unshared_classes: Whether a class may occur at one client only: an error unless the data set makes such shifts.
        spread: Whether clients' data may lie on different machines, where others' clients are known by name alone.
        elsewhere: Whether this process has no client's data, as that of a server apart.
        task: ``"classification"`` or ``"regression"``.
    """

    unshared_classes = False
    spread = False
    elsewhere: bool = False
    task: TaskName = "classification"

    @abstractmethod
    def domain_names(self) -> list[str]:
        """Return names of all domains, in the order in which they are the clients by default."""

    def is_here(self, domain: str) -> bool:
        """Return whether this process can read the data of a domain; those that others host need not be there."""
        return domain in self.domain_names()

    @abstractmethod
    def class_names(self) -> list[str]:
        """Return names of the classes, in the order of the labels; in regression, of the numbers to predict."""

    @abstractmethod
    def load(self, domain: str) -> Domain:
        """Return all samples of one domain, with their true labels."""

    def finish(self, x: Tensor, train: Tensor) -> Tensor:
        """Normalise a client's samples, with statistics of the samples at ``train`` (positions) only."""
        return x

    def transform(self, training: bool) -> Transform | None:
        """Return what is done to each batch of samples, or ``None``; `DomainDataset` says how it may draw numbers."""
        return None

    def raw_inputs(self) -> RawInputs | None:
        """Return the target's samples as their owner has them, and the network that prepares them, for an export.

        ``None`` where models take samples as `load` gives them. A data module that overrides `finish`, or whose
        `transform` changes numbers in evaluation, overrides this too, or its models are exported for prepared samples
        alone.
        """
        return None

    def ids(self, client: str, stage: str) -> list[str] | None:
        """Return names of a client's samples in one stage, in order, such as file names; ``None`` if they have none.

        Args:
            client: One whose data are here.
            stage: "train", "val", "test", or "predict" for what `predict_dataloader` gives.
        """
        return None
