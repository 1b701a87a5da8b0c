"""Distillation into the target's network (Hinton, Vinyals and Dean, 2015; of an ensemble: Lin et al., NeurIPS 2020).

Differences from the papers: no temperature, since the teacher's probabilities are refined rather than those of one
network; the last layer is fitted to them in closed form when the run ends; the samples are the target's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedlit import FederatedModule, Requires, Run
from fedlit.checks import check
from fedlit.federation import Client, RosterError
from fedlit.run.local import evaluating
from fedlit.run.refinement import NoRefinementError, copied, features_of, put_in_, restore_


class TargetDistillation(FederatedModule):
    """The target's network learns given class probabilities of its samples (Hinton, Vinyals and Dean, 2015).

    Nothing is sent. ``fedlit fit --compare ... --select combine`` writes such a file and trains on it. By itself,
    ``torch.save`` a dictionary with ``probabilities``, shape (n, C), of the target's n training samples in the order of
    its data, and, if need be, ``start``: a state dict of the network to begin with. Logs ``target/agreement``, the
    share of these samples on which the network's class is that of the file, when the run ends.

    Args:
        teacher: Path of such a file, read by the process that hosts the target when a run starts.
        kwargs: See `FederatedModule`.

    Raises:
        RosterError: When a run starts, on every process, if the file cannot be read or does not fit.
    """

    requires: ClassVar[Requires] = Requires(
        unlabelled_target=True, tasks=("classification",), class_weights=False, sources=False
    )

    def __init__(self, *args: Any, teacher: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check(
            kwargs.get("warmup_rounds", 0) == 0, "warmup_rounds", "0, as no source trains", kwargs.get("warmup_rounds")
        )
        self.teacher = teacher
        self._probabilities: Tensor | None = None

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Return the target."""
        return (self.target,)

    def on_run_start(self, run: Run) -> None:
        """Read the file, unless a checkpoint had it."""
        error: RosterError | None = None
        if self._probabilities is None and self.federation.is_local(self.target):
            try:
                self._read(run)
            except RosterError as found:
                error = found
        self.federation.check("teacher", error)

    def _read(self, run: Run) -> None:
        rule = "a file of torch.save with 'probabilities' of shape (n, C)"
        check(self.teacher is not None, "teacher", rule, None, "fit --select combine writes one", RosterError)
        path = Path(str(self.teacher))
        try:
            found: Any = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # at bytes of another format, of any kind
            raise RosterError(f"teacher must be {rule}, got '{path}', which cannot be read: {error}") from error
        found = found if isinstance(found, Mapping) else {}
        p, number = found.get("probabilities"), run.federation.weights[self.target.name]
        fits = isinstance(p, Tensor) and p.shape == (number, self.num_classes) and bool((p >= 0).all())
        fits = fits and torch.allclose(p.double().sum(dim=1), torch.ones(len(p)).double(), atol=1e-3)
        shape = tuple(p.shape) if isinstance(p, Tensor) else p
        rule = f"{rule} for the {number} training samples of target {self.target.name!r} and {self.num_classes} classes"
        check(fits, "teacher", rule, str(path), error=RosterError, shown=f"'{path}' with {shape}")
        self._probabilities = p.float()
        start = found.get("start")
        if start is not None:
            try:
                self.replicas[self.target].load_state_dict(start)
            except (RuntimeError, AttributeError, TypeError) as error:
                lines = str(error).strip().splitlines()
                raise RosterError(
                    f"teacher '{path}': its start is of another network than the target's: leave it out ({lines[0]})"
                ) from error

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Return the mean cross-entropy between the given and the predicted probabilities."""
        assert self._probabilities is not None
        wanted = self._probabilities[self.run.samples.positions(client)].to(self.device)
        return F.cross_entropy(self.replicas[client](batch[0]), wanted)

    def on_run_end(self, run: Run) -> None:
        """Fit the last layer, and report how far the network is from what it was given."""
        numbers: dict[str, dict[str, float]] = {}
        if self.federation.is_local(self.target) and self._probabilities is not None:
            network = self.replicas[self.target]
            before = copied(network)
            try:
                layers, features, _ = features_of(run)  # which may tell classes apart though one alone is predicted
                outputs = put_in_(run, layers, features, self._probabilities.double())
            except NoRefinementError as reason:
                rank_zero_warn(f"{type(self).__name__} leaves the network as the last round made it: {reason}")
                restore_(network, before)
                with evaluating(network), self.trainer.precision_plugin.forward_context():
                    outputs = torch.cat([network(inputs).cpu() for inputs in run.samples.inputs(self.target)])
            same = outputs.argmax(dim=1) == self._probabilities.argmax(dim=1)
            numbers[self.target.name] = {"agreement": float(same.double().mean())}
        reported = self.federation.report(numbers, ["agreement"]).get(self.target.name, {})
        run.log({f"target/{name}": number for name, number in reported.items()}, self.target)

    def client_state(self, client: str) -> dict[str, Any]:
        """Return the target's probabilities."""
        return (
            {"teacher": self._probabilities} if client == self.target.name and self._probabilities is not None else {}
        )

    def load_state(self, clients: Mapping[str, Mapping[str, Any]], public: Mapping[str, Any], resumes: bool) -> None:
        """Restore the target's probabilities."""
        self._probabilities = clients.get(self.target.name, {}).get("teacher", self._probabilities)
