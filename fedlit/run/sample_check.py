"""Check of every sample that a run reads, before a network meets it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from fedlit.checks import refuse
from fedlit.federation import FederatedLoader, SampleError
from fedlit.federation.labels import known_labels
from fedlit.federation.nested import Inputs, entries, sample_shape, take, tensors_of
from fedlit.federation.samples import check_labels, not_finite, refuse_inputs, stored
from fedlit.federation.streams import torch_streams
from fedlit.run.local import evaluating
from fedlit.run.run import Run
from fedlit.run.tasks import Regression, Unscored

_TRIED = 8
"""Maximum of samples that are not finite on which a network is tried."""

_CONVERTED = {torch.float32: "x.float()", torch.float64: "x.double()"}
"""Code that converts inputs to a type."""

_TAKEN = "give inputs that its forward takes"
_NAMED = "name the entries that the network takes (inputs of FederatedLoader.from_loaders), or give tensors alone"
"""Ways out of inputs that a network does not take: in general, and with texts or numbers among them."""


class SampleCheck:
    """Refuse samples of local clients that a method cannot use; each sample is checked once.

    Samples in memory are checked when a run starts, others when they are first read. Inputs must be finite, and of a
    type and structure that the network takes; in doubt the network is tried on them, as it may convert inputs or fill
    in missing values. Labels are checked where the method reads them.
    """

    def __init__(self, run: Run, loader: FederatedLoader) -> None:
        self.run = run
        self.loader = loader
        self._unseen: dict[str, Tensor] = {}  # by client, which samples have not been looked at, bool
        self._taken: set[str] = set()  # types and shapes of inputs that a network has taken
        self._fits = False  # whether a network has made features and outputs as methods need them

    # ---------------------------------------------------------------- when a run starts

    def start(self, client: str) -> None:
        """Check a local client's samples in memory, and its first sample in any case.

        Raises:
            SampleError: If the run cannot take them.
            TypeError: If they are no tuples of inputs and labels.
        """
        if client not in self.loader.datasets:
            return
        inputs, labels = self.loader.samples(client)[:2]
        self._check_type(client, inputs)
        self._look(client, inputs, labels)
        self._check_outputs(client, inputs, labels)

    def _look(self, client: str, inputs: Inputs, labels: Any) -> None:
        """Check a client's samples in memory, otherwise its first sample."""
        dataset: Any = self.loader.datasets[client]
        size, whole = len(dataset), stored(dataset)
        if whole is None or not whole.final:
            self._unseen[client] = torch.ones(size, dtype=torch.bool)
        if whole is None:
            first = torch.tensor([0])
            self._check_labels(client, labels, first)
            self._check_finite(client, inputs, first, 1)
            return
        labels, bad = whole.look(size)
        self._check_labels(client, labels, torch.arange(size))
        self._check_some_known(client, labels)
        if len(bad):
            self._check_finite(client, self.loader.samples(client, bad[:_TRIED])[0], bad, size)

    # ---------------------------------------------------------------- when samples are read

    def due(self, client: str) -> bool:
        """Return whether some of a client's samples have not been checked."""
        return client in self._unseen

    def __call__(self, client: str, samples: Any, positions: Tensor) -> None:
        """Check a batch that was read; raises a `SampleError` if the run cannot take it."""
        unseen = self._unseen[client]
        if not bool(unseen[positions].any()):
            return
        self._check_labels(client, samples[1], positions)
        bad = not_finite(samples[0])
        if bad is not None:
            rows = bad.nonzero().squeeze(1)
            self._check_finite(client, take(samples[0], rows[:_TRIED]), positions[rows.cpu()], len(positions))
        unseen[positions] = False
        if not bool(unseen.any()):
            del self._unseen[client]

    def fail(self, client: str, error: SampleError) -> None:
        """Raise an error here, or while other processes train in the next exchange, on all of them.

        Otherwise they would wait for this process for ever, as they meet in every batch.
        """
        run = self.run
        if run.federation.transport.world_size == 1 or run.trainer.state.fn != TrainerFn.FITTING:
            raise error
        error.public = (
            f"client {client!r} has samples that the run cannot take: the error raised at its process states which"
        )
        run.federation.fail(error)
        self._unseen.clear()

    # ---------------------------------------------------------------- rules

    def _check_labels(self, client: str, labels: Any, positions: Tensor) -> None:
        """Refuse labels that the run is going to read, and cannot."""
        run, training = self.run, self.loader.training
        of_target = client == run.target.name
        if training and (run.own_labels or (of_target and not run.target.labelled)):
            return
        if isinstance(run.task, Unscored):  # what labels are is for the module to say
            return
        read = not of_target or "oracle" in run.federation.channels
        if not training and (run.trainer.predicting or not read):
            return
        regression = isinstance(run.task, Regression)
        check_labels(
            labels,
            client,
            "regression" if regression else "classification",
            run.task.num_outputs,
            may_lack=of_target,
            exact=not regression,
            positions=positions,
        )

    def _check_some_known(self, client: str, labels: Tensor) -> None:
        target = self.run.target
        if not self.loader.training or self.run.own_labels or client != target.name or not target.labelled:
            return
        if not bool(known_labels(labels).any()):
            raise SampleError(
                f"target {client!r} is declared as labelled, and none of its {len(labels)} training samples has a "
                f"label: give it some, or leave out labelled=True of Client({client!r}, role='target')"
            )

    def _check_finite(self, client: str, some: Inputs, positions: Tensor, number: int) -> None:
        """Refuse inputs that are not finite, unless the network makes finite features of them.

        ``some`` are the first inputs of those at ``positions``, which are among ``number`` samples.
        """
        bad = not_finite(some)
        if bad is None:  # a transform has filled them in
            return
        some = take(some, bad)
        try:
            features = self._features(client, some)
        except Exception:
            if self.run.own_labels:  # a module of its own may be called with something else
                return
            features = None
        if features is None or not_finite(features) is not None:
            raise refuse_inputs(client, some, positions, number)

    def _check_type(self, client: str, inputs: Inputs) -> None:
        """Refuse inputs of a type or structure that the network does not take, trying it on a sample where needed."""
        run, network = self.run, self._network(client)
        several = not isinstance(inputs, Tensor)
        if several and run.local.vectorize:
            raise SampleError(
                f"vectorize=True stacks the inputs of all clients in one tensor, and those of client {client!r} are "
                f"{_described(inputs)}: leave vectorize out"
            )
        if network is None or run.own_labels:
            return
        converted = tensors_of(run.trainer.precision_plugin.convert_input(inputs))
        kinds = {leaf.dtype for leaf in converted.values()}
        own = next((kind for kind in _types(run, client) if kind.is_floating_point), None)
        if not several and (own is None or kinds == {own}):
            return
        described = _described(inputs)
        if described in self._taken:  # by another client's network, which is of the same form
            return
        others = {kind for kind in kinds if kind.is_floating_point and kind not in _types(run, client)}
        try:
            features = self._features(client, inputs)
            if not (others and own and isinstance(features, Tensor) and features.dtype in others):
                self._taken.add(described)
                return
            reason = f"its features are {features.dtype}"
        except Exception as error:
            reason = _reason(error)
        way_out = _TAKEN
        if _no_tensors(inputs):
            way_out = _NAMED
        elif own is not None and kinds != {own}:
            way_out = f"give {_CONVERTED.get(own, f'x.to({own})')}"
            if torch.float64 in kinds:
                way_out += ", or train in double precision (Trainer(precision='64-true'))"
        raise SampleError(
            f"the network, whose parameters are {own}, does not take the inputs of client {client!r}, "
            f"{described} ({reason}): {way_out}"
        )

    def _check_outputs(self, client: str, inputs: Inputs, labels: Any) -> None:
        """Refuse networks without one output for each sample, trying one client's on its first sample, twice."""
        run = self.run
        if self._fits or run.own_labels or not self.loader.training or client not in run.replicas:
            return
        replica: Any = run.replicas[client]
        if not isinstance(getattr(replica, "extractor", None), nn.Module):
            return
        described = _described(inputs)
        pair, extractor = take(inputs, torch.zeros(2, dtype=torch.int64)), type(replica.extractor).__name__
        try:
            features = self._features(client, pair)
        except Exception as error:
            raise SampleError(
                f"extractor {extractor} does not take the inputs of client {client!r}, {described} "
                f"({_reason(error)}): {_NAMED if _no_tensors(inputs) else _TAKEN}"
            ) from error
        task, width = run.task, getattr(replica.extractor, "out_features", None)
        is_tensor = isinstance(features, Tensor) and features.ndim == 2
        is_odd = not is_tensor or features.shape != (2, width or features.shape[1])
        found = f"{_shown(features)}, of 2 samples of client {client!r} ({described})"
        number = task.num_outputs
        # labels of pixels or positions have outputs of each; those of an unlabelled target may have any form
        read = isinstance(labels, Tensor) and (client != run.target.name or run.target.labelled)
        places = tuple(labels.shape[1:]) if read and not isinstance(task, Regression) else ()
        wanted, reason = (2, number, *places), ""
        if type(replica).forward.__qualname__ in ("Replica.forward", "AlignedReplica.forward"):
            try:
                outputs = self._outputs(replica, pair)
                shape = tuple(getattr(outputs, "shape", ()))
                is_right = shape == wanted if read else shape[:2] == wanted
                is_odd = is_odd and not is_right
                reason = "" if is_right else f"makes {_shown(outputs)}"
            except Exception as error:
                reason = f"fails: {_reason(error)}"
        elif isinstance(features, Tensor) and features.ndim > 2 and len(features) == 2:
            is_odd = False  # as of each pixel, with a classifier that this replica gives something else
        if is_odd:
            rule = f"a network that makes features of shape (batch, out_features), with out_features={width}"
            way_out = "return one tensor from its forward, or mend out_features"
            refuse("extractor", rule, replica.extractor, way_out, shown=f"{extractor}, which makes {found}")
        if reason:
            rule = f"a network that makes outputs of shape {wanted} of {found}"
            refuse("classifier", rule, replica.classifier, shown=f"{type(replica.classifier).__name__}, which {reason}")
        trainable = [name for name, param in replica.extractor.named_parameters() if param.requires_grad]
        if trainable and isinstance(features, Tensor) and not features.requires_grad:
            warnings.warn(
                f"features of extractor {extractor} have no gradient, so that none of its weights is trained "
                f"({trainable[0]!r} is the first of {len(trainable)}): look for detach() or no_grad() in its forward, "
                "or for networks that are no attributes of it; if that is intended, freeze it (requires_grad_(False))",
                stacklevel=2,
            )
        self._fits = True

    def _outputs(self, replica: nn.Module, inputs: Inputs) -> Any:
        """Return outputs of a few samples in evaluation mode."""
        trainer = self.run.trainer
        moved = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(inputs))
        with (
            torch_streams(self.run.device), evaluating(replica), torch.enable_grad(),
            trainer.precision_plugin.forward_context(),
        ):  # fmt: skip
            return replica(moved)

    def _network(self, client: str) -> nn.Module | None:
        """Return the part of a client's replica that takes inputs; ``None`` if it is not built."""
        if client not in self.run.replicas:
            return None
        replica = self.run.replicas[client]
        extractor = getattr(replica, "extractor", None)
        return extractor if isinstance(extractor, nn.Module) else replica

    def _features(self, client: str, inputs: Inputs) -> Any:
        """Return features of a few samples in evaluation mode, as a step makes them."""
        network = self._network(client)
        return None if network is None else self._outputs(network, inputs)


