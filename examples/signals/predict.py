"""Classes of a recording by an exported model, without fedlit: python predict.py target.onnx recording.csv."""

import json
import sys

import numpy as np
import onnxruntime
import pandas as pd

RATE, SIZE = 50, 128
"""Samples a second and in a window, as in experiment.yaml; target.onnx.md has them."""


def windows(path: str) -> np.ndarray:
    """Return windows of a recording that follow one another, shape (n, 3, 128), at one rate."""
    table = pd.read_csv(path)
    times = np.arange(table["t"].iloc[0], table["t"].iloc[-1], 1 / RATE)
    # averages over a period first: of 100 samples a second, every other one alone would alias
    smooth = table.rolling(max(1, round(len(table) / len(times))), min_periods=1, center=True)[["x", "y", "z"]].mean()
    channels = np.stack([np.interp(times, table["t"], smooth[name]) for name in ("x", "y", "z")])
    whole = channels.shape[1] // SIZE * SIZE
    return channels[:, :whole].reshape(3, -1, SIZE).transpose(1, 0, 2).astype(np.float32)


def main(model: str, recording: str) -> None:
    """Print the class of each window, by the second at which it begins."""
    session = onnxruntime.InferenceSession(model)
    (probabilities,) = session.run(["predictions"], {"inputs": windows(recording)})
    classes = json.loads(session.get_modelmeta().custom_metadata_map["fedlit.outputs"])
    for number, row in enumerate(probabilities):
        print(f"{number * SIZE / RATE:8.2f} s  {classes[row.argmax()]}  {row.max():.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
