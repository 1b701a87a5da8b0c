"""The target's model in a folder: weights as safetensors, its graph and what it takes as JSON, and a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch._decomp import get_decompositions
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind
from torch.fx import Node

from fedlit.data.raw_inputs import RawInputs, RawRows
from fedlit.export.files import codes_of, model_card
from fedlit.exported import CARD, CONFIG, FORMAT, GRAPH, WEIGHTS, described, is_operation

_CHECKS = ("aten._assert", "aten.sym_constrain")
"""Beginnings of operations that look at what others gave, and give nothing."""


def _short(name: str) -> str:
    """A weight's name as that in the target's network, or below ``preprocess``."""
    return f"preprocess.{name[2:]}" if name.startswith("0.") else name.removeprefix("1.").removeprefix("network.")


def save_folder(
    program: ExportedProgram,
    folder: Path,
    about: Mapping[str, Any],
    raw: RawInputs | None,
    scores: Mapping[str, float],
) -> None:
    """Write a model to a folder, from which `fedlit.load` reads it.

    Args:
        program: From inputs of shape (n, ...) to predictions, without weights that it does not read.
        folder: Made if need be.
        about: As `export_target` writes it into files.
        raw: What inputs are; with a table, codes of its texts are written.
        scores: For the metadata of the model card, by name.
    """
    from safetensors.torch import save_file

    core = default_decompositions()  # to operations of torch's core
    norm = torch.ops.aten.linalg_vector_norm.default  # which torch 2.11 leaves as it is
    core[norm] = get_decompositions([norm])[norm]
    program = program.run_decompositions(core)
    tensors = {_short(name): each.detach() for name, each in {**program.state_dict, **program.constants}.items()}
    graph = graph_of(program)
    names = [*graph["weights"].values()]
    if len({*names}) < len(names):
        raise TypeError(f"two of its weights would have one name, of {sorted(names)}: export it to a .pt2 file")
    weights = {name: tensors[name] for name in names}
    columns = about["columns"]
    if isinstance(raw, RawRows):
        levels = dict(raw.columns)
        columns = [
            {**each, "codes": None if levels[each["name"]] is None else codes_of(levels[each["name"]] or (), raw)}
            for each in columns
        ]
    config = {**about, "columns": columns, "format": FORMAT, "weights": described(weights)}
    folder.mkdir(exist_ok=True)
    (folder / GRAPH).write_text(json.dumps(graph), encoding="utf-8")
    save_file({name: each.contiguous().clone() for name, each in weights.items()}, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    metadata = yaml.safe_dump(metadata_of(about, folder.resolve().name, scores), sort_keys=False)
    (folder / CARD).write_text(f"---\n{metadata}---\n\n{model_card(about, folder)}", encoding="utf-8")


def graph_of(program: ExportedProgram) -> dict[str, Any]:
    """A program as plain data: names of weights and of the inputs by node, and operations with their arguments.

    Raises:
        TypeError: If it has another operation than torch's own on tensors and Python's on numbers.
    """
    graph: dict[str, Any] = {"weights": {}, "nodes": []}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        if node.op == "placeholder" and specs[node.name].kind == InputKind.USER_INPUT:
            graph["inputs"] = node.name
        elif node.op == "placeholder":
            graph["weights"][node.name] = _short(str(specs[node.name].target))
        elif node.op == "output":
            graph["output"] = _plain(node.args[0][0])
        elif not str(node.target).startswith(_CHECKS):
            is_torchs = isinstance(node.target, torch._ops.OpOverload)
            name = str(node.target) if is_torchs else getattr(node.target, "__name__", str(node.target))
            if not is_operation(name):  # such as those that draw random numbers
                raise TypeError(f"it has the operation {name}, which {GRAPH} cannot hold: export it to a .pt2 file")
            options = {key: _plain(each) for key, each in node.kwargs.items()}
            graph["nodes"].append([node.name, name, _plain(node.args), options])
    return graph


def _plain(argument: Any) -> Any:
    """An argument of an operation as plain data."""
    if isinstance(argument, Node):
        return {"node": argument.name}
    if isinstance(argument, list | tuple):
        return [_plain(each) for each in argument]
    if isinstance(argument, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(argument).removeprefix("torch.")}
    if isinstance(argument, torch.device):
        return {"device": None}  # that of the inputs
    if argument is None or isinstance(argument, bool | int | float | str):
        return argument
    raise TypeError(f"it has an argument of type {type(argument).__name__}: export it to a .pt2 file")


_LICENCES = (
    "apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0",
    "cc-by-nc-sa-4.0", "cc-by-nc-nd-4.0", "openrail", "apple-ascl", "apple-amlr", "gemma",
)  # fmt: skip
"""Names that hubs know; any other one is an own licence there, with its name in a second entry."""


def _licence_of(origin: Mapping[str, Any] | None) -> dict[str, str]:
    """Entries of a model card's metadata for the licence of the weights that training began with, if it is known."""
    if not origin or origin["licence"] is None:
        return {}
    if origin["licence"] in _LICENCES:
        return {"license": origin["licence"]}
    link = {"license_link": origin["link"]} if origin["link"] else {}
    return {"license": "other", "license_name": origin["licence"], **link}


def metadata_of(about: Mapping[str, Any], name: str, scores: Mapping[str, float]) -> dict[str, Any]:
    """Return a model card's metadata in the form that model hubs read; scores are marked as an oracle's."""
    kind = {"classification": "classification", "regression": "regression"}[about["task"]]
    task = None
    if about["columns"] is not None:
        task = f"tabular-{kind}"
    elif len(about["input_shape"]) == 3 and kind == "classification":
        task = "image-classification"
    metadata: dict[str, Any] = {**_licence_of(about["published_weights"]), "library_name": "fedlit"}
    if task is not None:
        metadata["pipeline_tag"] = task
    metadata["tags"] = ["federated-learning", "domain-adaptation", about["method"]]
    if scores:
        metrics = [
            {"type": name, "value": round(value, 6), "name": f"{name} on labels hidden in training (oracle)"}
            for name, value in scores.items()
        ]
        dataset = {"type": "private", "name": f"{about['target']}, test samples"}
        result = {"task": {"type": task or kind}, "dataset": dataset, "metrics": metrics}
        metadata["model-index"] = [{"name": name, "results": [result]}]
    return metadata