def check_evaluation(run: Run, loader: FederatedLoader) -> None:
    """Check samples of local clients before an evaluation; all processes call it, and all get an error."""
    loader.check = check = SampleCheck(run, loader)
    run.federation.all_gather("samples to evaluate", check.start)


def _types(run: Run, client: str) -> list[torch.dtype]:
    """Return the types of a client's parameters."""
    return [param.dtype for param in run.replicas[client].parameters()]


def _described(inputs: Inputs) -> str:
    """Describe types and shapes of a sample's tensors."""
    if isinstance(inputs, Tensor):
        return f"{inputs.dtype} of shape {sample_shape(inputs)}"
    found = [f"{path} {leaf.dtype} of shape {tuple(leaf.shape[1:])}" for path, leaf in tensors_of(inputs).items()]
    found += [f"{path} of type {kind}" for path, kind in _no_tensors(inputs)]
    return f"a {type(inputs).__name__} of {', '.join(found) or 'no tensors'}"


def _no_tensors(inputs: Inputs) -> list[tuple[str, str]]:
    """Return paths and types of what is no tensor, such as texts."""
    return [(path, type(leaf).__name__) for path, leaf in entries(inputs) if not isinstance(leaf, Tensor)]


def _shown(outputs: Any) -> str:
    """Describe what a network made."""
    if isinstance(outputs, Tensor):
        return f"{outputs.dtype} of shape {tuple(outputs.shape)}"
    return f"a {type(outputs).__name__}"


def _reason(error: Exception) -> str:
    """Return the first line of an error."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
