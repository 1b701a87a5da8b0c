"""Descriptions in and beside an exported file: metadata, columns by name in ONNX, and a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlit.data.raw_inputs import RawInputs, RawRows

if TYPE_CHECKING:
    import onnx

_TABLE = "table"


def save_onnx(model: onnx.ModelProto, path: Path, about: Mapping[str, Any], raw: RawInputs | None) -> None:
    """Write an ONNX model with its metadata; a model of tables gets an input for each column."""
    import onnx

    for key, value in about.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = f"fedlit.{key}", value if isinstance(value, str) else json.dumps(value)
    if isinstance(raw, RawRows):
        _take_columns(model, raw)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def _take_columns(model: onnx.ModelProto, raw: RawRows) -> None:
    """Replace a model's input, a table of codes, by an input for each column, with texts for categories."""
    from onnx import TensorProto, helper

    graph = model.graph
    (table,) = graph.input
    rows = table.type.tensor_type.shape.dim[0].dim_param
    inputs, nodes, parts = [], [], []
    for number, (name, levels) in enumerate(raw.columns):
        column_type = TensorProto.DOUBLE if levels is None else TensorProto.STRING
        inputs.append(helper.make_tensor_value_info(name, column_type, [rows, 1]))
        parts.append(f"{_TABLE}_{number}")
        if levels is None:
            nodes.append(helper.make_node("Identity", [name], [parts[-1]]))
            continue
        codes = codes_of(levels, raw)
        nodes.append(
            helper.make_node(
                "LabelEncoder", [name], [f"{parts[-1]}_code"], domain="ai.onnx.ml",
                keys_strings=[*codes], values_floats=[*codes.values()], default_float=-1.0,
            )
        )  # fmt: skip
        nodes.append(helper.make_node("Cast", [f"{parts[-1]}_code"], [parts[-1]], to=TensorProto.DOUBLE))
    nodes.append(helper.make_node("Concat", parts, [table.name], axis=1))
    graph.input.remove(table)
    graph.input.extend(inputs)
    for node in reversed(nodes):
        graph.node.insert(0, node)
    if not any(opset.domain == "ai.onnx.ml" for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))


def codes_of(levels: Sequence[str], raw: RawRows) -> dict[str, float]:
    """Codes of a category's texts, of which the empty one is missing."""
    codes = {level: float(index) for index, level in enumerate(levels)}
    codes[""] = codes.get(raw.missing, -1.0)
    # where a value is missing, pandas reads whole numbers as decimals, and so their texts have a zero
    whole = {level: code for level, code in codes.items() if level.removeprefix("-").isdecimal()}
    for point in {".", raw.reading.get("decimal", ".")}:
        codes |= {f"{level}{point}0": code for level, code in whole.items()}
    return codes


def model_card(about: Mapping[str, Any], path: Path) -> str:
    """Describe a model, its inputs and outputs, and how to use it, in Markdown.

    Args:
        about: As `export_target` writes it into the file.
        path: Of the file.
    """
    outputs = "\n".join(f"{index}. {name}" for index, name in enumerate(about["outputs"]))
    number_type = "float64: the numbers, in the unit of the labels"
    if about["task"] == "classification":
        number_type = "float32: probabilities of the classes"
    calibration = "Probabilities need not be calibrated."
    if about["temperature"] != 1:
        calibration = (
            f"Logits are divided by {about['temperature']:.3g}, as samples show that the network is too sure of "
            "itself; how well that fits the target is not known either."
        )
    intervals = ""
    if about["intervals"] is not None:
        pairs = zip(about["outputs"], about["intervals"]["radius"], strict=True)
        intervals = f"""
Intervals: {_and([f"{name} ± {radius:.6g}" for name, radius in pairs])}. \
{about["intervals"]["promise"].capitalize()}.
"""
    rounds = f"{about['rounds']} round{'' if about['rounds'] == 1 else 's'}"
    return f"""# {path.resolve().name}

Predicts {_and(about["outputs"])} for {about["target"]!r}: trained by {about["method"]} of fedlit \
{about["fedlit"]} in {rounds} with {_and(about["sources"])}, whose samples stayed with them.

## Outputs

`predictions`, shape (n, {len(about["outputs"])}), {number_type}, in this order

{outputs}
{intervals}
## Inputs

{_inputs(about)}

## Use

```python
{_code(about, path)}
```

## Limits

It is made for {about["target"]!r}, whose samples differ from those of the others. Where its labels were \
hidden in training, nothing was chosen by them; how well it does there is known only where somebody has \
labels to test it with. {calibration}

## Weights

{_weights(about)}
"""


