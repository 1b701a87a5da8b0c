"""The target's model in a folder: weights as safetensors, the graph without them, a configuration and a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from fedlit.data.raw_inputs import RawInputs, RawRows
from fedlit.export.files import codes_of, model_card
from fedlit.exported import CARD, CONFIG, FORMAT, FORWARD, WEIGHTS, described


class _WithoutWeights(nn.Module):
    """A graph whose weights are arguments."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        self._graph = [program.graph_module]  # not as a part
        self._weights = _weights_of(program)

    def forward(self, weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
        outputs: Tensor = self._graph[0](*(inputs if name is None else weights[name] for name in self._weights))[0]
        return outputs


def _weights_of(program: ExportedProgram) -> list[str | None]:
    """Names of a graph's arguments; ``None`` stands for the inputs."""
    specs = program.graph_signature.input_specs
    return [None if spec.kind == InputKind.USER_INPUT else _short(str(spec.target)) for spec in specs]


def _short(name: str) -> str:
    """A weight's name as that in the target's network, or below ``preprocess``."""
    return f"preprocess.{name[2:]}" if name.startswith("0.") else name.removeprefix("1.").removeprefix("network.")


def save_folder(
    program: ExportedProgram,
    sample: Tensor,
    folder: Path,
    about: Mapping[str, Any],
    raw: RawInputs | None,
    scores: Mapping[str, float],
) -> None:
    """Write a model to a folder, from which `fedlit.load` reads it.

    Args:
        program: From inputs of shape (n, ...) to predictions, without weights that it does not read.
        sample: Two inputs.
        folder: Made if need be.
        about: As `export_target` writes it into files.
        raw: What inputs are; with a table, codes of its texts are written.
        scores: For the metadata of the model card, by name.
    """
    from safetensors.torch import save_file

    tensors = {_short(name): each.detach() for name, each in {**program.state_dict, **program.constants}.items()}
    weights = {name: tensors[name] for name in _weights_of(program) if name is not None}
    shapes: tuple[Any, ...] = (dict.fromkeys(weights), {0: Dim("batch")})
    graph = torch.export.export(_WithoutWeights(program), ({**weights}, sample), dynamic_shapes=shapes, strict=False)
    forget_files(graph)
    columns = about["columns"]
    if isinstance(raw, RawRows):
        levels = dict(raw.columns)
        columns = [
            {**each, "codes": None if levels[each["name"]] is None else codes_of(levels[each["name"]] or (), raw)}
            for each in columns
        ]
    config = {**about, "columns": columns, "format": FORMAT, "weights": described(weights)}
    folder.mkdir(exist_ok=True)
    torch.export.save(graph, folder / FORWARD)
    save_file({name: each.contiguous().clone() for name, each in weights.items()}, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    metadata = yaml.safe_dump(metadata_of(about, folder.name, scores), sort_keys=False)
    (folder / CARD).write_text(f"---\n{metadata}---\n\n{model_card(about, folder)}", encoding="utf-8")


def metadata_of(about: Mapping[str, Any], name: str, scores: Mapping[str, float]) -> dict[str, Any]:
    """A model card's metadata, as hubs of models read it; scores are said to be an oracle's."""
    kind = {"classification": "classification", "regression": "regression"}[about["task"]]
    task = None
    if about["columns"] is not None:
        task = f"tabular-{kind}"
    elif len(about["input_shape"]) == 3 and kind == "classification":
        task = "image-classification"
    metadata: dict[str, Any] = {"library_name": "fedlit"}
    if task is not None:
        metadata["pipeline_tag"] = task
    metadata["tags"] = ["federated-learning", "domain-adaptation", about["method"]]
    if scores:
        metrics = [
            {"type": name, "value": round(value, 6), "name": f"{name}, an oracle's: on hidden labels of the target"}
            for name, value in scores.items()
        ]
        dataset = {"type": "private", "name": f"{about['target']}, test samples"}
        result = {"task": {"type": task or kind}, "dataset": dataset, "metrics": metrics}
        metadata["model-index"] = [{"name": name, "results": [result]}]
    return metadata


def forget_files(program: ExportedProgram) -> None:
    """Remove the names of this machine's files from a graph."""
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    program.graph_module.recompile()
