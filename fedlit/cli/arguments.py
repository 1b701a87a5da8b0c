"""What is done to command line arguments before Lightning's parser reads them."""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

LINKED = ("clients", "target", "num_classes", "task")
"""Arguments of the model that come from the data module."""

_KEY_VALUE = re.compile(r"[A-Za-z_][\w.]*=")


def normalise(args: list[str]) -> list[str]:
    """Find installed configurations by name, and accept what W&B agents write."""
    result: list[str] = []
    for arg in args:
        previous = result[-1] if result else ""
        if previous in ("--config", "-c"):
            arg = find_config(arg)
        elif arg.startswith(("--config=", "-c=")):
            key, _, path = arg.partition("=")
            arg = f"{key}={find_config(path)}"
        elif result and _KEY_VALUE.match(arg) and not (previous.startswith("-") and "=" not in previous):
            arg = f"--{arg}"  # wandb's ${args_no_hyphens}
        if arg.endswith("=None") or (arg == "None" and previous.startswith("--")):
            arg = arg.removesuffix("None") + "null"  # wandb writes Python's None
        result.append(arg)
    return result


def find_config(name: str) -> str:
    """A file, or one of the configurations installed with fedlit: ``experiments/digits`` from any directory."""
    if Path(name).exists() or "\n" in name:
        return name
    for candidate in (name.removeprefix("configs/"), f"{name.removeprefix('configs/')}.yaml"):
        installed = files("fedlit.configs").joinpath(candidate)
        if candidate and installed.is_file():
            return str(installed)
    return name


def refuse_linked(args: list[str]) -> None:
    """Refuse model arguments that come from the data: jsonargparse would ignore them without a word."""
    found: list[str] = []
    for previous, arg in zip(["", *args], args, strict=False):
        key, is_assigned, value = arg.partition("=")
        if key in {f"--model.{infix}{name}" for name in LINKED for infix in ("", "init_args.")}:
            found.append(key.removeprefix("--"))
        if not is_assigned:
            key, value = previous, arg
        if key in ("--config", "-c") and Path(value).is_file():
            content = _content(value)
            sections = [content, *(content.get(name) for name in _SUBCOMMANDS)] if isinstance(content, dict) else []
            models = [section.get("model") for section in sections if isinstance(section, dict)]
            found += [f"model.init_args.{name} in {value}" for model in models for name in _linked(model)]
        elif key == "--model":
            found += [f"model.init_args.{name}" for name in _linked(_content(value))]
        elif key == "--model.init_args":
            found += [f"model.init_args.{name}" for name in _linked({"init_args": _content(value)})]
    if found:
        sys.exit(
            f"fedlit: {', '.join(found)}: clients, target, num_classes and task are taken from the data module; give "
            "them there (--data.target, --data.clients)"
        )


_SUBCOMMANDS = ("fit", "validate", "test", "predict")


def _linked(model: object) -> list[str]:
    """Which of `LINKED` the configuration of a model has."""
    given = model.get("init_args") if isinstance(model, dict) else None
    return [name for name in LINKED if name in given] if isinstance(given, dict) else []


def _content(text: str) -> Any:
    """What YAML says, or the file that it names."""
    where = "the command line"
    if "\n" not in text and Path(text).is_file():
        where, text = text, Path(text).read_text()
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        sys.exit(f"fedlit: {where} has what is no YAML, and must be mended: {' '.join(str(error).split())}")
