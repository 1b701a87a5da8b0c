"""Refinement: at the end of a run, the target's samples correct its predictions, and its network learns these.

Predictions are refined by neighbourhoods and class shares (`fedlit.functional.refine_labels`), and a linear classifier
of the features is fitted to them. Reverse validation decides: the target sends two classifiers of its features, fitted
to its predicted and its refined classes (never to probabilities, which would reveal the sources' classifier), and
receives the accuracy of both over all sources' samples.

``refine="network"`` trains the network below the classifier first, as in SHOT (Liang, Hu and Feng, ICML 2020), but with
refined predictions as pseudo-labels and a rate that falls linearly over the passes.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import scipy.sparse
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlit.checks import check_one_of
from fedlit.federation import Channel, Client, Open, Summed
from fedlit.federation.nested import Inputs, num_samples, vectors
from fedlit.federation.streams import enter_stream, torch_streams
from fedlit.functional import (
    information_maximisation_loss,
    neighbour_agreement,
    neighbour_graph,
    refine_labels,
    softmax_regression,
    temperature_at,
)
from fedlit.run.component import Component
from fedlit.run.local import evaluating
from fedlit.run.optimisation import clip_client_gradients
from fedlit.run.param_groups import make
from fedlit.run.tasks import Classification

if TYPE_CHECKING:
    from fedlit.run.run import Run

LEAST_SAMPLES = 50
"""Minimum of target samples; neighbourhoods of fewer have little information."""

LEFT = 0.7
"""Minimum share of the accuracy on the sources' samples that must remain.

The sources' classifier knows their samples by heart, so one that fits the target better is worse there: that of the
target's true classes keeps .5 to 1 of it, the less the wider the gap. Where classes change places or vanish, less
remains than of the true ones (benchmarks/refine.py, guard).
"""

AGREEMENT = 0.975
"""Minimum share of samples on which a network predicts as the linear classifier put into it."""

SUREST = 0.99
"""Maximum of the mean confidence of refined predictions: where all neighbours agree, some are still wrong."""

STRENGTH = 100.0
"""Inverse of the penalty on the refined classifier's weights, per sample; chosen with sources in the target's place."""

GUARD_STRENGTH = 1.0
"""The same for the classifiers that are sent."""

PASSES = 15
"""Passes over the target's samples that train the network (SHOT, section 4.2)."""

PSEUDO_LABELS = 0.3
"""Weight beta of the cross-entropy on refined predictions, beside information maximisation (SHOT, section 4.2)."""

CHANNELS = (
    Open(
        "refined_head",
        "classifiers of the classes that the target predicts, and of those refined",
        up="target",
        to="sources",
        how_often="once, when the run ends",
    ),
    Summed(
        "reverse_accuracy",
        "shares of a source's training samples that both get right",
        up="sources",
        to="target",
        how_often="once, when the run ends",
        too_few="skip",
    ),
)
_HEADS, _ANSWERS = (channel.name for channel in CHANNELS)
_NAMES = ("taken", "reverse_accuracy", "reverse_accuracy_before")


class NoRefinementError(Exception):
    """Reason why a target cannot be refined."""


@dataclass(frozen=True)
class Heads:
    """Linear classifiers that are sent, fitted to predicted and to refined classes: weight (2, C, d), bias (2, C)."""

    weight: Tensor
    bias: Tensor

    def right(self, features: Tensor, labels: Tensor) -> Tensor:
        """Count the samples, of features (n, d), that each classifies correctly, shape (2,), float64."""
        logits = torch.einsum("hcd,nd->hnc", self.weight, features.to(self.weight)) + self.bias[:, None]
        return (logits.argmax(dim=2) == labels.to(logits.device)).double().sum(dim=1)


@dataclass(frozen=True)
class Proposal:
    """Classifiers that the sources test; of the target's network, once refined, its state dict and temperature."""

    heads: Heads
    state: Mapping[str, Any]
    temperature: float


