"""PAMAP2: activities of nine people with three inertial sensors and a heart rate monitor."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedlit.checks import check_one_of, refuse
from fedlit.data.samples import DatasetNotFoundError, check_data, refuse_data
from fedlit.data.signals.module import SignalModule
from fedlit.data.signals.recordings import Recording
from fedlit.federation.labels import UNLABELLED

ACTIVITIES = {
    1: "lying", 2: "sitting", 3: "standing", 4: "walking", 5: "running", 6: "cycling", 7: "nordic_walking",
    12: "ascending_stairs", 13: "descending_stairs", 16: "vacuum_cleaning", 17: "ironing", 24: "rope_jumping",
}  # fmt: skip
"""The twelve of the protocol; 0 is none of them."""

INTENSITIES = {
    "light": ("lying", "sitting", "standing", "ironing"),
    "moderate": ("vacuum_cleaning", "descending_stairs", "walking", "nordic_walking", "cycling"),
    "vigorous": ("ascending_stairs", "running", "rope_jumping"),
}
"""Below 3, from 3 to 6 and above 6 metabolic equivalents (Reiss and Stricker)."""

_OF_SENSOR = (
    "temperature",
    *(f"{sensor}_{axis}" for sensor in ("acc16", "acc6", "gyro", "mag") for axis in "xyz"),
    *(f"orientation_{number}" for number in range(4)),
)
CHANNELS = ("heart_rate", *(f"{place}_{name}" for place in ("hand", "chest", "ankle") for name in _OF_SENSOR))
"""All 52, in the order of the files."""

_WIDTH = 2 + len(CHANNELS)


class PAMAP2(SignalModule):
    """Twelve activities of nine people: each person is a domain, ``subject101`` to ``subject109``.

    Reads ``Protocol/subject10X.dat`` of the published archive: lines of 54 numbers at 100 Hz, which are time (s),
    activity, heart rate (about 9 Hz, missing in between), and of each of the sensors at hand, chest and ankle
    temperature, acceleration (16 g and 6 g, m/s^2), angular rate (rad/s), magnetic field (uT) and orientation. What was
    lost on the radio link is ``NaN``. By default windows have 5.12 seconds, one each second, as in the publication, and
    up to a second of missing values is filled.

    Args:
        path: Folder of the archive, or its ``Protocol``.
        labels: The twelve activities, or their ``"intensity"`` (light, moderate, vigorous).
        channels: Names of the channels; ``None`` takes the 40 that are valid, all but orientations.
        window: As of `SignalModule`.
        stride: As of `SignalModule`.
        fill: As of `SignalModule`.
        classes: Names of the classes to keep; ``None`` keeps all.
        target: The person that is adapted to; ``None`` takes the last of the clients.
        kwargs: See `SignalModule`.

    Raises:
        DatasetNotFoundError: If there is no such folder.
        DatasetLayoutError: If it is laid out in another way.

    References:
        Reiss and Stricker, Introducing a new benchmarked dataset for activity monitoring, ISWC 2012; Creating and
        benchmarking a new dataset for physical activity monitoring, PETRA 2012.
    """

    def __init__(
        self,
        path: str,
        *,
        labels: Literal["activity", "intensity"] = "activity",
        channels: list[str] | None = None,
        window: float = 5.12,
        stride: float | None = 1.0,
        fill: float = 1.0,
        classes: list[str] | None = None,
        target: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_one_of("labels", labels, ("activity", "intensity"))
        wanted = [name for name in CHANNELS if "orientation" not in name] if channels is None else channels
        kept = [*(ACTIVITIES.values() if labels == "activity" else INTENSITIES)] if classes is None else classes
        super().__init__(
            window=window, stride=stride, fill=fill, channels=wanted, classes=kept, target=target, **kwargs
        )  # fmt: skip
        self.path, self._by_intensity = Path(path), labels == "intensity"
        self.check_roster()

    @property
    def _folder(self) -> Path:
        inner = self.path / "Protocol"
        return inner if inner.is_dir() else self.path

    def domain_names(self) -> list[str]:
        """Return the people that are here, by number."""
        if not self.path.is_dir():
            rule, way_out = "the folder of the archive, which has Protocol", "get it from UCI (PAMAP2)"
            shown = f"{str(self.path)!r}, looked for {str(self.path.absolute())!r}"
            refuse("path", rule, str(self.path), way_out, DatasetNotFoundError, shown)
        names = sorted(file.stem for file in self._folder.glob("subject*.dat"))
        check_data(bool(names), str(self._folder), "of files subject10X.dat", "none", "give the folder of the archive")
        return names

    def recordings(self, domain: str) -> list[Recording]:
        """Return the recording of a person."""
        import pandas as pd

        file = self._folder / f"{domain}.dat"
        try:
            table = pd.read_csv(file, sep=r"\s+", header=None, dtype=np.float64)
        except Exception as error:  # libraries raise errors of any kind
            refuse_data(str(file), f"lines of {_WIDTH} numbers", str(error).splitlines()[0], "get the archive again")
        check_data(table.shape[1] == _WIDTH, str(file), f"lines of {_WIDTH} numbers", f"{table.shape[1]}")
        numbers, index = table.to_numpy(), [*ACTIVITIES]
        short = np.isnan(numbers[:, -1])  # pandas fills lines up that lack numbers
        with file.open("rb") as lines:
            whole = (line for line in lines if line.strip())
            counts = {place: len(line.split()) for place, line in enumerate(whole, start=1) if short[place - 1]}
        wrong = [f"{count} in line {place}" for place, count in counts.items() if count != _WIDTH]
        check_data(not wrong, str(file), f"lines of {_WIDTH} numbers", ", ".join(wrong[:1]), "get the archive again")
        labels = np.full(len(numbers), UNLABELLED, dtype=np.int64)
        for position, activity in enumerate(index):
            labels[numbers[:, 1] == activity] = position
        names = tuple(ACTIVITIES.values())
        if self._by_intensity:
            of = {name: intensity for intensity, group in INTENSITIES.items() for name in group}
            order = [*INTENSITIES]
            codes = np.array([order.index(of[name]) for name in names] + [UNLABELLED])
            labels, names = codes[labels], tuple(order)
        return [Recording(file.name, numbers[:, 2:].astype(np.float32), CHANNELS, labels, names, numbers[:, 0])]
