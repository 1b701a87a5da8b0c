"""The target's model by itself: as a plain network, and in files that are read without fedlit."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from fedlit.data import DomainDataModule
from fedlit.data.raw_inputs import RawInputs, RawRows
from fedlit.export.files import model_card, save_onnx
from fedlit.export.folder import save_folder
from fedlit.exported import CONFIG
from fedlit.models import Adapters, Backbone, Bottleneck, ResNet
from fedlit.module import FederatedModule
from fedlit.run.tasks import Classification, Task, Unscored

if TYPE_CHECKING:
    import onnx

_HOOKS = ("finish", "transform", "make_dataset")
"""Methods of a data module that change samples after they are loaded."""

_MAX_SAMPLES = 32
"""Samples of the target that are compared."""

SUFFIXES = (".pt2", ".onnx", "")
"""Of the files that can be written, and of a folder with safetensors."""


def raw_inputs_of(data: DomainDataModule) -> RawInputs | None:
    """Return the raw inputs that a data module states, or ``None`` if models take samples as they were loaded.

    What it states is compared with how it prepares samples of the target, or random ones.

    Raises:
        TypeError: If samples are prepared in another way, or in any without ``raw_inputs``.
    """
    _ = data.input_shape  # an error where samples have several tensors, which are not compared
    raw, loaded = data.raw_inputs(), data.load(data.target).x
    finished = data._domain(data.target).x
    form = None if raw is None else (raw.sample.shape[1:], raw.sample.dtype)
    if isinstance(loaded, Tensor) and form in (None, (loaded.shape[1:], loaded.dtype)):
        indices = torch.linspace(0, len(loaded) - 1, min(len(loaded), _MAX_SAMPLES)).round().long()
        prepared, x = _prepared(data, indices), loaded[indices]
        expected = x if raw is None else raw.network(x)
        # another number of values is an error of the caller's, which the model raises
        same = expected.numel() != prepared.numel() or _close(expected, prepared)
        hooks = ["transform"] if _close(x, finished[indices]) else ["finish"]
    elif raw is None:
        same, hooks = bool(loaded is finished or loaded == finished), ["finish"]
    else:
        hooks = _hooks_below(type(data), "raw_inputs")
        same = not hooks or (hooks == ["transform"] and _transform_equals(data, raw))
    if same:
        return raw
    missing = "which raw_inputs() does not state" if raw is None else "and raw_inputs() in another way"
    raise TypeError(
        f"{type(data).__name__} prepares samples in {' and '.join(hooks)}(), {missing}, so that an exported model "
        "would predict wrongly on raw ones: override raw_inputs() to return a RawInputs whose network prepares samples "
        "so, or export a model of prepared samples by their shape: export_target(module, path, data.input_shape)"
    )


def _prepared(data: DomainDataModule, indices: Tensor) -> Tensor:
    """Samples of the target as a model receives them in evaluation."""
    dataset: Any = data.all_samples(data.target)
    if hasattr(dataset, "batch"):
        x: Tensor = dataset.batch(indices)[0]
        return x
    return torch.stack([torch.as_tensor(dataset[index][0]) for index in indices.tolist()])


def _close(x: Tensor, y: Tensor) -> bool:
    """Compare two tensors of any shape and type up to rounding."""
    x, y = x.flatten().double(), y.flatten().double()
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True)


def _hooks_below(data_type: type[DomainDataModule], method: str) -> list[str]:
    """Hooks that subclasses override of the class that has a method."""
    order = list(data_type.__mro__)
    owner = next(index for index, each in enumerate(order) if method in vars(each))
    return [hook for hook in _HOOKS if any(hook in vars(each) for each in order[:owner])]


def _transform_equals(data: DomainDataModule, raw: RawInputs) -> bool:
    """Compare the transform of evaluation with the network, on random raw samples."""
    transform = data.transform(training=False)
    x = _random(4, raw.sample)
    return transform is not None and _close(transform(x), raw.network(x))


def _random(number: int, sample: Tensor) -> Tensor:
    """Random samples of a shape and type."""
    x = torch.rand(number, *sample.shape[1:], generator=torch.Generator().manual_seed(0))
    return (x if sample.is_floating_point() else 256 * x).to(sample.dtype)


class TargetModel(nn.Module):
    """A network with the predictions that follow from its outputs.

    Args:
        network: From inputs of shape (n, ...) to outputs of shape (n, C).
        task: The task of the outputs.
        temperature: Divisor of logits, positive.
        client: Name of the client in whose unit of labels numbers are; ``None`` leaves them as they are.
    """

    def __init__(self, network: nn.Module, task: Task, temperature: float = 1.0, client: str | None = None) -> None:
        super().__init__()
        self.network = network
        self.task = task
        self.temperature = temperature
        self.client = client

    def forward(self, inputs: Tensor) -> Tensor:
        """Class probabilities of inputs, or in regression numbers in the labels' unit, shape (n, C)."""
        outputs = self.network(inputs)
        if self.client is not None:
            outputs = self.task.in_unit(self.client, outputs)
        return self.task.predictions(outputs, self.temperature)


