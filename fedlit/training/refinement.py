"""Refinement: when a run ends, the target's classifier learns what its own samples say of its predictions.

At the target: its predictions are refined by neighbourhoods of its samples and by shares of the classes
(`fedlit.functional.refine_labels`), and a linear classifier of its features is fitted to them. Whether it takes the
place of the old one, the sources' samples say (reverse validation): the target sends two other classifiers, one fitted
to the classes that it predicts and one to those of the refined predictions, and learns how many of all the sources'
samples each gets right. They know classes alone, as probabilities would tell them how the sources' classifier decides.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlit.federation import Client, Open, Summed
from fedlit.functional import refine_labels, softmax_regression
from fedlit.training.local import evaluating, labelled_samples, training_inputs
from fedlit.training.method import Method
from fedlit.training.tasks import Classification

LEAST_SAMPLES = 50
"""Of the target; neighbourhoods of fewer tell little."""

LEFT = 0.8
"""Share of the accuracy on the sources' samples that is to be left.

The classifier of predicted classes decides as the sources' own one, which has learnt their samples by heart: one that
fits the target better is somewhat worse there. Where classes change places or vanish, little is left.
"""

AGREEMENT = 0.975
"""Least share of samples of which a network's prediction is that of the linear classifier put into it."""

STRENGTH = 100.0
"""Inverse of the penalty on the refined classifier's weights, per sample: chosen with sources in the target's place."""

GUARD_STRENGTH = 1.0
"""The same of those that are sent."""

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
    """Why a target cannot be refined."""


@dataclass(frozen=True)
class Heads:
    """Linear classifiers of the same features: fitted to predicted classes as they are, to refined ones, and the new.

    Args:
        weight: Shape (3, C, d), or (2, C, d) of those that are sent.
        bias: Shape (3, C), or (2, C).
    """

    weight: Tensor
    bias: Tensor

    def right(self, features: Tensor, labels: Tensor) -> Tensor:
        """How many of samples, shape (n, d), each gets right, float64."""
        logits = torch.einsum("hcd,nd->hnc", self.weight, features.to(self.weight)) + self.bias[:, None]
        return (logits.argmax(dim=2) == labels.to(logits.device)).double().sum(dim=1)


def refine_(method: Method) -> None:
    """Refine the target's classifier, if the sources' samples do not speak against it; all processes call it.

    Logs ``refine/taken`` (1 or 0) and the accuracies on the sources' samples, ``refine/reverse_accuracy`` and
    ``refine/reverse_accuracy_before``. Where it cannot be done, the target's process warns, and nothing changes.
    """
    federation, target = method.federation, method.target
    method.prepare_predictions()
    heads: Heads | None = None
    layers: list[nn.Linear] = []
    if federation.is_local(target):
        try:
            heads, layers = fit_heads(method)
        except NoRefinementError as reason:
            _warn(method, str(reason))
    sent = {} if heads is None else {target.name: {"weight": heads.weight[:2], "bias": heads.bias[:2]}}
    received = federation.exchange(_HEADS, sent, absent_too=True)
    answers = {
        client.name: {"right": answer(method, client, received.get(client.name, {}).get(target.name))}
        for client in method.sources
        if federation.is_local(client)
    }
    told = federation.mean(_ANSWERS, answers, weights=federation.weights, absent_too=True).get(target.name)
    own: dict[str, dict[str, float]] = {}
    if federation.is_local(target):
        own[target.name] = {"taken": 0.0} if heads is None else decide_(method, heads, layers, told)
    numbers = federation.report(own, _NAMES).get(target.name, {})
    method.log_everywhere({f"refine/{name}": number for name, number in numbers.items()})


def fit_heads(method: Method) -> tuple[Heads, list[nn.Linear]]:
    """Classifiers of the target, of the features that its own one has, and the layers that they can be put in.

    Raises:
        NoRefinementError: If there are too few samples, no such features, or one predicted class.
    """
    target = method.target
    samples = method.federation.weights[target.name]
    if samples < LEAST_SAMPLES:
        raise NoRefinementError(f"it has {samples} training samples, and neighbourhoods take {LEAST_SAMPLES}")
    if not method.can_predict(target):
        raise NoRefinementError("it has no classifier yet")
    layers, features, outputs = _outputs(method, target, training_inputs(method, target))
    if not bool(features.isfinite().all() and outputs.isfinite().all()):
        raise NoRefinementError("its features or predictions are not finite")
    p = outputs.double().softmax(dim=1)
    predicted = {*p.argmax(dim=1).tolist()}
    if len(predicted) < 2:
        raise NoRefinementError(f"all its predictions are of class {predicted.pop()}: nothing tells the classes apart")
    x, mean, deviation = _standardised(features)
    # vectors are compared as they come: there, neighbours are more often of a class than where sources told them apart
    vectors = torch.cat(list(training_inputs(method, target))).cpu() if _has_vectors(method, target) else None
    neighbours = x if vectors is None else _standardised(vectors)[0]
    refined = refine_labels(p, neighbours)
    hard = [F.one_hot(labels.argmax(dim=1), p.shape[1]).double() for labels in (p, refined)]
    fitted = [softmax_regression(x, labels, 1 / (GUARD_STRENGTH * len(x))) for labels in hard]
    fitted.append(softmax_regression(x, refined, 1 / (STRENGTH * len(x))))
    weights = [weight / deviation for weight, _ in fitted]
    biases = [bias - weight @ mean for weight, (_, bias) in zip(weights, fitted, strict=True)]
    heads = Heads(torch.stack(weights).float(), torch.stack(biases).float())
    before = [(layer.weight.clone(), layer.bias.clone()) for layer in layers]
    _write_(layers, heads)
    _, _, outputs = _outputs(method, target, training_inputs(method, target))
    agree = outputs.argmax(dim=1) == (features.float() @ heads.weight[-1].T + heads.bias[-1]).argmax(dim=1)
    for layer, (weight, bias) in zip(layers, before, strict=True):
        _set_(layer, weight, bias)
    if agree.double().mean() < AGREEMENT:
        raise NoRefinementError("its predictions are not those of one linear classifier of its features")
    return heads, layers


