"""Training samples of local clients outside of their local steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedlit.checks import refuse
from fedlit.federation import Client, FederatedLoader, RoundPlan
from fedlit.federation.labels import known_labels
from fedlit.federation.nested import Inputs, take

if TYPE_CHECKING:
    from fedlit.run.run import Run


class LocalSamples:
    """Read training samples of local clients; tensors are on the run's device.

    Methods that read samples raise a `TypeError` unless training data come from a `FederatedLoader`.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def loader(self) -> FederatedLoader | None:
        """The run's training data; ``None`` before they are read, or if they are no `FederatedLoader`."""
        loader = self._run.trainer.train_dataloader
        return loader if isinstance(loader, FederatedLoader) else None

    def labelled(self, clients: Sequence[Client]) -> Iterator[tuple[str, Inputs, Tensor]]:
        """Yield all labelled training samples of local clients, once and in a fixed order: name, inputs, labels.

        In regression labels are standardised.
        """
        for batch in self._on_device(self._loader().in_order([client.name for client in clients])):
            for name, (inputs, labels, *_) in batch.items():
                known = known_labels(labels)
                x, y = self._run.task.standardised(name, (take(inputs, known), labels[known]))
                yield name, x, y

    def inputs(self, client: Client) -> Iterator[Inputs]:
        """Yield inputs of all training samples of a local client, in the dataset's order; see `positions`."""
        for batch in self._on_device(self._loader().in_order([client.name], labelled_only=False)):
            yield batch[client.name][0]

    def mixed_inputs(self, client: Client, batch_size: int = 512) -> Iterator[Inputs]:
        """Yield the same in a fixed random order, as samples may be sorted by class."""
        for batch in self._on_device(self._alone(client, batch_size, self._loader().num_workers)):
            yield batch[client.name][0]

    def shuffled(self, client: Client, pass_idx: int) -> Iterator[tuple[Tensor, Inputs]]:
        """Yield positions (as in `inputs`, int64) and inputs of all training samples, reordered in each pass."""
        loader, name = self._loader(), client.name
        once = self._alone(client, loader.batch_size_of(name), loader.num_workers)
        once.plan(RoundPlan(sizes=once.sizes(), learners=lambda round_idx: [name], position=lambda: (pass_idx, 0)))
        for batch_idx, batch in enumerate(self._on_device(once)):
            yield once.positions(name, pass_idx, batch_idx), batch[name][0]

    def drawn(self, client: Client, number: int) -> Inputs:
        """Return inputs of ``number`` random training samples (of all, if fewer); the same in every call."""
        return next(self._on_device(self._alone(client, number, num_workers=0)))[client.name][0]

    def first(self, client: Client) -> Inputs:
        """Return inputs of a local client's first training sample, as a batch of one."""
        return self._loader().samples(client.name)[0]

    def positions(self, client: Client) -> Tensor:
        """Return the dataset positions of a local client's current batch, int64, shape (batch,)."""
        clock = self._run.clock
        return self._loader().positions(client.name, clock.round_idx, clock.step)

    def sizes_in_step(self, clients: Sequence[Client]) -> dict[str, int]:
        """Return the batch sizes of clients that are `Run.in_step`."""
        loader, clock = self._loader(), self._run.clock
        return {client.name: loader.samples_in(client.name, clock.round_idx, clock.step) for client in clients}

    def _alone(self, client: Client, batch_size: int, num_workers: int) -> FederatedLoader:
        """Return a loader of one local client's training samples, shuffled, without labels."""
        loader = self._loader()
        own = {client.name: loader.datasets[client.name]}
        alone = FederatedLoader(
            own,
            batch_size,
            num_workers=num_workers,
            pin_memory=loader.pin_memory,
            guarded=client.name,
            seed=loader.seed,
        )
        alone.check = loader.check
        return alone

    def _on_device(self, loader: FederatedLoader) -> Iterator[dict[str, Any]]:
        """Yield a loader's batches as the Trainer hands them to a step."""
        trainer = self._run.trainer
        for batch in loader:
            yield trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))

    def _loader(self) -> FederatedLoader:
        loader = self._run.trainer.train_dataloader
        if not isinstance(loader, FederatedLoader):
            refuse(
                "train_dataloaders",
                f"a FederatedLoader, from which {self._run.name} reads training samples",
                loader,
                "give FederatedLoader({client: dataset}), or a fedlit.data.DomainDataModule",
                TypeError,
                shown=f"a {type(loader).__name__}",
            )
        return loader