def target_model(module: FederatedModule) -> TargetModel:
    """Return the target's predictor as one network, with vote, ensemble, neighbours or mixture if it has them.

    It is a copy, for evaluation, on the CPU and in float32, which predicts as ``trainer.predict`` does for the target.

    Args:
        module: Trained, or with the weights of a checkpoint, in the process that hosts the target.

    Returns:
        A network from inputs of shape (n, ...), as the data module gives them, to class probabilities of shape (n, C),
        or in regression to numbers.

    Raises:
        RuntimeError: If this process has no network of the target.
        TypeError: If the method predicts in another way than by its clients' networks.
    """
    name = module.target.name
    if type(module).predict_step is not FederatedModule.predict_step:
        raise TypeError(
            f"{type(module).__name__} has a predict_step of its own, of which the target's network knows nothing: let "
            "build_replica give clients a network that predicts by itself"
        )
    if name not in module.replicas:
        raise RuntimeError(
            f"there is no network of target {name!r} in this process: train the module or load a checkpoint first, and "
            "where clients are spread over processes, ask the one that hosts the target"
        )
    # hooks of a Trainer's predictions, such as fitting classifiers
    module.on_predict_start()
    module.run.prepare_predictions()
    network = copy.deepcopy(module.replicas[name])
    # Flags in its state choose the branches of forward, and no graph could branch on tensors. As arrays they are
    # constants, with the same truth, any() and tolist().
    for flag, value in list(network.named_buffers(recurse=False)):
        if value.dtype == torch.bool:
            delattr(network, flag)
            setattr(network, flag, value.cpu().numpy())
    return (
        TargetModel(network, copy.deepcopy(module.task), module.run.outputs.temperature, name)
        .to("cpu", torch.float32)
        .eval()
        .requires_grad_(False)
    )


