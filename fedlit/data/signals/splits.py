"""Splits of windows of which none in one part shares samples with one in another."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fedlit.checks import refuse
from fedlit.data.signals.recordings import Windows
from fedlit.data.splits import Parts, apportion, blind_generator, stratified_split
from fedlit.federation.errors import RosterError
from fedlit.federation.labels import UNLABELLED

SplitBy = Literal["recordings", "blocks"]


def split_windows(
    client: str,
    windows: Windows,
    by: SplitBy | None,
    val_fraction: float,
    test_fraction: float,
    generator: torch.Generator,
    blind: bool = False,
) -> Parts:
    """Return positions of training, validation and test windows, ascending.

    By recordings, each is in one part as a whole. By blocks, the first windows of each class are held out for one part
    and the last ones for another, or of each of up to ten stretches where windows have no labels; training windows
    that overlap held-out ones are in no part. A class of which no training window is left by that is not held out. If
    ``blind``, validation windows are held out of the others as if those had no labels.

    Raises:
        RosterError: If recordings do not do for all parts and ``by`` is ``"recordings"``.
    """
    if blind:
        _, _, test = split_windows(client, windows, by, val_fraction, test_fraction, generator)
        everything = torch.arange(len(windows.y))
        rest = everything[~overlaps(windows, everything, test)]
        unlabelled = torch.full_like(rest, UNLABELLED)
        # of x the length of a window is all that is read
        others = replace(windows, y=unlabelled, recording=windows.recording[rest], start=windows.start[rest])
        share = val_fraction * len(windows.y) / len(rest)
        train, val, _ = split_windows(client, others, by, share, 0.0, blind_generator(generator))
        return rest[train], rest[val], test
    if by != "blocks":
        parts = _by_recordings(windows, val_fraction, test_fraction, generator)
        if parts is not None:
            return parts
        if by == "recordings":
            number = len(torch.unique(windows.recording))
            rule = f"possible with the {number} recordings of client {client!r}, of which training needs all classes"
            way_out = "give split_by='blocks', or other fractions"
            refuse("split_by", rule, by, way_out, RosterError)
    return _by_blocks(windows, val_fraction, test_fraction, generator)


def _by_recordings(
    windows: Windows, val_fraction: float, test_fraction: float, generator: torch.Generator
) -> Parts | None:
    """Split recordings, stratified by each one's most frequent class; ``None`` if a part would lack what it needs."""
    owners, owner = torch.unique(windows.recording, return_inverse=True)
    most = torch.stack([windows.y[owner == index].mode().values for index in range(len(owners))])
    parts = stratified_split(most, val_fraction, test_fraction, generator)
    train, val, test = (torch.isin(owner, part).nonzero().squeeze(1) for part in parts)
    has_all = len(torch.unique(windows.y[train])) == len(torch.unique(windows.y))
    held_out = all(len(part) or not share for part, share in ((val, val_fraction), (test, test_fraction)))
    return (train, val, test) if has_all and held_out else None


def _by_blocks(windows: Windows, val_fraction: float, test_fraction: float, generator: torch.Generator) -> Parts:
    size = len(windows.y)
    # one stretch would hold out what was done last and nothing else; many lose windows at their borders
    least = 10 * max(2, _overlapping(windows))
    stretch = torch.arange(size) * min(10, max(1, size // least)) // size
    block = torch.where(windows.y == UNLABELLED, -1 - stretch, windows.y)
    blocks = torch.unique(block)
    test_first = torch.rand(len(blocks), generator=generator) < 0.5
    whole = torch.zeros(len(blocks), dtype=torch.bool)  # blocks of which nothing is held out
    groups = [(block == each).nonzero().squeeze(1) for each in blocks]
    while True:
        counts = torch.tensor([len(group) for group in groups])
        room = torch.where(whole, 0, counts - 1)
        num_test = apportion(counts, test_fraction, room)
        num_val = apportion(counts, val_fraction, room - num_test)
        train, val, test = [], [], []
        for group, first, tests, vals in zip(groups, test_first, num_test.tolist(), num_val.tolist(), strict=True):
            order = group if first else group.flip(0)
            test.append(order[:tests])
            train.append(order[tests : len(order) - vals])
            val.append(order[len(order) - vals :])
        trained, held, tested = (torch.cat(part).sort().values for part in (train, val, test))
        held = held[~overlaps(windows, held, tested)]
        trained = trained[~overlaps(windows, trained, torch.cat([held, tested]))]
        lost = ~whole & ~torch.isin(blocks, block[trained])
        if not lost.any():
            return trained, held, tested
        whole |= lost


def _overlapping(windows: Windows) -> int:
    """Number of windows after one that share samples with it."""
    steps = windows.start.diff()[windows.recording.diff() == 0]
    return int((windows.x.shape[-1] - 1) // steps.min()) if len(steps) else 0


def overlaps(windows: Windows, positions: Tensor, others: Tensor) -> Tensor:
    """Return which windows at ``positions`` share samples with one of ``others`` (positions), bool."""
    size = windows.x.shape[-1]
    # recordings one after the other, so far apart that none of their windows are close
    apart = int(windows.start.max()) + 2 * size
    places = windows.recording * apart + windows.start
    there = places[others].sort().values
    if not len(there):
        return torch.zeros(len(positions), dtype=torch.bool)
    here = places[positions]
    after = torch.searchsorted(there, here)
    distance = (there[after.clamp(max=len(there) - 1)] - here).abs()
    return torch.minimum(distance, (there[(after - 1).clamp(min=0)] - here).abs()) < size
