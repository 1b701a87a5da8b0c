"""Warnings of what a run would reveal in spite of its privacy backend or mechanism."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fedlit.federation.choices import Channels, Resolved
from fedlit.privacy import GaussianMechanism, PlainAffine, PrivacyWarning

_SHARE = 1e-4
"""Of a client's samples; a backend's grid rounds shares of classes by less."""


def sentences(channels: Channels, rank_of: Mapping[str, int]) -> list[str]:
    """Say what a run warns of when it starts; processes are by client."""
    seen = seen_by_the_server(channels, rank_of)
    return [*seen, *with_samples(channels), *with_moments(channels), *sent_beside(channels)]


def seen_by_the_server(channels: Mapping[str, Resolved], rank_of: Mapping[str, int]) -> list[str]:
    """A sentence for each channel of which process 0, the server, hosts enough senders to read the others' vectors."""
    sentences = []
    for channel in channels.values():
        hosted = [name for name in channel.senders if rank_of[name] == 0]
        others = [name for name in channel.senders if rank_of[name]]
        needed = channel.backend.colluders_needed(len(channel.senders)) if channel.hides else 0
        alone = channel.backend.trusted_alone([*rank_of]) if channel.hides else None
        deals_here = alone is not None and rank_of[alone] == 0
        if others and ((needed and len(hosted) >= needed) or deals_here):
            sentences.append(
                f"process 0, where the server is, hosts {hosted or [alone]}, who know enough to read what {others} "
                f"send over channel {channel.name!r} through {type(channel.backend).__name__}: give the server a "
                "process of its own, by a placement whose first entry is empty"
            )
    return sentences


def with_samples(channels: Channels) -> list[str]:
    """A sentence for each channel that hands single samples to other clients."""
    return [
        f"channel {channel.name!r} sends single samples: {channel.declared}. Receivers can keep them, and no privacy "
        "backend hides them from a receiver"
        for channel in channels.values()
        if channel.declared.samples
    ]


def with_moments(channels: Channels) -> list[str]:
    """A sentence for each channel whose two-party protocol may give the moments away, by name."""
    return [
        f"channel {channel.name!r}: {type(channel.protocol).__name__}(reveal_moments=True) hides no moments: receivers "
        "may ask for as many numbers as it takes to solve for them"
        for channel in channels.values()
        if channel.protocol is not None
        and channel.protocol.reveal_moments
        and not isinstance(channel.protocol, PlainAffine)
    ]


def sent_beside(channels: Channels) -> list[str]:
    """Sentences about numbers for logging that are sent, or not, beside what a mechanism protects."""
    if not channels.mechanisms:
        return []
    if isinstance(channels.reports, GaussianMechanism):
        deviation = channels.reports.noise_multiplier * channels.reports.clip_norm
        return [
            f"losses and scores are sent with noise of standard deviation {deviation:g}, and so logged and printed, "
            "those of the oracle as well"
        ]
    if channels.reports == "exact":
        return [
            "reports='exact' sends everybody the losses, gradient norms and scores of each client as they are, beside "
            "differential_privacy: privacy/epsilon does not count them, and one of them may reveal what noise hides. "
            "Leave reports out, and they are not sent; or give a fedlit.privacy.GaussianMechanism, which is counted"
        ]
    if channels.reports == "off":
        return [
            "with differential_privacy clients do not report their losses, gradient norms and scores, which nothing "
            "blurs: what is logged and printed lacks them. To have them, give reports=GaussianMechanism(...), with "
            "noise that privacy/epsilon counts, or reports='exact', beside all guarantees"
        ]
    return []


def over_other_targets(channels: Channels, clients: Sequence[str], targets: Collection[str]) -> list[str]:
    """Sentences about masked sums over other clients for each target of an experiment, while messages are the same.

    They are the same in every round of a `Channel.fixed` one, and otherwise in the first, where all follows from the
    seed.
    """
    sentences = []
    for channel in channels.values():
        left_out = [name for name in clients if name not in channel.senders]
        if len(targets) < 2 or not channel.hides or not left_out or len(channel.senders) < 2:
            continue
        when, another = "in every round", "Train for one target alone"
        if not channel.declared.fixed:
            when, another = "in the first round", f"{another}, or give each target a run with a seed of its own"
        sentences.append(
            f"channel {channel.name!r} is summed for the targets {[*targets]} over all clients but the target, and "
            f"{when} each client sends the same for every target: whoever sees these sums computes what single "
            f"clients sent, which {type(channel.backend).__name__} hides in one sum. {_ways_out(channel, another)}"
        )
    return sentences


