"""Every file in configs/data is accepted as the command line reads it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from jsonargparse import ArgumentParser
from sklearn.neighbors import NearestCentroid

from fedlit.data import DomainDataModule
from refused import slow
from stand_ins import write_stand_in

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "data").glob("*.yaml"))


def data_of(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text()).get("data", {})


def place(path: Path) -> str | None:
    """Where a configuration reads files; `None` if its data come with fedlit or from another configuration."""
    arguments = data_of(path).get("init_args", {})
    return arguments.get("root") or arguments.get("path")


def comment(path: Path) -> str:
    """What a configuration begins with, in one line."""
    lines = re.match(r"(#.*\n)*", path.read_text())[0].splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines)


FETCHED = [path for path in CONFIGS if place(path)]
EXPERIMENTS = [path for path in sorted((ROOT / "configs" / "experiments").glob("*.yaml")) if place(path)]


def build(config):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(DomainDataModule, "data")
    return parser.instantiate(parser.parse_object(config)).data


def check(config):
    module = build({"data": config["data"]})
    assert module.target == config["data"]["init_args"].get("target", "target")
    assert len(module.clients) >= (2 if config["data"]["init_args"].get("clients") else 3)
    assert module.in_features > 0
    network = config["model"]["init_args"]["extractor"]
    assert network["init_args"].get("in_features", module.in_features) == module.in_features


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_builds_its_data_module(path, tmp_path):
    config = yaml.safe_load(path.read_text())
    config["data"]["init_args"].update(write_stand_in(path.stem, tmp_path))
    check(config)


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if "../shared" in path.read_text()], ids=lambda path: path.stem
)
def test_config_builds_its_data_module_from_the_real_data(path, shared_data, monkeypatch):
    monkeypatch.chdir(ROOT)
    check(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("name", ["office31", "cifar10", *map(slow, ("published_digit_five", "pamap2", "widar3"))])
def test_classes_of_a_stand_in_can_be_learnt_from_the_sources(name, tmp_path):
    """By the nearest mean of a class, as `sklearn` has it, far above chance."""
    small = {"image_size": 16} if name == "office31" else {}
    config = yaml.safe_load((ROOT / "configs" / "data" / f"{name}.yaml").read_text())
    config["data"]["init_args"] |= write_stand_in(name, tmp_path) | small
    module = build({"data": config["data"]})
    sources = [client.name for client in module.clients if not client.is_target][:2]
    samples = {}
    for client in (*sources, module.target):
        dataset = module.all_samples(client)
        x = np.stack([dataset[i][0].flatten().numpy() for i in range(len(dataset))])
        samples[client] = x, module.labels(client).numpy()
    target = samples.pop(module.target)
    x, y = (np.concatenate(each) for each in zip(*samples.values(), strict=True))
    known = np.isin(target[1], y)
    assert NearestCentroid().fit(x, y).score(target[0][known], target[1][known]) > 0.6


@pytest.mark.parametrize("path", FETCHED, ids=lambda path: path.stem)
def test_a_config_of_data_that_users_fetch_says_where_to_get_them(path):
    assert re.search("[Uu]npack|download|have to be fetched|come with the code|is written by", comment(path))
    assert "../shared" not in place(path) or "not shipped" in comment(path)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_on_data_that_users_fetch_names_what_says_where_to_get_them(path):
    named = {ROOT / f"{name}.yaml" for name in re.findall(r"configs/(?:data|experiments)/\w+", comment(path))}
    same = {each for each in FETCHED if place(each) == place(path)}
    assert named & (same or {*FETCHED, *EXPERIMENTS})
    assert all(each.is_file() for each in named)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_checks_the_numbers_of_images_that_the_config_of_its_data_checks(path):
    for each in FETCHED:
        if place(each) == place(path):
            assert data_of(path)["init_args"].get("published") == data_of(each)["init_args"].get("published")


def test_there_is_a_config_for_each_data_set():
    classes = {yaml.safe_load(path.read_text())["data"]["class_path"] for path in CONFIGS}
    assert classes == {
        f"fedlit.data.{name}"
        for name in (
            *(
                "CIFAR10",
                "ColoredMNIST",
                "DigitFive",
                "Digits",
                "FashionMNIST",
                "FeatureDomains",
                "HAPT",
                "HeartDisease",
            ),
            *("ImageDomains", "PAMAP2", "PublishedDigitFive", "Widar3"),
        )
    }


@pytest.mark.parametrize(("given", "kept"), [(1, 1), (1.0, 420), (0.5, 210), (5, 5)])
def test_one_label_and_all_labels_are_told_apart(given, kept):
    module = build({"data": {"class_path": "fedlit.data.Digits", "init_args": {"target_labels": given}}})
    assert module.num_samples(module.target) == kept
