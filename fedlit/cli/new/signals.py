"""Signals: recordings of several channels, in tables or an .npz file."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any, ClassVar

from fedlit.cli.new.studies import Kind, Study, lines, own_data, seen_from

_SECONDS, _RATE, _STRETCH = 240, 25, 10
"""Of the example: length of a recording, samples a second, and seconds of each activity in turn."""

_WINDOWS = 70
"""Of each client of the example, of one activity throughout."""


class Signals(Kind):
    """Recordings; an example of made-up acceleration of four people."""

    summary = "recordings of sensors, DIR/CLIENT/recording.csv, or an .npz file and --domain"
    depths = ("*", "*/*", "*/*/*")
    suffixes = (".csv", ".tsv", ".txt", ".parquet", ".npz")
    clients: ClassVar = {"ann": (1.0, 0.0), "ben": (1.1, 0.3), "eva": (0.9, 0.6), "tom": (1.2, 1.2)}
    """People of the example: how strongly they move, and by which angle (rad) the sensor is turned."""

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add what describes recordings."""
        several: dict[str, Any] = {"nargs": "+"}
        more: dict[str, Any]
        for name, metavar, help_, more in (
            ("domain", "COLUMN", "column of the client's name, if folders do not name it", {}),
            ("label", "COLUMN", "column of labels; 'label' if not given", {}),
            ("recording", "COLUMN", "column that tells recordings in a table apart", {}),
            ("time", "COLUMN", "column of time stamps", {}),
            ("time_unit", None, "of time stamps that are numbers", {"choices": ("s", "ms", "us", "ns")}),
            ("recorded_rate", "HZ", "samples a second, if there are no time stamps", {"type": float}),
            ("rate", "HZ", "samples a second to resample all to", {"type": float}),
            ("channels", "COLUMN", "channels, in one order at all clients", several),
            ("classes", "CLASS", "their names, in the order of their labels", several),
            ("window", "SECONDS", "length of a window; 2.56 if not given", {"type": float}),
            ("fill", "SECONDS", "longest run of missing values that is filled", {"type": float}),
            ("separator", None, "between columns, such as ';'", {}),
            ("decimal", None, "sign before decimals, such as ','", {}),
        ):
            parser.add_argument(f"--{name}", metavar=metavar, help=help_, **more)

    def own(self, given: argparse.Namespace) -> Study:
        """A user's recordings, from the options that describe them."""
        from fedlit.data import DatasetLayoutError, SignalDomains

        described_by = (
            *("domain", "label", "recording", "time", "time_unit", "recorded_rate", "rate", "channels", "classes"),
            *("fill", "separator", "decimal"),
        )
        arguments = {key: getattr(given, key) for key in described_by if getattr(given, key) is not None}
        # a stride of a window, so that windows share nothing, and all without a label in training can score
        arguments["window"] = arguments["stride"] = 2.56 if given.window is None else given.window
        if given.data.suffix.lower() == ".npz" and given.domain is None:
            sys.exit(f"fedlit: --domain must name the array of '{given.data}' that has each sample's client")
        try:
            names, data, target = own_data(SignalDomains, given, **arguments)
        except (DatasetLayoutError, ValueError) as error:
            sys.exit(f"fedlit: {error}. What it asks for is an option of fedlit new signals, with -- before it: --help")
        return Study(
            files=seen_from(given.dir, given.data),
            target=given.target,
            labelled=int((target.y >= 0).sum()),
            about=f"recordings of {len(names)} clients ({', '.join(names)}) with {len(data.channel_names())} channels, "
            f"in windows of {data.num_classes} classes; {given.target!r} is adapted to.",
            place=f"They are read from `{given.data}`.",
            more={"reading": lines(arguments)},
        )

    def example(self) -> Study:
        """Made-up acceleration, of which the target's sensor is turned."""
        return Study(
            files="data",
            target="tom",
            labelled=_WINDOWS,
            about="made-up acceleration of four people as an example, who stand, walk, climb and run in turn; "
            "the target, tom, has the sensor turned.",
            place="The example runs as it is. Then put a folder of your own for each client into `data/`, in place of "
            "those there, and in it a table for each recording: `data/CLIENT/recording.csv`.",
            listing="- `data/`: the example, a folder for each client, and in it a table for each recording.\n",
            more={"reading": lines({"time": "time", "window": 2.56, "stride": 2.56})},
            write=self._write,
        )

    def _write(self, folder: Path) -> None:
        import numpy as np

        random, time = np.random.default_rng(0), np.arange(_SECONDS * _RATE) / _RATE
        activity = (time // _STRETCH).astype(int) % len(_NAMES)
        for client, (strength, angle) in self.clients.items():
            step = 2 * np.pi * np.cumsum(np.array([0, 1.8, 1.6, 2.5])[activity]) / _RATE
            size = strength * np.array([0, 0.25, 0.4, 0.8])[activity]
            x, z = 0.6 * size * np.sin(step + 0.7), 1 + size * np.sin(step)
            turned = (np.cos(angle) * x + np.sin(angle) * z, 0.4 * size * np.sin(step / 2),
                      np.cos(angle) * z - np.sin(angle) * x)  # fmt: skip
            columns = [each + 0.25 * random.normal(size=len(time)) for each in turned]
            place = folder / "data" / client
            place.mkdir(parents=True)
            with (place / "day1.csv").open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(["time", "x", "y", "z", "label"])
                for row in zip(time, *columns, activity, strict=True):
                    writer.writerow([f"{row[0]:.2f}", *(f"{value:.4f}" for value in row[1:4]), _NAMES[row[4]]])


_NAMES = ("stand", "walk", "climb", "run")
