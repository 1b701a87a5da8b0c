"""A model that was exported to a folder: as a network that needs neither Lightning nor the method that trained it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlit.checks import check, refuse

FORMAT = 1
"""Version of the folder's content, raised where older readers would not understand it."""

WEIGHTS, CONFIG, FORWARD, CARD = "model.safetensors", "config.json", "forward.pt2", "README.md"
"""Files of the folder."""


class ExportedModel(nn.Module):
    """What a target predicts with, for evaluation; `fedlit.load` makes it.

    Attributes:
        network: Holds the weights, under the names that they had in the target's network.
        classes: Names of the classes in the order of predictions; in regression of the numbers.
        config: Inputs, outputs and origin as plain data: what the model card says.
    """

    def __init__(self, program: nn.Module, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = dict(config)
        self.classes: list[str] = list(config["outputs"])
        self.network = nn.Module()
        self._program = [program]  # in a list, as it is no part: weights are its arguments
        for name, weight in weights.items():
            *folders, last = name.split(".")
            part = self.network
            for folder in folders:
                if not hasattr(part, folder):
                    part.add_module(folder, nn.Module())
                part = getattr(part, folder)
            if weight.is_floating_point():
                part.register_parameter(last, nn.Parameter(weight, requires_grad=False))
            else:
                part.register_buffer(last, weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Class probabilities of raw inputs, shape (n, C), or in regression numbers in the labels' unit."""
        state = self.network.state_dict()
        predictions: Tensor = self._program[0]({name: state[name] for name in self.config["weights"]}, inputs)
        return predictions

    def preprocess(self, samples: Any) -> Tensor:
        """Return samples as `forward` takes them.

        Args:
            samples: A tensor or array of shape (n, *input_shape), as the model card describes it; of a table a
                pandas DataFrame or a mapping from columns to values, with texts of categories, and ``None`` or NaN
                where a value is missing.

        Raises:
            ValueError: If samples have another shape, or a column is missing.
        """
        if self.config["columns"] is not None and not isinstance(samples, Tensor):
            samples = self._rows(samples)
        inputs = torch.as_tensor(samples, dtype=getattr(torch, self.config["inputs"]))
        form = ("n", *self.config["input_shape"])
        check(inputs.shape[1:] == form[1:], "samples", f"of shape {form}", None, shown=str(tuple(inputs.shape)))
        return inputs

    @torch.inference_mode()
    def predict(self, samples: Any) -> list[str] | Tensor:
        """Names of the most probable classes of samples, see `preprocess`; in regression numbers, shape (n, C)."""
        device = next((weight.device for weight in self.network.state_dict().values()), None)
        predictions: Tensor = self(self.preprocess(samples).to(device))
        if self.config["task"] == "regression":
            return predictions
        return [self.classes[index] for index in predictions.argmax(dim=1).tolist()]

    def _rows(self, table: Any) -> Tensor:
        """A table's numbers and codes, float64, shape (n, columns)."""
        names = [each["name"] for each in self.config["columns"]]
        lacking = [name for name in names if name not in table]
        check(not lacking, "samples", f"a table with columns {names}", None, shown=f"one without {lacking}")
        columns = []
        for each in self.config["columns"]:
            values = [None if _is_missing(value) else value for value in table[each["name"]]]
            if (codes := each["codes"]) is not None:
                as_written = {text.lower(): text for text in codes}  # pandas makes truth values of TRUE and FALSE
                texts = ["" if value is None else str(value).strip() for value in values]
                texts = [as_written.get(text.lower(), text) if text in ("True", "False") else text for text in texts]
                values = [codes.get(text, -1.0) for text in texts]
            numbers = [math.nan if value is None else float(value) for value in values]
            columns.append(torch.tensor(numbers, dtype=torch.float64))
        return torch.stack(columns, dim=1)


def _is_missing(value: object) -> bool:
    return value is None or value != value  # NaN, and pandas' own


def load(folder: str | Path) -> ExportedModel:
    """Return the model that ``fedlit export --format safetensors`` has written to a folder.

    Args:
        folder: With ``model.safetensors``, ``config.json`` and ``forward.pt2``.

    Returns:
        A network on the CPU, for evaluation, whose ``predict`` takes raw samples.

    Raises:
        FileNotFoundError: If one of the files is not there.
        ValueError: If they are of another version, or weights are not those that were written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder).expanduser()
    lacking = [name for name in (CONFIG, WEIGHTS, FORWARD) if not (folder / name).is_file()]
    if lacking:
        raise FileNotFoundError(
            f"folder must be one that fedlit export --format safetensors has written, and '{folder}' has no "
            f"{' and no '.join(lacking)}"
        )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        written, stated = config["format"], config["weights"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"'{folder / CONFIG}' does not describe a model of fedlit ({error!r})") from error
    way_out = f"it is of fedlit {config.get('fedlit')}: install that version, or export the model again"
    check(written == FORMAT, f"format in '{folder / CONFIG}'", str(FORMAT), written, way_out)
    try:
        weights = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"'{folder / WEIGHTS}' cannot be read as safetensors: {error}") from error
    found = described(weights)
    for name in [*stated, *found]:
        if found.get(name) != stated.get(name):
            rule = f"{stated[name]} under {name!r}" if name in stated else f"without {name!r}"
            refuse(f"'{folder / WEIGHTS}'", f"as in {CONFIG}, {rule}", None, "export the model again",
                   shown=str(found.get(name, "nothing")))  # fmt: skip
    program = torch.export.load(folder / FORWARD).module()
    return ExportedModel(program, {name: weights[name] for name in stated}, config).eval()


def described(weights: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Type and shape of each weight, as ``config.json`` has them."""
    return {name: [str(each.dtype).removeprefix("torch."), *each.shape] for name, each in weights.items()}
