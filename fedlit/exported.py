"""A model that was exported to a folder: as a network that needs neither Lightning nor the method that trained it.

Nothing in the folder is unpickled or evaluated: its graph is a list of operations of torch's core with their arguments.
"""

from __future__ import annotations

import json
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlit.checks import check, is_missing, refuse

FORMAT = 1
"""Version of the folder's content, raised where older readers would not understand it."""

WEIGHTS, CONFIG, GRAPH, CARD = "model.safetensors", "config.json", "graph.json", "README.md"
"""Files of the folder."""

_FILES = (CONFIG, GRAPH, WEIGHTS)
_OF_NUMBERS = {name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "getitem")}
"""Operations that are not torch's, which graphs use on sizes and to choose one of several results."""
_ATEN = re.compile(r"aten\.(?!rand|resize|native_dropout)(\w+)\.(?!out$)(\w+)")
"""torch's operations, less those of its core that draw random numbers or change what they are given."""


@cache
def _operation(name: str) -> Callable[..., Any] | None:
    """An operation by its name in a graph; ``None`` of one that graphs do not have."""
    found = _ATEN.fullmatch(name)
    if found is None:
        return _OF_NUMBERS.get(name)
    overload: Callable[..., Any] | None = getattr(getattr(torch.ops.aten, found[1], None), found[2], None)
    # its core, to which all others come down: some two hundred that compute, check their bounds, and do nothing else
    is_core = isinstance(overload, torch._ops.OpOverload) and torch.Tag.core in overload.tags
    return overload if is_core else None


def is_operation(name: str) -> bool:
    """Whether graphs may have an operation."""
    return _operation(name) is not None


