"""What is done to command line arguments before Lightning's parser reads them."""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from pathlib import Path

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
    found = []
    paths = []
    for previous, arg in zip(["", *args], args, strict=False):
        key = arg.split("=")[0]
        if key in {f"--model.{infix}{name}" for name in LINKED for infix in ("", "init_args.")}:
            found.append(key.removeprefix("--"))
        if previous in ("--config", "-c"):
            paths.append(arg)
        elif key in ("--config", "-c") and "=" in arg:
            paths.append(arg.partition("=")[2])
    for path in paths:
        if Path(path).is_file():
            content = yaml.safe_load(Path(path).read_text())
            model = content.get("model") if isinstance(content, dict) else None
            given = model.get("init_args") if isinstance(model, dict) else None
            if isinstance(given, dict):
                found += [f"model.init_args.{name} in {path}" for name in LINKED if name in given]
    if found:
        sys.exit(
            f"fedlit: {', '.join(found)}: clients, target, num_classes and task are taken from the data module; give "
            "them there (--data.target, --data.clients)"
        )
