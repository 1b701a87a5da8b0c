"""Widar3.0: gestures in Wi-Fi signals, as body-coordinate velocity profiles."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedlit.checks import check, check_at_least, check_one_of, refuse
from fedlit.data.base import DomainDataModule
from fedlit.data.files import read_mats
from fedlit.data.samples import DatasetNotFoundError, Domain, check_data
from fedlit.data.source import check_classes
from fedlit.data.tables.values import check_once, some
from fedlit.federation.names import check_list

GESTURES = (
    *("push_pull", "sweep", "clap", "slide", "draw_n", "draw_o", "draw_rectangle", "draw_triangle", "draw_zigzag"),
    *("draw_zigzag_vertical", "draw_n_vertical", "draw_o_vertical"),
    *(f"draw_{digit}" for digit in (1, 2, 3, 4, 5, 6, 7, 8, 9, 0)),
)
"""All 22; those that are drawn are horizontal where the name does not say otherwise."""

SIX_GESTURES = ("push_pull", "sweep", "clap", "slide", "draw_o", "draw_zigzag")
"""Those of the experiments of Widar3.0, and of those with FedMMD."""

_VERTICAL = (*GESTURES[:3], "draw_o_vertical", "draw_zigzag_vertical", "draw_n_vertical")
_DRAWN = ("draw_o", "draw_zigzag", "draw_n", "draw_triangle", "draw_rectangle")
_DIGITS = GESTURES[12:]

# the number of a gesture in a file's name means another gesture on another date, and on some for another user
_ON_DATE: dict[str, tuple[int, Mapping[int | None, tuple[str, ...]]]] = {
    "20181109": (1, {None: (*GESTURES[:4], "draw_zigzag_vertical", "draw_n_vertical")}),
    "20181112": (1, {None: _DIGITS}),
    "20181115": (1, {None: _VERTICAL}),
    "20181116": (1, {None: _DIGITS}),
    "20181117": (2, {None: _VERTICAL}),
    "20181118": (2, {None: _VERTICAL}),
    "20181121": (1, {None: ("slide", *_DRAWN)}),
    "20181127": (2, {None: ("slide", *_DRAWN)}),
    "20181128": (2, {None: (*GESTURES[:3], *_DRAWN[:3])}),
    "20181130": (1, {None: (*GESTURES[:4], *_DRAWN)}),
    "20181204": (2, {None: (*GESTURES[:4], *_DRAWN)}),
    "20181205": (2, {2: _DRAWN, 3: ("slide", *_DRAWN)}),
    "20181208": (2, {None: GESTURES[:4]}),
    "20181209": (2, {None: SIX_GESTURES}),
    "20181211": (3, {None: SIX_GESTURES}),
}
"""Room of each date, and names of gestures 1, 2, ... of each user, ``None`` for all."""

_FILE = re.compile(r"user(\d+)-(\d+)-(\d+)-(\d+)-(\d+)(?:-.*)?\.mat")
_FOLDER = re.compile(r"(\d{8})(?:-VS)?")
_FACTORS = ("room", "user", "location", "orientation")
_SIDE = 20


@dataclass(frozen=True)
class _Sample:
    """A file, and what its name and folder say."""

    path: Path
    gesture: str
    room: int
    user: int
    location: int
    orientation: int


class Widar3(DomainDataModule):
    """Gestures of Widar3.0 in body-coordinate velocity profiles (BVP); a domain is a user in a room, or another factor.

    Reads the published ``BVP`` folder: ``DATE-VS/6-link/userU/userU-A-B-C-D-....mat`` (of 20181130 without ``6-link``),
    each with ``velocity_spectrum_ro`` (20, 20, T), power by velocity along two axes from -2 to 2 m/s, 10 times a
    second. A is the number of the gesture, whose meaning depends on the date, B the location, C the orientation, D the
    repetition. A sample has shape (``frames``, 20, 20): each profile is scaled to [0, 1] by its own minimum and
    maximum, and zeros go before the first one.

    Args:
        path: Folder of ``DATE-VS`` folders.
        domain: Factors whose values name a domain, of ``room`` (1 to 3), ``user``, ``location`` (of the torso, 1 to 8)
            and ``orientation`` (of the face, 1 to 5); ``None`` is ``["room", "user"]``, as in ``room1_user5``.
        groups: Further clients, each with the names of the domains whose samples it has together.
        rooms: Rooms to keep; ``None`` keeps all.
        users: Users to keep; ``None`` keeps all.
        classes: Gestures to keep; ``None`` keeps the six of the publication's experiments.
        frames: Profiles of a sample; further ones at the end are left out. Gestures take about 0.7 to 2.6 seconds.
        clients: Domains or groups that take part, in this order; ``None`` takes all domains that are in no group, and
            the groups.
        target: The client that is adapted to; ``None`` takes the last.
        kwargs: See `DomainDataModule`.

    Raises:
        DatasetNotFoundError: If there is no such folder.
        DatasetLayoutError: If it is laid out in another way.

    References:
        Zheng et al., Zero-effort cross-domain gesture recognition with Wi-Fi, MobiSys 2019. Data:
        tns.thss.tsinghua.edu.cn/widar3.0.
    """

    spread = True

    def __init__(
        self,
        path: str,
        *,
        domain: list[str] | None = None,
        groups: dict[str, list[str]] | None = None,
        rooms: list[int] | None = None,
        users: list[int] | None = None,
        classes: list[str] | None = None,
        frames: int = 30,
        clients: list[str] | None = None,
        target: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(clients=clients, target=target, **kwargs)
        check_list("domain", domain)
        check_list("classes", classes)
        self.factors = ["room", "user"] if domain is None else domain
        check(bool(self.factors), "domain", f"at least one of {list(_FACTORS)}", domain)
        for factor in self.factors:
            check_one_of("domain", factor, _FACTORS)
        check_once(self.factors, "domain", "name each factor once")
        check_classes(classes)
        for name in classes or ():
            check_one_of("classes", name, GESTURES)
        check_at_least("frames", frames, 1)
        self.path, self.frames = Path(path), frames
        self.groups = {name: [*members] for name, members in (groups or {}).items()}
        self._rooms, self._users, self._classes = rooms, users, [*(SIX_GESTURES if classes is None else classes)]
        check_once([name for members in self.groups.values() for name in members], "groups", "name each domain once")
        self.check_roster()

    @cached_property
    def _samples(self) -> dict[str, list[_Sample]]:
        """Samples of each domain, and of each group."""
        if not self.path.is_dir():
            rule, way_out = "the folder BVP of the published archive", "get it from tns.thss.tsinghua.edu.cn/widar3.0"
            shown = f"{str(self.path)!r}, looked for {str(self.path.absolute())!r}"
            refuse("path", rule, str(self.path), way_out, DatasetNotFoundError, shown)
        domains: dict[str, list[_Sample]] = {}
        unknown: list[str] = []
        for folder in sorted(self.path.iterdir()):
            date = _FOLDER.fullmatch(folder.name)
            for file in sorted(folder.rglob("*.mat")) if folder.is_dir() else ():
                sample = _sample_of(file, date[1]) if date else None
                if sample is None:
                    unknown.append(str(file.relative_to(self.path)))
                elif self._keeps(sample):
                    name = "_".join(f"{factor}{getattr(sample, factor)}" for factor in self.factors)
                    domains.setdefault(name, []).append(sample)
        rule = "a folder with DATE-VS/6-link/userU/userU-A-B-C-D-*.mat of these rooms, users and classes"
        check_data(bool(domains), "path", rule, f"{str(self.path)!r} without any", "give the folder BVP of the archive")
        if unknown:
            rule = "which no date, user or gesture of the archive fits"
            text = f"left out {len(unknown)} files of {str(self.path)!r}, {rule}: {some(unknown)}"
            warnings.warn(text, stacklevel=2)
        found = dict(sorted(domains.items(), key=lambda item: [int(part) for part in re.findall(r"\d+", item[0])]))
        for name, members in self.groups.items():
            for member in members:
                check_one_of(f"groups[{name!r}]", member, [*domains])
            found[name] = [sample for member in members for sample in found.pop(member)]
        return found

    def _keeps(self, sample: _Sample) -> bool:
        in_room = self._rooms is None or sample.room in self._rooms
        return in_room and (self._users is None or sample.user in self._users) and sample.gesture in self._classes

    def domain_names(self) -> list[str]:
        """Return domains that are in no group, by number, and groups."""
        return [*self._samples]

    def class_names(self) -> list[str]:
        """Return the gestures that are kept."""
        return self._classes

    def _sample_shape(self) -> tuple[int, ...]:
        return (self.frames, _SIDE, _SIDE)

    def load(self, domain: str) -> Domain:
        """Return velocity profiles of a domain, shape (n, frames, 20, 20), float32, in [0, 1]."""
        samples = [each for each in self._samples[domain] if each.path.stat().st_size]
        empty = [each.path.name for each in self._samples[domain] if not each.path.stat().st_size]
        profiles, labels = [], []
        for sample, arrays in zip(samples, read_mats([each.path for each in samples]), strict=True):
            profile = arrays.get("velocity_spectrum_ro")
            rule, shown = "of velocity_spectrum_ro (20, 20, T)", sorted(arrays) if profile is None else profile.shape
            if profile is not None and profile.size == 0:
                empty.append(sample.path.name)
                continue
            fits = profile is not None and profile.ndim in (2, 3) and profile.shape[:2] == (_SIDE, _SIDE)
            check_data(fits, str(sample.path), rule, shown, "get the archive again")
            x = _scaled(np.asarray(profile, dtype=np.float64).reshape(_SIDE, _SIDE, -1).transpose(2, 0, 1))
            check_data(bool(np.isfinite(x).all()), str(sample.path), "of finite numbers", "others", "leave it out")
            x = x[: self.frames]
            profiles.append(np.concatenate([np.zeros((self.frames - len(x), _SIDE, _SIDE)), x]).astype(np.float32))
            labels.append(self._classes.index(sample.gesture))
        if empty:
            warnings.warn(f"left out {len(empty)} empty files of {domain!r}: {some(empty)}", stacklevel=2)
        check_data(bool(profiles), f"files of {domain!r}", "of at least one sample", "empty ones alone", "leave it out")
        return Domain(torch.from_numpy(np.stack(profiles)), torch.tensor(labels))


def _scaled(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Scale each profile, shape (T, 20, 20), to [0, 1]; one that is the same everywhere is 0."""
    lowest, highest = x.min(axis=(1, 2), keepdims=True), x.max(axis=(1, 2), keepdims=True)
    scaled: npt.NDArray[np.float64] = (x - lowest) / np.where(highest > lowest, highest - lowest, 1.0)
    return scaled


def _sample_of(file: Path, date: str) -> _Sample | None:
    """Return what a file's name and date say; ``None`` if it is none of the published ones."""
    match = _FILE.fullmatch(file.name)
    if match is None or date not in _ON_DATE:
        return None
    user, gesture, location, orientation, _ = map(int, match.groups())
    room, of_users = _ON_DATE[date]
    names = of_users.get(user, of_users.get(None, ()))
    return _Sample(file, names[gesture - 1], room, user, location, orientation) if 0 < gesture <= len(names) else None
