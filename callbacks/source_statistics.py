"""What `Validators` and `Calibration` share: statistics of the sources' validation samples, averaged for the target."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fedlit.callbacks.shared import federated
from fedlit.federation import RosterError
from fedlit.federation.nested import Inputs
from fedlit.functional import random_fourier_features, sample_frequencies, temperature_grid
from fedlit.module import FederatedModule
from fedlit.run.component import Component
from fedlit.run.tasks import Classification

_T = TypeVar("_T")


class SourceStatistics(Callback, Component):
    """Collects batches in each validation, and sends means over the sources that have samples to the target.

    Random features have N frequencies, and the bandwidth of their Gaussian kernel, see `RandomBasis`.
    """

    def __init__(self, num_frequencies: int = 32, bandwidth: float = 0.5) -> None:
        self._basis = RandomBasis(num_frequencies, bandwidth)
        self._temperatures = temperature_grid()
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._unready = False
        """Whether a client has no classifier yet, as in FedRF-TCA before the first average."""
        self._kept: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        """Of the batches of this validation: what `_collect` keeps, by its name and by client."""

    def _collect(self, module: FederatedModule, name: str, inputs: Inputs, labels: Tensor, logits: Tensor) -> None:
        """Keep what statistics and scores need of a client's batch; the target's labels may not be looked at."""
        raise NotImplementedError

    def _statistics(self, channel: str, module: FederatedModule, source: str) -> dict[str, Tensor]:
        """The message of a source on a channel; zeros if it has no samples."""
        raise NotImplementedError

    def _has(self, what: str, client: str) -> bool:
        return client in self._kept[what]

    def _all(self, what: str, client: str) -> Tensor:
        return torch.cat(self._kept[what][client])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse regression, and draw features anew for a module that may have another width and seed."""
        if not isinstance(federated(pl_module, self).task, Classification):
            raise ValueError(
                f"{type(self).__name__} is for class probabilities, but the method has task='regression': remove the "
                "callback, and monitor 'source/r2'"
            )
        self._basis.forget_()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the samples of the last validation."""
        self._start_afresh()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Collect what is needed of the clients on this process."""
        if trainer.sanity_checking:
            return
        for name, samples in batch.items():
            if name in outputs:
                self._collect(federated(pl_module, self), name, samples[0], samples[1], outputs[name].detach())
            else:
                self._unready = True

    def _means(self, module: FederatedModule) -> dict[str, Tensor]:
        """Send statistics of each source; the target receives their means over sources that have samples."""
        federation = module.federation
        sources = [client.name for client in module.sources if federation.is_local(client)]
        received: dict[str, Tensor] = {}
        for channel in self.channels:
            sent = {name: self._statistics(channel.name, module, name) for name in sources}
            means = federation.mean(channel.name, sent, absent_too=True).get(module.target.name, {})
            # sources without samples have sent zeros: divided by the share of the others, this is the mean over those
            received |= {name: total if name == "there" else total / means["there"] for name, total in means.items()}
        return received

    def _at_target(self, module: FederatedModule, compute: Callable[[], _T]) -> _T | None:
        """Compute where the target is, if it has a classifier; an error there ends all processes."""
        result, error = None, None
        if module.federation.is_local(module.target) and not self._unready:
            try:
                result = compute()
            except RosterError as problem:
                error = problem
        module.federation.check(type(self).__name__.lower(), error)
        return result


def report_target(module: FederatedModule, scores: Mapping[str, float] | None, names: list[str]) -> dict[str, float]:
    """Numbers of the target, on all processes; ``None`` where it has none, or is not."""
    local = {} if scores is None else {module.target.name: dict(scores)}
    return module.federation.report(local, names).get(module.target.name, {})


class RandomBasis:
    """Random features of a client's extracted features scaled to length 1; the same for all clients.

    There are 2 N of them, of N frequencies; their Gaussian kernel's bandwidth is in units of the scaled features.
    """

    def __init__(self, num_frequencies: int = 32, bandwidth: float = 0.5) -> None:
        self.num_frequencies, self.bandwidth = num_frequencies, bandwidth
        self.size = 2 * num_frequencies
        self.forget_()

    def forget_(self) -> None:
        """Draw new frequencies for the next module."""
        self._frequencies: Tensor | None = None

    def of(self, module: FederatedModule, name: str, inputs: Inputs) -> Tensor:
        """Features of a batch of a local client's inputs, shape (n, 2 N), float64."""
        extracted: Tensor = module.replicas[name].get_submodule("extractor")(inputs)
        unit = F.normalize(extracted.detach().flatten(1).double(), dim=1)
        if self._frequencies is None:
            drawn = (self.num_frequencies, unit.shape[1], self.bandwidth)
            self._frequencies = sample_frequencies(*drawn, seed=module.federation.seed)
        return random_fourier_features(unit, self._frequencies)


def triangle(size: int) -> tuple[Tensor, ...]:
    """Indices of the upper triangle of a square matrix."""
    return tuple(torch.triu_indices(size, size))


def unfold(numbers: Tensor, size: int) -> Tensor:
    """The symmetric matrix, float64, with these numbers as its upper triangle."""
    full = torch.zeros(size, size, dtype=torch.float64)
    full[triangle(size)] = numbers.double()
    return full + full.T - full.diagonal().diag()