def _weights(about: Mapping[str, Any]) -> str:
    """What training began with, and its licence."""
    origin = about["published_weights"]
    if origin == {}:
        return "Training began with random weights."
    if origin is None:
        return "Licence of the weights: unknown, as the network does not say whether training began with others."
    licence = " ".join([origin["licence"] or "unknown", *([f"({origin['link']})"] if origin["link"] else [])])
    return f"Training began with {origin['source']}. Licence of the weights: {licence}. {origin['note']}".rstrip()


def _inputs(about: Mapping[str, Any]) -> str:
    if about["columns"] is not None:
        rows = [f"| {_cell(each['name'])} | {_values(each['levels'], about)} |" for each in about["columns"]]
        return "\n".join([about["in_words"], "", "| column | what it is |", "|---|---|", *rows])
    form = about["in_words"]
    if not form:
        whose = f"which {about['data']} gives samples" if about["data"] else "which the model was trained"
        form = f"In the form in {whose}."
    return f"`inputs`, shape (n, {', '.join(map(str, about['input_shape']))}), {about['inputs']}. {form}"


def _values(levels: Sequence[str] | None, about: Mapping[str, Any]) -> str:
    if levels is None:
        return "number; NaN where it is missing"
    some = ", ".join(_cell(level) for level in levels if level != about["missing"])
    return f"text, one of: {some}" + ("; empty where it is missing" if about["missing"] in levels else "")


def _code(about: Mapping[str, Any], path: Path) -> str:
    """Python that predicts with the file."""
    if not path.suffix:
        reading = "import fedlit\n"
        if about["columns"] is not None:
            reading = f"import pandas\n\nimport fedlit\n\nsamples = {_read_csv(about)}"
        gives = "names of classes" if about["task"] == "classification" else "numbers, shape (n, C)"
        return f"""{reading}
model = fedlit.load("{path.name}")
{gives.split()[0]} = model.predict(samples)  # {gives}
predictions = model(model.preprocess(samples))"""
    if path.suffix == ".onnx" and about["columns"] is not None:
        return f"""import onnxruntime, pandas

table = {_read_csv(about)}
session = onnxruntime.InferenceSession("{path.name}")
rows = {{}}
for each in session.get_inputs():
    values = table[[each.name]]
    values = values.fillna("").map(str.strip) if "string" in each.type else values.astype(float)
    rows[each.name] = values.to_numpy()
(predictions,) = session.run(None, rows)"""
    if path.suffix == ".onnx":
        return f"""import onnxruntime

session = onnxruntime.InferenceSession("{path.name}")
(predictions,) = session.run(None, {{"inputs": inputs}})"""
    codes = "  # all columns, float64, a category's code in place of its text" if about["columns"] is not None else ""
    return f"""import torch

model = torch.export.load("{path.name}").module()
predictions = model(inputs){codes}"""


def _read_csv(about: Mapping[str, Any]) -> str:
    """A call of pandas that reads such a table, with categories as texts."""
    texts = {each["name"] for each in about["columns"] if each["levels"] is not None}
    options = "".join(f", {name}={value!r}" for name, value in about["reading"].items())
    return f'pandas.read_csv("rows.csv", dtype={dict.fromkeys(sorted(texts), "str")!r}{options})'


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