def export_target(
    module: FederatedModule,
    path: str | Path,
    data: DomainDataModule | Sequence[int],
    scores: Mapping[str, float] | None = None,
) -> None:
    """Write the target's model to a file that needs no fedlit, or to a folder that `fedlit.load` reads.

    ``NAME.pt2`` is read by ``torch.export.load(path).module()``, ``NAME.onnx`` by any ONNX runtime, and a folder
    ``NAME`` by `fedlit.load`: it has the weights as safetensors. All take inputs
    of shape (n, *input_shape) in float32, for any n, and give what `target_model` gives. The file has the weights that
    take part in predictions alone; those of `KNNPer` include the target's labelled samples, as embeddings.

    Of a data module with ``raw_inputs`` the file takes samples before they are normalised, and normalises them by
    itself: of `ImageDomains` bytes of pixels, uint8, of `FeatureDomains` features as in its files, of `SignalDomains`
    windows in the units of the recordings, and of `CSVDomains` and `HeartDisease` rows of a table. For those
    ``NAME.onnx`` has an input of shape (n, 1) for each column, float64 for numbers, NaN where one is missing, and texts
    for categories, empty where one is; ``NAME.pt2`` takes all columns as (n, columns), float64, with a category's code
    in place of its text.

    The file describes its inputs and outputs, the method and the version of fedlit: as ``fedlit.json`` of
    ``torch.export.load(path, extra_files={"fedlit.json": ""})``, and as ``metadata_props`` of ONNX. A model card in
    Markdown, at the same path with ``.md`` appended, has the same for people.

    Args:
        module: As for `target_model`.
        path: Of the file; its suffix sets the format.
        data: The data module; or the shape of one sample alone.
        scores: On hidden labels of the target's test samples, by name, for the metadata of a folder's model card.

    Raises:
        ValueError: If the suffix is another one.
        FileNotFoundError: If the folder is not there.
        ImportError: If libraries for ONNX are missing.
        TypeError: If the method or the network cannot be exported, such as one that predicts otherwise for one sample
            than for several, or the data module prepares samples in a way that its ``raw_inputs`` does not state.
        RuntimeError: If this process has no network of the target.
    """
    path, method = check_path(path), type(module).__name__
    if isinstance(module.task, Unscored):
        raise TypeError(
            f"the outputs of {method} have any form (num_classes=None), which a file would have to state: export the "
            "network that target_model() gives by torch.export or torch.onnx"
        )
    model: nn.Module = target_model(module)
    raw = raw_inputs_of(data) if isinstance(data, DomainDataModule) else None
    about = _about(module, data, raw)
    shape = tuple(about["input_shape"])
    sample = torch.zeros(2, *shape)  # torch would take a batch of 0 or 1 for a constant
    if raw is not None:
        model, sample = nn.Sequential(raw.network, model).eval(), torch.cat([raw.sample, raw.sample])
    try:
        program = torch.export.export(model, (sample,), dynamic_shapes=({0: Dim("batch")},), strict=False)
    except Exception as error:  # of any type: the tracer's, or the network's
        raise TypeError(
            f"the target's network of {method} cannot be traced for inputs of shape (n, *{shape}): "
            f"{_first_line(error)}. Its forward must take any n and not branch on values of tensors; target_model() "
            "gives the network as it is"
        ) from error
    _check_one_sample(program, model, sample, method)
    _strip(program)
    if not path.suffix:
        try:
            save_folder(program, path, about, raw, scores or {})
        except TypeError as error:
            raise TypeError(f"the target's network of {method} cannot be written: {error}") from error
        return
    if path.suffix == ".pt2":
        torch.export.save(program, path, extra_files={"fedlit.json": json.dumps(about, indent=2)})
    else:
        save_onnx(_as_onnx(program, method), path, about, raw)
    path.with_name(f"{path.name}.md").write_text(model_card(about, path), encoding="utf-8")


def _check_one_sample(program: ExportedProgram, model: nn.Module, sample: Tensor, method: str) -> None:
    """Compare a program with its model on one sample: torch traces branches of two, and guards against no other n."""
    one, found = _random(1, sample), []
    for network in (model, program.module()):
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # of networks that draw random numbers
                found.append(network(one))
        except Exception as error:  # of any type: the network's
            problem = f"fails on a batch of one sample: {_first_line(error)}"
            break
    else:
        if _close(*found):
            return
        problem = "predicts otherwise for a batch of one sample, and a file has the operations of several alone"
    raise TypeError(
        f"the target's network of {method} {problem}. Its forward must take any n in the same way: use squeeze(dim) "
        "for squeeze(), and no branch on x.shape[0] == 1; target_model() gives the network as it is"
    )