def _has_vectors(method: Method, client: Client) -> bool:
    first = next(iter(training_inputs(method, client)))
    return first.dim() == 2 and first.is_floating_point()


def _standardised(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features by their own mean and deviation, of a mean length of about 1; and what was taken away and divided by.

    So their scale matters neither to angles nor to the penalty on a classifier.
    """
    x = x.double()
    mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0) * math.sqrt(x.shape[1])
    deviation = torch.where(x.amin(dim=0) == x.amax(dim=0), 1.0, deviation)
    return (x - mean) / deviation, mean, deviation


def answer(method: Method, client: Client, message: Mapping[str, Tensor] | None) -> Tensor:
    """Shares of a local source's training samples that both classifiers get right, shape (2,).

    A source on whose features they cannot be tried speaks against the refined one.
    """
    if message is None:
        return torch.zeros(2, dtype=torch.float64)
    heads = Heads(message["weight"].cpu(), message["bias"].cpu())
    right, count = torch.zeros(2, dtype=torch.float64), 0
    for _, inputs, labels in labelled_samples(method, [client]):
        try:
            _, features, _ = _outputs(method, client, [inputs])
        except NoRefinementError:
            return torch.tensor([1.0, 0.0], dtype=torch.float64)
        if features.shape[1] != heads.weight.shape[2]:
            return torch.tensor([1.0, 0.0], dtype=torch.float64)
        right, count = right + heads.right(features, labels.cpu()), count + len(labels)
    return right / max(count, 1)


def decide_(
    method: Method, heads: Heads, layers: Iterable[nn.Linear], told: Mapping[str, Tensor] | None
) -> dict[str, float]:
    """Take the refined classifier, unless it does much worse on the sources' samples; what is logged of it."""
    if told is None:
        _warn(method, "too few sources answered for the privacy backend to hide which of them said what")
        return {"taken": 0.0}
    before, after = told["right"].tolist()
    taken = after >= LEFT * before
    if taken:
        _write_(layers, heads)
        method.target_temperature = 1.0  # another one belonged to the old classifier
    else:
        _warn(
            method,
            f"what its samples say would take the accuracy on the sources' samples from {before:.3f} to {after:.3f}",
        )
    return {"taken": float(taken), "reverse_accuracy": after, "reverse_accuracy_before": before}


@torch.no_grad()
def _outputs(method: Method, client: Client, batches: Iterable[Tensor]) -> tuple[list[nn.Linear], Tensor, Tensor]:
    """The linear layers that a local client's network ends in, what it gives them, and its outputs, on the CPU.

    There are several layers where classifiers vote, or their mean predicts.
    """
    assert isinstance(method.task, Classification)
    network, num_classes = method.replicas[client], method.task.num_classes
    calls: list[tuple[nn.Linear, Tensor]] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        calls.append((layer, inputs[0]))

    able = [m for m in network.modules() if isinstance(m, nn.Linear) and m.out_features == num_classes]
    hooks = [layer.register_forward_hook(note) for layer in able if layer.bias is not None]
    layers: list[nn.Linear] = []
    features, outputs = [], []
    try:
        with evaluating(network):
            for inputs in batches:
                calls.clear()
                with method.trainer.precision_plugin.forward_context():
                    outputs.append(network(inputs).cpu())
                if not calls or calls[-1][1].dim() != 2:
                    reason = "no linear layer of its network has a bias and an output per class"
                    raise NoRefinementError(reason)
                features.append(calls[-1][1].cpu())
                layers = [layer for layer, given in calls if given is calls[-1][1] or torch.equal(given, calls[-1][1])]
    finally:
        for hook in hooks:
            hook.remove()
    return layers, torch.cat(features), torch.cat(outputs)


def _write_(layers: Iterable[nn.Linear], heads: Heads) -> None:
    for layer in layers:
        _set_(layer, heads.weight[-1], heads.bias[-1])


@torch.no_grad()
def _set_(layer: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)


def _warn(method: Method, reason: str) -> None:
    warnings.warn(
        f"refine: the classifier of target {method.target.name!r} is left as the last round made it: {reason}",
        stacklevel=2,
    )