def over_other_senders(channels: Channels, before: Mapping[str, Sequence[str]], method: str) -> list[str]:
    """Sentences about masked sums over other clients than in an earlier run of ``method`` with the same seed."""
    sentences = []
    for channel in channels.values():
        odd = {*channel.senders}.symmetric_difference(before.get(channel.name, channel.senders))
        if odd and channel.hides:
            sentences.append(
                f"channel {channel.name!r} is summed over {[*channel.senders]}, and was over {[*before[channel.name]]} "
                f"with {method} and the same seed: as clients send the same in the first round of both methods, "
                f"the two sums reveal what {sorted(odd)} sent. "
                + _ways_out(channel, "Give this method a run with a seed of its own")
            )
    return sentences


def hidden_senders(channels: Channels) -> dict[str, tuple[str, ...]]:
    """Senders by channel, of those whose single messages are masked."""
    return {channel.name: channel.senders for channel in channels.values() if channel.hides}


def over_other_clients(channel: Resolved, before: Sequence[str], now: Sequence[str]) -> str:
    """A sentence about a fixed channel that is summed over other clients than before."""
    odd = [name for name in channel.senders if (name in before) != (name in now)]
    return (
        f"channel {channel.name!r} is summed over {[*now]}, and was over {[*before]}, while each client sends the same "
        f"both times: the two sums reveal what {odd} sent, which {type(channel.backend).__name__} hides in one. "
        + _ways_out(channel, "Give a participation under which the same clients send")
    )


def with_other_participation(channels: Channels) -> list[str]:
    """Sentences about rounds that a run from a checkpoint may repeat with another participation."""
    hidden = [channel.name for channel in channels.values() if channel.hides]
    if not hidden:
        return []
    noised = next(
        (channel for channel in channels.values() if channel.hides and channel.mechanism), channels[hidden[0]]
    )
    return [
        f"participation or heard is another one than in the checkpoint. If the run went on after it, the messages of "
        f"its next round over the channels {hidden} have been summed before, over other clients, and the two sums "
        f"reveal what single clients sent. {_ways_out(noised, 'Resume with the same participation')}"
    ]


def warn_of_lone_classes(channel: Resolved, client: str, own: Tensor, mean: Tensor) -> None:
    """At a client, warn of classes of which it alone has samples, in a uniform mean of class shares, shape (C,).

    With the noise of differential privacy, of all which it may have alone: others' part is within two deviations.
    """
    mechanism, count = channel.mechanism, len(channel.senders)
    deviation = 0.0 if mechanism is None else mechanism.noise_multiplier * mechanism.clip_norm * math.sqrt(count)
    others = mean.cpu() * count - own.cpu()
    lone = torch.nonzero((own.cpu() > 0) & (others < _SHARE + 2 * deviation)).flatten().tolist()
    if lone and channel.hides:
        has = "alone has" if mechanism is None else "has, and perhaps no other client,"
        warnings.warn(
            f"of the classes {lone} client {client!r} {has} samples: their part of the mean over channel "
            f"{channel.name!r}, which everybody learns, is what {client!r} sent. "
            + _ways_out(channel, "Leave these classes out"),
            PrivacyWarning,
            stacklevel=2,
        )


def _ways_out(channel: Resolved, other: str) -> str:
    """End of a warning: what to do about it, or what the noise of a mechanism covers of it."""
    if channel.mechanism is None:
        return f"{other}, or give differential_privacy for this channel"
    return (
        f"{channel.mechanism} covers that only as far as the epsilon of all these sums together is small, and "
        f"privacy/epsilon_sum counts those of one run: keep an account of all runs. {other}"
    )
