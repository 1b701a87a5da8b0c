"""What several methods share: messages of means of a map of samples and of classifiers, and parameter groups.

For means m_k of the K sources and m_T of the target, a client needs for its gradient of the pairwise distance
(1/K) sum_k |m_k - m_T|^2 the other side's mean: the mean over sources, or m_T; and of the pooled distance |D|^2, with
D = (1/K) sum_k m_k - m_T, D itself, which one sum over everyone gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fedlit import FederatedModule, Run
from fedlit.federation import Client, Federation
from fedlit.models import part_of

Message = Mapping[str, Tensor]


def check_moves_features(module: FederatedModule) -> None:
    """Refuse an extractor without anything to train, for a method that trains it; raises a `ValueError`."""
    if not any(param.requires_grad for param in module.originals[0].parameters()):
        raise ValueError(
            f"{type(module).__name__} moves features, and the extractor has nothing to train: take fedlit.models.MLP "
            "for given features, or put a layer behind it, as fedlit.models.Bottleneck does"
        )


def sources_in_step(module: FederatedModule, channel: str, *others: str) -> list[Client]:
    """Return the sources that participate on all channels and have a batch in this step; none without the target."""
    able = module.run.in_step(channel, *others)
    return [client for client in able if not client.is_target] if any(c.is_target for c in able) else []


def exchange_means(
    federation: Federation,
    channels: tuple[str, str],
    messages: Mapping[str, Message],
    sources: Sequence[Client],
    weights: Mapping[str, float] | None = None,
    answer: Callable[[Message | None], Message | None] | None = None,
) -> dict[str, Message]:
    """Send the target the mean of the sources' messages, and each source the target's; return those received, by name.

    Args:
        federation: Of the clients.
        channels: A summed one from the sources to the target, and an open one back.
        messages: Of local clients, by name.
        sources: Those that participate, wherever hosted.
        weights: Of the sources in their mean; ``None`` is uniform.
        answer: Makes the target's message from the received mean, if any; called where the target has a message.
    """
    target = federation.target.name
    up = federation.mean(
        channels[0], {name: own for name, own in messages.items() if name != target}, sources, weights=weights
    )
    own = messages.get(target)
    if own is not None and answer is not None:
        own = answer(up.get(target))
    down = federation.exchange(channels[1], {} if own is None else {target: own}, to=sources)
    return {**up, **{name: received[target] for name, received in down.items() if target in received}}


def sum_difference(
    federation: Federation, channel: str, means: Mapping[str, Tensor], sources: Sequence[Client]
) -> dict[str, Tensor]:
    """Send everyone D, the mean over participating sources less the target's, and nobody any other client's mean.

    ``means`` of local clients, by name, have equal shapes. Return D by name of a local client; none if a client dropped
    out, as a sum without it is no difference of means.
    """
    share = 1 / len(sources)
    signs = dict.fromkeys((client.name for client in sources), share) | {federation.target.name: -1.0}
    signed = {name: {"difference": signs[name] * own} for name, own in means.items()}
    everyone = [*sources, federation.target]
    totals = federation.sum(channel, signed, among=everyone, to=everyone)
    if len(federation.senders(channel, everyone)) < len(everyone):
        return {}
    return {name: total["difference"] for name, total in totals.items()}


def send_classifiers(run: Run, channel: str, absent_too: bool = False) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Send every source's classifier to the target over an open channel, with ``absent_too`` also of absent ones.

    Return classifiers' states by source, under the target's name, where it is hosted.
    """
    sent = {
        client.name: part_of(run.weights.of(client.name, frozen_too=True), "classifier")
        for client in run.sources
        if run.federation.is_local(client)
    }
    around = run.weights.received_part("classifier")
    return run.federation.exchange(channel, sent, around=around, absent_too=absent_too)


def divided(groups: Sequence[dict[str, Any]], part_of: Callable[[str], nn.Module | None]) -> list[dict[str, Any]]:
    """Divide clients' parameter groups: parameters of a client's part, if it has one, get a group behind the others."""
    parts: list[dict[str, Any]] = []  # a client's in this order, by which checkpoints tell them apart
    for group in groups:
        part = part_of(group["client"])
        within = set() if part is None else {id(param) for param in part.parameters()}
        for inside in (False, True) if within else (False,):
            params = [param for param in group["params"] if (id(param) in within) == inside]
            parts.append({"params": params, "client": group["client"]})
    return parts
