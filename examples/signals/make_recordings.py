"""Write made-up recordings of four people, two with a phone and two with a watch, into recordings/."""

from pathlib import Path

import numpy as np
import pandas as pd

PEOPLE = {"anna": (50, 0.0), "bert": (100, 0.3), "carl": (50, 0.5), "dora": (100, 0.9)}
"""Samples a second, and by which angle (rad) the sensor is turned."""

ACTIVITIES = {"stand": (0.0, 0.0), "walk": (1.8, 0.3), "run": (2.7, 0.9)}
"""Steps a second, and acceleration (g)."""


def recording(rate: int, angle: float, rng: np.random.Generator) -> pd.DataFrame:
    """Return 90 seconds, in which activities take turns of 15; one sample in a hundred is lost."""
    time = np.arange(90 * rate) / rate + rng.normal(0, 0.0005, 90 * rate)
    label = np.array([*ACTIVITIES])[(np.arange(len(time)) / rate // 15).astype(int) % 3]
    steps, size = np.array([ACTIVITIES[name] for name in label]).T
    phase = 2 * np.pi * np.cumsum(steps) / rate
    forward, up = 0.5 * size * np.sin(phase + 0.8), 1 + size * np.sin(phase)
    table = pd.DataFrame(
        {
            "t": time.round(4),
            "x": np.cos(angle) * forward + np.sin(angle) * up + rng.normal(0, 0.05, len(time)),
            "y": 0.3 * size * np.sin(phase / 2) + rng.normal(0, 0.05, len(time)),
            "z": np.cos(angle) * up - np.sin(angle) * forward + rng.normal(0, 0.05, len(time)),
            "label": label,
        }
    )
    return table[rng.random(len(table)) > 0.01].round(4)


def main() -> None:
    """Write two recordings of each person."""
    for number, (person, (rate, angle)) in enumerate(PEOPLE.items()):
        folder = Path("recordings", person)
        folder.mkdir(parents=True, exist_ok=True)
        for day in (1, 2):
            table = recording(rate, angle, np.random.default_rng(10 * number + day))
            columns = ["t", "x", "y", "z", "label"] if number % 2 == 0 else ["t", "z", "x", "y", "label"]
            table[columns].to_csv(folder / f"day{day}.csv", index=False)


if __name__ == "__main__":
    main()