class Refinement(Component):
    """Refine the target's predictions when a run ends, unless the sources' samples speak against it.

    Logs ``refine/taken`` (1 or 0), ``refine/reverse_accuracy`` and ``refine/reverse_accuracy_before``. If it is
    impossible, the target's process warns, and nothing changes.

    Args:
        refine: ``True`` for the classifier, ``"network"`` to train the network below it first.
        can_predict: Whether a client has something to predict with.
    """

    def __init__(self, refine: bool | str, can_predict: Callable[[Client], bool]) -> None:
        check_one_of("refine", refine, (False, True, "network"))
        self.of_network = refine == "network"
        self.can_predict = can_predict

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Classifiers of the target, and their accuracy on the sources' samples."""
        return CHANNELS

    def on_run_end(self, run: Run) -> None:
        """Propose a classifier at the target, ask the sources, and decide."""
        federation, target = run.federation, run.target
        run.prepare_predictions()
        passes = iter(range(PASSES if self.of_network else 0))
        proposal: Proposal | None = None
        if federation.is_local(target):
            try:
                if not self.can_predict(target):
                    raise NoRefinementError("it has no classifier yet")
                proposal = propose(run, passes, self.of_network)
            except NoRefinementError as reason:
                _warn(run, str(reason))
        for _ in passes:  # those that the target's process goes through, or has left out
            federation.check("refinement", None)
        sent = {} if proposal is None else {target.name: {"weight": proposal.heads.weight, "bias": proposal.heads.bias}}
        received = federation.exchange(_HEADS, sent, absent_too=True)
        answers = {
            client.name: {"right": answer(run, client, received.get(client.name, {}).get(target.name))}
            for client in run.sources
            if federation.is_local(client)
        }
        accuracies = federation.mean(_ANSWERS, answers, weights=federation.weights, absent_too=True).get(target.name)
        own: dict[str, dict[str, float]] = {}
        if federation.is_local(target):
            own[target.name] = {"taken": 0.0} if proposal is None else decide_(run, proposal, accuracies)
        numbers = federation.report(own, _NAMES).get(target.name, {})
        run.log({f"refine/{name}": number for name, number in numbers.items()}, target)


def propose(run: Run, passes: Iterator[int], of_network: bool) -> Proposal:
    """Return a refined target, whose network stays as it is; processes meet before each pass that trains it.

    Raises:
        NoRefinementError: If there are too few samples, no classifier to fit, one predicted class, or a network cannot
            be trained.
    """
    target = run.target
    samples = run.federation.weights[target.name]
    if samples < LEAST_SAMPLES:
        raise NoRefinementError(f"it has {samples} training samples, and neighbourhoods take {LEAST_SAMPLES}")
    network = run.replicas[target]
    before = copied(network)
    layers, features, p = looked_at(run)
    inputs = _vectors(run)
    # vectors are compared as they come: there, neighbours are of one class more often than among trained features
    compared = _standardised(features if inputs is None else inputs)[0]
    first = neighbour_graph(compared)
    classes = [F.one_hot(p.argmax(dim=1), p.shape[1]).double()]
    try:
        refined = refine_labels(p, compared, graph=first)
        outputs = put_in_(run, layers, features, refined)
        if of_network:
            restore_(network, before)
            then, refined = train_on_(run, layers, refined, None if inputs is None else (compared, first), passes)
            outputs = put_in_(run, layers, then, refined)
        after = copied(network)
        # refined predictions have a confidence that says nothing; what neighbours say of those before does
        temperature = temperature_at(outputs, min(SUREST, neighbour_agreement(p.argmax(dim=1), first)))
    finally:
        restore_(network, before)
    classes.append(F.one_hot(refined.argmax(dim=1), p.shape[1]).double())
    weights, biases = zip(*(_fitted(features, labels, GUARD_STRENGTH) for labels in classes), strict=True)
    return Proposal(Heads(torch.stack(weights), torch.stack(biases)), after, temperature)


def put_in_(run: Run, layers: Iterable[nn.Linear], features: Tensor, refined: Tensor) -> Tensor:
    """Replace the target's last layers by a classifier that is fitted to refined predictions; return its outputs.

    A `NoRefinementError` is raised if the network's predictions then differ from those of the classifier.
    """
    weight, bias = _fitted(features, refined, STRENGTH)
    for layer in layers:
        set_(layer, weight, bias)
    _, _, outputs = _outputs(run, run.target, run.samples.inputs(run.target))
    agree = outputs.argmax(dim=1) == (features.float() @ weight.T + bias).argmax(dim=1)
    if agree.double().mean() < AGREEMENT:
        raise NoRefinementError("its predictions are not those of one linear classifier of its features")
    return outputs


