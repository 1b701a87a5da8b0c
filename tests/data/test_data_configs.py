"""Every file in configs/data is accepted as the command line reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from fedlit.data import DomainDataModule
from stand_ins import write_stand_in

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "data").glob("*.yaml"))


def build(config):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(DomainDataModule, "data")
    return getattr(parser, "instantiate", parser.instantiate_classes)(parser.parse_object(config)).data


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
