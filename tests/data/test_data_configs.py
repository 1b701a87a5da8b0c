"""Every file in configs/data is accepted as the command line reads it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from stand_ins import DOMAINS, write_images

from fedlit.data import DatasetNotFoundError, DomainDataModule

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "data").glob("*.yaml"))


def build(config):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(DomainDataModule, "data")
    return getattr(parser, "instantiate", parser.instantiate_classes)(parser.parse_object(config)).data


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_builds_its_data_module(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    config = yaml.safe_load(path.read_text())
    if path.stem in DOMAINS:
        write_images(tmp_path, DOMAINS[path.stem])
        config["data"]["init_args"]["root"] = str(tmp_path)
    try:
        module = build({"data": config["data"]})
        clients = module.clients
    except DatasetNotFoundError as error:
        pytest.skip(f"needs data that are not here: {error}")
    assert module.target == config["data"]["init_args"].get("target", "target")
    assert len(clients) >= 3
    assert module.in_features > 0
    network = config["model"]["init_args"]["extractor"]
    assert network["init_args"].get("in_features", module.in_features) == module.in_features


def test_there_is_a_config_for_each_data_set():
    classes = {yaml.safe_load(path.read_text())["data"]["class_path"] for path in CONFIGS}
    assert classes == {
        f"fedlit.data.{name}"
        for name in (
            *("ColoredMNIST", "DigitFive", "Digits", "FashionMNIST", "FeatureDomains", "HeartDisease"),
            "ImageDomains",
        )
    }


@pytest.mark.parametrize(("given", "kept"), [(1, 1), (1.0, 420), (0.5, 210), (5, 5)])
def test_one_label_and_all_labels_are_told_apart(given, kept):
    module = build({"data": {"class_path": "fedlit.data.Digits", "init_args": {"target_labels": given}}})
    assert next(client for client in module.clients if client.is_target).num_samples == kept


def test_a_misspelt_key_is_refused_by_name():
    with pytest.raises(Exception, match="'targt' is not accepted"):
        build({"data": {"class_path": "fedlit.data.Digits", "init_args": {"targt": "clean"}}})
