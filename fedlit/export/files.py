"""What an exported file states of itself: metadata, columns by name in ONNX, and a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlit.data.raw_inputs import RawInputs, RawRows

if TYPE_CHECKING:
    import onnx

_TABLE = "table"


def save_onnx(model: onnx.ModelProto, path: Path, about: Mapping[str, Any], raw: RawInputs | None) -> None:
    """Write an ONNX model with its metadata; of tables, with an input for each column in place of one for all."""
    import onnx

    for key, value in about.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = f"fedlit.{key}", value if isinstance(value, str) else json.dumps(value)
    if isinstance(raw, RawRows):
        _take_columns(model, raw)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def _take_columns(model: onnx.ModelProto, raw: RawRows) -> None:
    """Let a model that takes a table of codes take its columns, and texts of categories."""
    from onnx import TensorProto, helper

    graph = model.graph
    (table,) = graph.input
    inner = table.name
    rows = table.type.tensor_type.shape.dim[0].dim_param
    inputs, nodes, parts = [], [], []
    for number, (name, levels) in enumerate(raw.columns):
        kind = TensorProto.DOUBLE if levels is None else TensorProto.STRING
        inputs.append(helper.make_tensor_value_info(name, kind, [rows, 1]))
        part = f"{_TABLE}_{number}"
        if levels is not None:
            missing = levels.index(raw.missing) if raw.missing in levels else -1
            codes = {level: float(place) for place, level in enumerate(levels)} | {"": float(missing)}
            # where a value is missing, pandas has numbers with decimals, and so have texts that are made of them
            whole = {level: code for level, code in codes.items() if level.removeprefix("-").isdecimal()}
            for sign in {".", raw.reading.get("decimal", ".")}:
                codes |= {f"{level}{sign}0": code for level, code in whole.items()}
            nodes.append(
                helper.make_node(
                    "LabelEncoder", [name], [f"{part}_code"], domain="ai.onnx.ml",
                    keys_strings=[*codes], values_floats=[*codes.values()], default_float=-1.0,
                )
            )  # fmt: skip
            nodes.append(helper.make_node("Cast", [f"{part}_code"], [part], to=TensorProto.DOUBLE))
        else:
            nodes.append(helper.make_node("Identity", [name], [part]))
        parts.append(part)
    nodes.append(helper.make_node("Concat", parts, [inner], axis=1))
    graph.input.remove(table)
    graph.input.extend(inputs)
    for node in reversed(nodes):
        graph.node.insert(0, node)
    if not any(opset.domain == "ai.onnx.ml" for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))


def model_card(about: Mapping[str, Any], path: Path) -> str:
    """What a model is, what it takes and gives, and how to use it, in Markdown.

    Args:
        about: As `export_target` writes it into the file.
        path: Of the file.
    """
    choosing = about["task"] == "classification"
    lines = [
        f"# {path.name}",
        "",
        f"Predicts {_and(about['outputs'])} for {about['target']!r}: trained by {about['method']} of fedlit "
        f"{about['fedlit']} in {about['rounds']} rounds with {_and(about['sources'])}, whose samples stayed with them.",
        "",
        "## Outputs",
        "",
        "`predictions`, shape (n, "
        + f"{len(about['outputs'])}), "
        + ("float32: probabilities of the classes" if choosing else "float64: the numbers, in the unit of the labels")
        + ", in this order",
        "",
        *(f"{place}. {name}" for place, name in enumerate(about["outputs"])),
        "",
        "## Inputs",
        "",
    ]
    if about["columns"] is None:
        lines += [
            f"`inputs`, shape (n, {', '.join(map(str, about['input_shape']))}), {about['inputs']}. {_form(about)}",
            "",
        ]
    else:
        lines += [
            about["in_words"],
            "",
            "| column | what it is |",
            "|---|---|",
            *(
                f"| {_cell(each['name'])} | "
                + ("number; NaN where it is missing" if each["levels"] is None else _levels(each["levels"], about))
                + " |"
                for each in about["columns"]
            ),
            "",
        ]
    lines += ["## Use", "", "```python", *_code(about, path), "```", ""]
    lines += [
        "## Limits",
        "",
        f"It is made for {about['target']!r}, whose samples differ from those of the others. Where its labels were "
        "hidden in training, nothing was chosen by them; how well it does there is known only where somebody has "
        "labels to test it with. "
        + (
            "Probabilities need not be calibrated."
            if about["temperature"] == 1
            else f"Logits are divided by {about['temperature']:.3g}, as samples show that the network is too sure of "
            "itself; how well that fits the target is not known either."
        ),
        "",
    ]
    return "\n".join(lines)


def _form(about: Mapping[str, Any]) -> str:
    if about["in_words"]:
        return str(about["in_words"])
    whose = f"which {about['data']} gives samples" if about["data"] else "which the model was trained"
    return f"In the form in {whose}."


def _levels(levels: list[str], about: Mapping[str, Any]) -> str:
    some = ", ".join(_cell(level) for level in levels if level != about["missing"])
    return f"text, one of: {some}" + ("; empty where it is missing" if about["missing"] in levels else "")


def _code(about: Mapping[str, Any], path: Path) -> list[str]:
    if path.suffix == ".onnx" and about["columns"] is not None:
        texts = {each["name"] for each in about["columns"] if each["levels"] is not None}
        options = ", ".join(f"{name}={value!r}" for name, value in about["reading"].items())
        return [
            "import onnxruntime, pandas",
            "",
            f"options = dict({options})",
            f'table = pandas.read_csv("rows.csv", dtype={dict.fromkeys(sorted(texts), "str")!r}, **options)',
            f'session = onnxruntime.InferenceSession("{path.name}")',
            "rows = {}",
            "for each in session.get_inputs():",
            "    values = table[[each.name]]",
            '    values = values.fillna("").map(str.strip) if "string" in each.type else values.astype(float)',
            "    rows[each.name] = values.to_numpy()",
            "(predictions,) = session.run(None, rows)",
        ]
    if path.suffix == ".onnx":
        return [
            "import onnxruntime",
            "",
            f'session = onnxruntime.InferenceSession("{path.name}")',
            '(predictions,) = session.run(None, {"inputs": inputs})',
        ]
    return [
        "import torch",
        "",
        f'model = torch.export.load("{path.name}").module()',
        "predictions = model(inputs)"
        + ("  # all columns, float64, a category's code in place of its text" if about["columns"] is not None else ""),
    ]


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