class ExportedModel(nn.Module):
    """What a target predicts with, for evaluation in float32; `fedlit.load` makes it.

    Attributes:
        network: Holds the weights, under the names that they had in the target's network.
        classes: Names of the classes in the order of predictions; in regression of the numbers.
        config: Inputs, outputs and origin as plain data: what the model card says.
    """

    def __init__(self, graph: Mapping[str, Any], weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = dict(config)
        self.classes: list[str] = list(config["outputs"])
        self.network = nn.Module()
        self._graph = dict(graph)
        self._last_uses = _last_uses(graph)
        for name, weight in weights.items():
            *folders, last = name.split(".")
            part = self.network
            for folder in folders:
                if folder not in part._modules:
                    part.add_module(folder, nn.Module())
                part = part.get_submodule(folder)
            if weight.is_floating_point():
                part.register_parameter(last, nn.Parameter(weight, requires_grad=False))
            else:
                part.register_buffer(last, weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Class probabilities of raw inputs, shape (n, C), or in regression numbers in the labels' unit."""
        state = self.network.state_dict()
        values: dict[str, Any] = {node: state[name] for node, name in self._graph["weights"].items()}
        values[self._graph["inputs"]] = inputs

        def given(argument: Any) -> Any:
            if isinstance(argument, list):
                return [given(each) for each in argument]
            if not isinstance(argument, dict):
                return argument
            ((kind, value),) = argument.items()
            return inputs.device if kind == "device" else values[value] if kind == "node" else _constant(value)

        for (node, name, arguments, options), last in zip(self._graph["nodes"], self._last_uses, strict=True):
            operation = _operation(name)
            assert operation is not None
            values[node] = operation(*given(arguments), **{key: given(each) for key, each in options.items()})
            for each in last:
                del values[each]
        predictions: Tensor = given(self._graph["output"])
        return predictions

    def preprocess(self, samples: Any) -> Tensor:
        """Return samples as `forward` takes them.

        Args:
            samples: A tensor or array of shape (n, *input_shape), as the model card describes it; of a table a
                pandas DataFrame, a mapping from columns to lists or a list of mappings, with texts of categories, and
                ``None`` or NaN where a value is missing. The card says how to read a file of such a table.

        Raises:
            ValueError: If samples have another shape, a column is missing, or a number is none, or not whole where the
                model takes whole numbers, such as pixels from 0 to 255.
        """
        if self.config["columns"] is not None and not isinstance(samples, Tensor):
            samples = self._rows(samples)
        given = torch.as_tensor(samples)
        inputs = given.to(getattr(torch, self.config["inputs"]), copy=True)
        form = ("n", *self.config["input_shape"])
        check(inputs.shape[1:] == form[1:], "samples", f"of shape {form}", None, shown=str(tuple(inputs.shape)))
        if not inputs.is_floating_point():
            others, kind = given[given != inputs], torch.iinfo(inputs.dtype)
            rule = f"of whole numbers from {kind.min} to {kind.max}"
            way_out = "multiply pixels in [0, 1] by 255, and round them" if inputs.dtype == torch.uint8 else ""
            check(not len(others), "samples", rule, None, way_out, shown=str(others[:1].tolist()))
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
        columns = self.config["columns"]
        names = [each["name"] for each in columns]
        if isinstance(table, Sequence) and table and all(isinstance(row, Mapping) for row in table):
            table = {name: [row.get(name) for row in table] for name in names if any(name in row for row in table)}
        lacking = [name for name in names if name not in table]
        check(not lacking, "samples", f"a table with columns {names}", None, shown=f"one without {lacking}")
        found = []
        for name, codes in ((each["name"], each["codes"]) for each in columns):
            is_list = hasattr(table[name], "__iter__") and not isinstance(table[name], str)
            check(is_list, f"column {name!r} of samples", "of a value for each row", table[name])
            values = [None if is_missing(value) else value for value in table[name]]
            found.append([_number(value, name) for value in values] if codes is None else _codes(values, codes, name))
        lengths = {name: len(column) for name, column in zip(names, found, strict=True)}
        check(len({*lengths.values()}) == 1, "samples", "a table whose columns are equally long", lengths)
        return torch.tensor(found, dtype=torch.float64).T.contiguous()


def _read(argument: Any) -> Iterator[str]:
    """Names of the values that an operation's arguments read."""
    if isinstance(argument, list):
        for each in argument:
            yield from _read(each)
    elif isinstance(argument, dict) and "node" in argument:
        yield argument["node"]


def _last_uses(graph: Mapping[str, Any]) -> list[list[str]]:
    """Names of the values that nothing reads after an operation, for each, so that their memory is free again."""
    needed, found = {*_read(graph["output"])}, []
    for node, _, arguments, options in reversed(graph["nodes"]):
        found.append(sorted({node, *_read([arguments, *options.values()])} - needed))
        needed.update(found[-1])
    return found[::-1]


def _constant(name: str) -> Any:
    """A type, layout or memory format of torch."""
    found = getattr(torch, name)
    check(isinstance(found, torch.dtype | torch.layout | torch.memory_format), f"constant in {GRAPH}", "a type", name)
    return found


def _number(value: object, name: str) -> float:
    try:
        return math.nan if value is None else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        refuse(f"column {name!r} of samples", "of numbers, None or NaN where one is missing", value)


def _codes(values: Sequence[object], codes: Mapping[str, float], name: str) -> list[float]:
    """Codes of a category's values; a warning of those that training has not seen, which are -1."""
    as_written = {text.lower(): text for text in codes}  # pandas makes truth values of TRUE and FALSE
    texts = ["" if value is None else str(value).strip() for value in values]
    texts = [as_written.get(text.lower(), text) if text in ("True", "False") else text for text in texts]
    unseen = [*dict.fromkeys(text for text in texts if text not in codes)]
    if unseen:
        warnings.warn(
            f"column {name!r} of samples has values that training has not seen, such as {unseen[:3]}, which are taken "
            f"for unknown: it knows {[*codes][:10]}. Read categories as texts (in pandas dtype={{{name!r}: 'str'}})",
            stacklevel=5,
        )
    return [codes.get(text, -1.0) for text in texts]


def load(folder: str | Path) -> ExportedModel:
    """Return the model that ``fedlit export --format safetensors`` has written to a folder.

    Args:
        folder: With ``model.safetensors``, ``config.json`` and ``graph.json``.

    Returns:
        A network on the CPU, for evaluation, whose ``predict`` takes raw samples.

    Raises:
        FileNotFoundError: If one of the files is not there.
        ValueError: If they are of another version, weights are not those that were written, or an operation is unknown.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder).expanduser()
    lacking = [name for name in _FILES if not (folder / name).is_file()]
    if lacking:
        raise FileNotFoundError(
            f"folder must be one that fedlit export --format safetensors has written, and '{folder}' has no "
            f"{' and no '.join(lacking)}"
        )
    try:
        config, graph = (json.loads((folder / name).read_text(encoding="utf-8")) for name in (CONFIG, GRAPH))
        written = config["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"'{folder}' does not describe a model of fedlit ({error!r})") from error
    way_out = f"it is of fedlit {config.get('fedlit')}: install that version, or export the model again"
    check(written == FORMAT, f"format in '{folder / CONFIG}'", str(FORMAT), written, way_out)
    try:
        stated = dict(config["weights"])
        _check_form(config, graph, stated)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"'{folder}' does not describe a model of fedlit ({error!r})") from error
    for _, name, _, _ in graph["nodes"]:
        check(is_operation(name), f"operation in '{folder / GRAPH}'", "one of torch's core in this version", name)
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
    try:
        return ExportedModel(graph, {name: weights[name] for name in stated}, config).eval()
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"'{folder / WEIGHTS}' has a weight of a name that a network cannot have: {error}") from error


def _check_form(config: Any, graph: Any, stated: Mapping[str, Any]) -> None:
    """Raise an error of any kind unless all is there that `ExportedModel` reads."""
    keys = ("outputs", "columns", "task", "inputs", "input_shape")
    missing = [key for key in keys if key not in config] + [key for key in ("inputs", "output") if key not in graph]
    if (
        missing
        or not isinstance(config["outputs"], list)
        or (config["columns"] is not None and not all({"name", "codes"} <= each.keys() for each in config["columns"]))
    ):
        raise ValueError(f"entries {missing or keys} are not as they should be")
    well_formed = all(len(node) == 4 and isinstance(node[1], str) for node in graph["nodes"])
    if {*graph["weights"].values()} != {*stated} or not well_formed:
        raise ValueError("the graph has other weights")
    computed = {*graph["weights"], graph["inputs"]}
    for node, name, arguments, options in graph["nodes"]:
        unknown = {*_read([arguments, *options.values()])} - computed
        if unknown or node in computed:
            raise ValueError(f"{name} reads {sorted(unknown)} before it is computed, or computes {node!r} again")
        computed.add(node)
    if not computed.issuperset(_read(graph["output"])):
        raise ValueError("the graph does not compute its output")


def described(weights: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Type and shape of each weight, as ``config.json`` has them."""
    return {name: [str(each.dtype).removeprefix("torch."), *each.shape] for name, each in weights.items()}