def train_on_(
    run: Run,
    layers: Iterable[nn.Linear],
    refined: Tensor,
    given: tuple[Tensor, scipy.sparse.csr_array] | None,
    passes: Iterator[int],
) -> tuple[Tensor, Tensor]:
    """Train the target's network below ``layers``; return its features (n, d) and refined predictions (n, C).

    ``given`` are vectors of samples to compare, and their neighbourhoods; ``None`` takes features, in each pass anew.

    Raises:
        NoRefinementError: If there is nothing to train, or predictions stop being finite, or become of one class.
    """
    target, trainer = run.target, run.trainer
    network = run.replicas[target]
    fixed = {id(param) for layer in layers for param in layer.parameters()}
    params = [param for param in network.parameters() if param.requires_grad and id(param) not in fixed]
    if not params:
        raise NoRefinementError("its network has nothing to train below the classifier: give refine=True")
    optimizer = make(run, [{"params": params, "client": target.name}])
    rates, steps = [group["lr"] for group in optimizer.param_groups], 0
    features = torch.zeros(0)
    with torch_streams(run.device), torch.enable_grad():
        enter_stream(run.federation.seed, "refine", target.name, device=run.device)
        for pass_idx in passes:
            run.federation.check("refinement", None)  # so that others wait for no longer than a pass
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (1 - pass_idx / PASSES)
            for positions, inputs in run.samples.shuffled(target, pass_idx):
                if num_samples(inputs) < 2:  # a single sample has no information, nor statistics for BatchNorm
                    continue
                with trainer.precision_plugin.forward_context():
                    loss = _loss(network(inputs), refined[positions])
                if not loss.requires_grad:
                    raise NoRefinementError("no gradient passes through its predictions: give refine=True")
                optimizer.zero_grad()
                torch.autograd.backward(loss, inputs=params)
                if trainer.gradient_clip_val:
                    algorithm = trainer.gradient_clip_algorithm or "norm"
                    clip_client_gradients(optimizer, trainer.gradient_clip_val, algorithm)
                optimizer.step()
                steps += 1
            optimizer.zero_grad()
            if not steps:
                raise NoRefinementError(
                    "no batch of it has 2 samples to train on: raise batch_size, or give refine=True"
                )
            try:
                _, features, p = looked_at(run)
            except NoRefinementError as reason:
                raise NoRefinementError(
                    f"once it has trained on, {reason}: lower the learning rate, or give refine=True"
                ) from reason
            compared, graph = (_standardised(features)[0], None) if given is None else given
            refined = refine_labels(p, compared, graph=graph)
    return features, refined


def _loss(logits: Tensor, refined: Tensor) -> Tensor:
    """Compute SHOT's equation 7 from logits and refined predictions, each of shape (B, C)."""
    known = F.cross_entropy(logits, refined.to(logits))
    return information_maximisation_loss(logits) + PSEUDO_LABELS * known


def features_of(run: Run) -> tuple[list[nn.Linear], Tensor, Tensor]:
    """Return the target's final linear layers, their inputs for all of its samples, and its outputs, all finite."""
    layers, features, outputs = _outputs(run, run.target, run.samples.inputs(run.target))
    if not bool(features.isfinite().all() and outputs.isfinite().all()):
        raise NoRefinementError("its features or predictions are not finite")
    return layers, features, outputs


def looked_at(run: Run) -> tuple[list[nn.Linear], Tensor, Tensor]:
    """As `features_of`, with class probabilities in float64 in place of outputs, which have to be of two classes."""
    layers, features, outputs = features_of(run)
    p = outputs.double().softmax(dim=1)
    predicted = {*p.argmax(dim=1).tolist()}
    if len(predicted) < 2:
        raise NoRefinementError(f"all its predictions are of class {predicted.pop()}: nothing separates the classes")
    return layers, features, p


def _vectors(run: Run) -> Tensor | None:
    """Return all inputs of the target, on the CPU, if they are vectors."""
    found = []
    for inputs in run.samples.inputs(run.target):
        side_by_side = vectors(inputs)
        if side_by_side is None:
            return None
        found.append(side_by_side.cpu())
    return torch.cat(found)


