"""HAPT: activities of 30 people with a phone at the waist."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedlit.checks import refuse
from fedlit.data.files import read_npz
from fedlit.data.samples import DatasetNotFoundError, check_data, refuse_data
from fedlit.data.signals.module import SignalModule
from fedlit.data.signals.reading import Names, Table, table_of_arrays
from fedlit.data.signals.recordings import Numbers, Recording
from fedlit.federation.labels import UNLABELLED

ACTIVITIES = ("walking", "upstairs", "downstairs", "sitting", "standing", "lying")
TRANSITIONS = ("stand_to_sit", "sit_to_stand", "sit_to_lie", "lie_to_sit", "stand_to_lie", "lie_to_stand")
"""Activities 1 to 6, and 7 to 12."""

CHANNELS = ("acc_x", "acc_y", "acc_z", "gyro_x", "gyro_y", "gyro_z")
"""Acceleration in g, angular rate in radians a second."""

_RATE = 50.0
_NAMES = Names("person", "label", "recording", None, "s", frozenset(["-1"]))
_FILE = re.compile(r"acc_exp(\d+)_user(\d+)\.txt")


class HAPT(SignalModule):
    """Six activities of 30 people with a phone at the waist: each person is a domain, ``person1`` to ``person30``.

    Acceleration (g) and angular rate (rad/s) of three axes each at 50 Hz, two recordings of each person. By default a
    window has 128 samples (2.56 s), every other one of a window the same as the next's, as published.

    - folder of UCI's archive: ``RawData/acc_expXX_userYY.txt`` and ``gyro_expXX_userYY.txt``, with three numbers in a
      line, and ``RawData/labels.txt``, with experiment, user, activity (1 to 12), first and last sample (from 1).
    - ``.npz`` file: ``x`` (T, 6) in the order of the channels, ``scale`` (6,), which it is multiplied by, ``label``
      (T,), 1 to 12 or -1, ``person`` (T,) and ``recording`` (T,).

    Args:
        path: The folder, or the ``.npz`` file.
        transitions: Keep the six transitions between postures as well, from ``stand_to_sit`` to ``lie_to_stand``.
        window: As of `SignalModule`.
        stride: As of `SignalModule`.
        unit: As of `SignalModule`.
        classes: Names of the activities to keep; ``None`` takes six, or twelve.
        target: The person that is adapted to; ``None`` takes the last of the clients.
        kwargs: See `SignalModule`.

    Raises:
        DatasetNotFoundError: If there is nothing at ``path``.
        DatasetLayoutError: If it is laid out in another way.

    References:
        Reyes-Ortiz, Oneto, Sama, Parra and Anguita, Transition-aware human activity recognition using smartphones,
        Neurocomputing 2016. Data: UCI, Smartphone-Based Recognition of Human Activities and Postural Transitions, CC BY
        4.0.
    """

    def __init__(
        self,
        path: str,
        *,
        transitions: bool = False,
        window: float = 128,
        stride: float | None = 64,
        unit: Literal["seconds", "samples"] = "samples",
        classes: list[str] | None = None,
        target: str | None = None,
        **kwargs: Any,
    ) -> None:
        kept = [*ACTIVITIES, *(TRANSITIONS if transitions else ())] if classes is None else classes
        super().__init__(window=window, stride=stride, unit=unit, classes=kept, target=target, **kwargs)
        self.path = Path(path)
        self.check_roster()

    @cached_property
    def _table(self) -> Table | None:
        """Samples of an .npz file."""
        if not self.path.exists():
            rule = "the folder of the archive, which has RawData, or an .npz file"
            way_out = "get it from UCI (Smartphone-Based Recognition of Human Activities and Postural Transitions)"
            shown = f"{str(self.path)!r}, looked for {str(self.path.absolute())!r}"
            refuse("path", rule, str(self.path), way_out, DatasetNotFoundError, shown)
        if self.path.is_dir():
            return None
        arrays = {**read_npz(self.path), "channels": np.array(CHANNELS), "rate": np.array(_RATE)}
        fits = arrays.get("x", np.zeros(0)).shape[1:] == (len(CHANNELS),)
        check_data(fits, f"x (of {self.path})", f"of shape (T, {len(CHANNELS)})", "another shape, or none")
        return table_of_arrays(arrays, str(self.path), _NAMES)

    @cached_property
    def _files(self) -> dict[str, list[tuple[Path, int]]]:
        """Files of the acceleration of each person, with the number of the experiment."""
        folder = self._folder
        files: dict[str, list[tuple[Path, int]]] = {}
        for file in sorted(folder.iterdir()):
            if match := _FILE.fullmatch(file.name):
                files.setdefault(f"person{int(match[2])}", []).append((file, int(match[1])))
        check_data(bool(files), str(folder), "of files acc_expXX_userYY.txt", "none", "give the folder of the archive")
        return dict(sorted(files.items(), key=lambda item: int(item[0].removeprefix("person"))))

    @property
    def _folder(self) -> Path:
        inner = self.path / "RawData"
        return inner if inner.is_dir() else self.path

    def domain_names(self) -> list[str]:
        """Return the people that are here, by number."""
        if self._table is None:
            return [*self._files]
        return [f"person{number}" for number in np.unique(self._table.columns["person"]).tolist()]

    def recordings(self, domain: str) -> list[Recording]:
        """Return the recordings of a person."""
        names = (*ACTIVITIES, *TRANSITIONS)
        if self._table is None:
            recordings = [self._raw(file, experiment) for file, experiment in self._files[domain]]
        else:
            recordings = [*self._table.recordings(_NAMES, domain.removeprefix("person"))]
        named = []
        for each in recordings:
            unknown = [text for text in each.classes if not text.isdecimal() or not 1 <= int(text) <= len(names)]
            check_data(not unknown, f"labels of {each.name}", f"from 1 to {len(names)}", unknown, "and -1 for none")
            named.append(replace(each, classes=tuple(names[int(text) - 1] for text in each.classes)))
        return named

    @cached_property
    def _stretches(self) -> Numbers:
        """Experiment, user, activity, first and last sample of each stretch, shape (n, 5)."""
        table = _numbers(self._folder / "labels.txt", 5)
        whole = bool((table == table.round()).all())
        check_data(whole, "labels.txt", "of whole numbers", "others", "get the archive again")
        return table.astype(np.int64)

    def _raw(self, file: Path, experiment: int) -> Recording:
        acceleration = _numbers(file, 3)
        rates = _numbers(file.with_name(file.name.replace("acc", "gyro", 1)), 3)
        alike = len(acceleration) == len(rates)
        shown = f"{len(rates)} beside {len(acceleration)} of {file.name}"
        check_data(alike, file.name.replace("acc", "gyro", 1), "as many lines as of the acceleration", shown)
        labels = np.full(len(acceleration), UNLABELLED, dtype=np.int64)
        known, where = len(ACTIVITIES) + len(TRANSITIONS), f"labels.txt (experiment {experiment})"
        for number, _, activity, first, last in self._stretches:
            if number == experiment:
                check_data(1 <= activity <= known, where, f"activities from 1 to {known}", activity)
                within = 1 <= first <= last <= len(labels)
                rule, shown = f"within the {len(labels)} samples of {file.name}", f"{first} to {last}"
                check_data(within, where, rule, shown)
                labels[first - 1 : last] = activity - 1
        classes = tuple(str(number + 1) for number in range(known))
        x = np.concatenate([acceleration, rates], axis=1).astype(np.float32)
        return Recording(file.name, x, CHANNELS, labels, classes, rate=_RATE)


def _numbers(file: Path, width: int) -> Numbers:
    """Numbers of a text file, separated by blanks, shape (n, width)."""
    if not file.is_file():
        refuse("path", f"a folder with {file.name}", str(file.parent), error=DatasetNotFoundError)
    try:
        table = np.loadtxt(file, dtype=np.float64, ndmin=2)
    except ValueError as error:
        refuse_data(str(file), f"{width} numbers in each line", str(error).splitlines()[0], "get the archive again")
    fits = table.shape[1] == width
    check_data(fits, str(file), f"{width} numbers in each line", table.shape[1], "get the archive again")
    return table