def _as_onnx(program: ExportedProgram, method: str) -> onnx.ModelProto:
    lacking = torch.ops.aten.cdist.default  # the one operation of fedlit's networks that ONNX does not have
    if any(node.target == lacking for node in program.graph.nodes):
        program = program.run_decompositions({lacking: _distances})
    try:
        written = torch.onnx.export(
            program,
            input_names=["inputs"],
            output_names=["predictions"],
            dynamic_shapes=({0: "batch"},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        assert written is not None
        return written.model_proto
    except torch.onnx.OnnxExporterError as error:
        raise TypeError(
            f"the target's network of {method} cannot be written as ONNX: {_first_line(error.__cause__ or error)}. "
            "Export it to a .pt2 file, which takes all operations of torch"
        ) from error


def _about(module: FederatedModule, data: DomainDataModule | Sequence[int], raw: RawInputs | None) -> dict[str, Any]:
    """Inputs, outputs and origin of a model, in plain data."""
    if isinstance(data, DomainDataModule):
        names, shape, data_name = [*map(str, data.classes)], data.input_shape, type(data).__name__
    else:
        names, shape, data_name = [*map(str, range(module.num_classes))], tuple(data), None
    intervals = module.run.outputs.intervals
    rows, columns = raw if isinstance(raw, RawRows) else None, None
    if rows is not None:
        columns = [{"name": name, "levels": None if levels is None else [*levels]} for name, levels in rows.columns]
    return {
        "method": type(module).__name__,
        "fedlit": version("fedlit"),
        "task": "classification" if isinstance(module.task, Classification) else "regression",
        "outputs": names,
        "input_shape": [*(shape if raw is None else raw.sample.shape[1:])],
        "columns": columns,
        "missing": None if rows is None else rows.missing,
        "reading": None if rows is None else {**rows.reading},
        "inputs": "float32" if raw is None else str(raw.sample.dtype).removeprefix("torch."),
        "in_words": None if raw is None else raw.words,
        "target": module.target.name,
        "sources": [client.name for client in module.sources],
        "rounds": module.federation.round_idx,
        "temperature": module.run.outputs.temperature,
        "intervals": None if intervals is None else {**intervals.state(), "promise": intervals.promise},
        "data": data_name,
        "published_weights": published_weights(module.originals[0]),
    }


def published_weights(network: nn.Module) -> dict[str, Any] | None:
    """Return the `Origin` of an extractor's published weights as plain data, empty of random weights.

    Of a network that is not fedlit's, what is known is its class: ``None``.
    """
    while isinstance(network, Adapters | Bottleneck):
        network = network.network if isinstance(network, Adapters) else network.extractor
    if isinstance(network, Backbone | ResNet):
        return {} if network.origin is None else asdict(network.origin)
    return {} if type(network).__module__.startswith("fedlit.") else None


def check_path(path: str | Path) -> Path:
    """Raise now, rather than after training, if a file cannot be written; with the errors of `export_target`."""
    path = Path(path).expanduser()
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"output must end in .pt2 or .onnx, or have no ending, which is a folder with safetensors: got '{path}'"
        )
    taken = path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / CONFIG).is_file())
    if taken and not path.suffix:
        raise ValueError(f"output '{path}' must be a new folder, or an empty one, or that of an earlier export")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"output '{path}' is to be in the folder '{path.parent}', which is not there: make it")
    if path.suffix == ".onnx":
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise ImportError("writing ONNX files needs: pip install 'fedlit[onnx]'") from error
    return path


def _strip(program: ExportedProgram) -> None:
    """Remove tensors that predictions do not use, such as received messages, and names of source files."""
    inputs = program.graph_signature.input_specs
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for placeholder, spec in zip(placeholders, list(inputs), strict=True):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and not placeholder.users:
            program.graph.erase_node(placeholder)
            inputs.remove(spec)
            (program.state_dict if spec.target in program.state_dict else program.constants).pop(spec.target)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    program.graph_module.recompile()


def _distances(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """`torch.cdist` in elementary operations."""
    distances: Tensor = torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, dim=-1)
    return distances


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