def _fitted(features: Tensor, labels: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Fit a penalised linear classifier of features to class probabilities; return its weight and bias, float32."""
    x, mean, deviation = _standardised(features)
    weight, bias = softmax_regression(x, labels, 1 / (strength * len(x)))
    weight = weight / deviation
    return weight.float(), (bias - weight @ mean).float()


def copied(network: nn.Module) -> dict[str, Any]:
    """Return a copy of a network's state."""
    return copy.deepcopy(network.state_dict())


@torch.no_grad()
def restore_(network: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a network a state that was `copied`, in its own tensors."""
    if any(name.endswith("_extra_state") or not isinstance(part, Tensor) for name, part in state.items()):
        network.load_state_dict(copy.deepcopy(state))
        return
    own = network.state_dict()
    for name, tensor in state.items():
        own[name].copy_(tensor)


def _standardised(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Standardise features to a mean length of about 1; return also the mean and the divisor."""
    x = x.double()
    mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0) * math.sqrt(x.shape[1])
    deviation = torch.where(x.amin(dim=0) == x.amax(dim=0), 1.0, deviation)
    return (x - mean) / deviation, mean, deviation


def answer(run: Run, client: Client, message: Mapping[str, Tensor] | None) -> Tensor:
    """Return the shares of a source's training samples that both classifiers get right, shape (2,).

    A source on whose features they cannot be tried votes against the refined one: (1, 0).
    """
    if message is None:
        return torch.zeros(2, dtype=torch.float64)
    heads = Heads(message["weight"].cpu(), message["bias"].cpu())
    right, count = torch.zeros(2, dtype=torch.float64), 0
    for _, inputs, labels in run.samples.labelled([client]):
        try:
            _, features, _ = _outputs(run, client, [inputs])
        except NoRefinementError:
            return torch.tensor([1.0, 0.0], dtype=torch.float64)
        if features.shape[1] != heads.weight.shape[2]:
            return torch.tensor([1.0, 0.0], dtype=torch.float64)
        right, count = right + heads.right(features, labels.cpu()), count + len(labels)
    return right / max(count, 1)


def decide_(run: Run, proposal: Proposal, accuracies: Mapping[str, Tensor] | None) -> dict[str, float]:
    """Take the proposal unless it does much worse on the sources' samples; return what is logged."""
    if accuracies is None:
        _warn(run, "too few sources answered for the privacy backend to hide which of them sent what")
        return {"taken": 0.0}
    before, after = accuracies["right"].tolist()
    taken = after >= LEFT * before
    if taken:
        restore_(run.replicas[run.target], proposal.state)
        # another one belonged to the old classifier
        run.outputs.temperature, run.outputs.is_refined = proposal.temperature, True
    else:
        _warn(
            run,
            f"the refined predictions would take the accuracy on the sources' samples from {before:.3f} to {after:.3f}",
        )
    return {"taken": float(taken), "reverse_accuracy": after, "reverse_accuracy_before": before}


def last_layers(network: nn.Module, num_classes: int) -> list[nn.Linear]:
    """Return the linear layers of a network with an output per class, of which one may be the last."""
    return [m for m in network.modules() if isinstance(m, nn.Linear) and m.out_features == num_classes]


@contextmanager
def noting(layers: Iterable[nn.Linear]) -> Iterator[list[tuple[nn.Linear, Tensor]]]:
    """Note calls of layers, each with its input, in a list that the caller may clear."""
    calls: list[tuple[nn.Linear, Tensor]] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        calls.append((layer, inputs[0]))

    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _outputs(run: Run, client: Client, batches: Iterable[Inputs]) -> tuple[list[nn.Linear], Tensor, Tensor]:
    """Return a local client's final linear layers, their inputs, and the network's outputs, on the CPU."""
    assert isinstance(run.task, Classification)
    network, num_classes = run.replicas[client], run.task.num_classes
    layers: list[nn.Linear] = []
    features, outputs = [], []
    with evaluating(network), noting([m for m in last_layers(network, num_classes) if m.bias is not None]) as calls:
        for inputs in batches:
            calls.clear()
            with run.trainer.precision_plugin.forward_context():
                outputs.append(network(inputs).cpu())
            if not calls or calls[-1][1].dim() != 2:
                reason = "no linear layer of its network has a bias and an output per class"
                raise NoRefinementError(reason)
            features.append(calls[-1][1].cpu())
            layers = [layer for layer, given in calls if given is calls[-1][1] or torch.equal(given, calls[-1][1])]
    return layers, torch.cat(features), torch.cat(outputs)


@torch.no_grad()
def set_(layer: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    """Replace the weight (C, d) and bias (C,) of a layer."""
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)


def _warn(run: Run, reason: str) -> None:
    warnings.warn(
        f"refine: target {run.target.name!r} is left as the last round made it: {reason}",
        stacklevel=2,
    )
