"""The model of a run that has ended: out of its configuration and its checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedlit.callbacks import RunSummary
from fedlit.callbacks.run_record import SUMMARY
from fedlit.cli.arguments import normalise
from fedlit.cli.lightning_cli import FedlitCLI
from fedlit.data import DomainDataModule
from fedlit.export.target import check_path, export_target
from fedlit.exported import CARD
from fedlit.federation import RosterError
from fedlit.module import FederatedModule
from fedlit.run.checkpoint import check_there, class_path, complete, join, public_path
from fedlit.run.checkpoint_files import files_of, read
from fedlit.run.component import Component


class _StoredCLI(FedlitCLI):
    """Data and module of a stored configuration, without a Trainer, whose devices and libraries may be elsewhere."""

    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        self.config[self.subcommand].pop("trainer")

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def write(run_dir: Path, configs: Sequence[str], ckpt_path: Path | None, output: Path) -> None:
    """Write the target's model of a run's folder, and its model card; ``configs`` of the run are laid over each other.

    Default is the checkpoint that has trained for most rounds.
    """
    try:
        file = check_path(output)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"fedlit: {error}")
    path = newest(run_dir / "checkpoints") if ckpt_path is None else ckpt_path
    if not files_of(path):
        sys.exit(f"fedlit: ckpt_path '{path}' is not a file: give the path of a checkpoint")
    module, data = load(configs, path)
    print(f"checkpoint: {path}, after {module.federation.round_idx} rounds", flush=True)
    try:
        export_target(module, file, data, _scores(run_dir, module.federation.round_idx))
    except TypeError as error:
        sys.exit(f"fedlit: {error}")
    raw = data.raw_inputs()
    sizes = ", ".join(map(str, ("n", *(data.input_shape if raw is None else raw.sample.shape[1:]))))
    print(f"model of target {module.target.name!r}: {file}, from ({sizes}) to (n, {module.num_classes})")
    print(
        f"what it takes and gives: {file}.md" if file.suffix else f"what it takes and gives: {file / CARD}", flush=True
    )


def _scores(run_dir: Path, rounds: int) -> dict[str, float]:
    """Scores on hidden labels that the run's summary has, if it is of so many rounds."""
    try:
        summary = RunSummary.from_json((run_dir / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return {}
    return summary.published_scores() if summary.rounds == rounds else {}


def load(configs: Sequence[str], path: Path) -> tuple[FederatedModule, DomainDataModule]:
    """Build module and data of configurations, which are laid over each other, with the weights of a checkpoint."""
    words = [word for config in configs for word in ("--config", config)]
    stored = _StoredCLI(normalise(["fit", *words]))
    module, data = stored.model, stored.datamodule
    assert isinstance(module, FederatedModule)
    assert isinstance(data, DomainDataModule)
    _load(module, path, data)
    return module, data


def newest(folder: Path) -> Path:
    """Path of the checkpoint that has trained for most rounds."""
    # of several processes each has files of its own, of which only .part may lie here
    checkpoints = [*dict.fromkeys(files_of(path)[0] for path in sorted(folder.glob("*.ckpt*")))]
    if not checkpoints:
        sys.exit(f"fedlit: '{folder}' has no checkpoint: give --ckpt_path, or train with enable_checkpointing true")
    return checkpoints[0] if len(checkpoints) == 1 else max(checkpoints, key=_progress)


def _progress(path: Path) -> tuple[int, int, float]:
    federation = _read(path)["federation"]
    try:
        return int(federation.get("round_idx", 0)), int(federation.get("batch_idx", 0)), path.stat().st_mtime
    except (ValueError, TypeError, OverflowError) as error:
        sys.exit(f"fedlit: '{path}' does not state how many rounds it has trained for: take it away ({error})")


def _read(path: Path) -> dict[str, Any]:
    try:
        checkpoint: object = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # at bytes of another format, of any kind
        sys.exit(f"fedlit: '{path}' cannot be read as a checkpoint: give one that fedlit fit has written ({error})")
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("federation"), dict):
        sys.exit(f"fedlit: '{path}' is no checkpoint of a federation: give one that fedlit fit has written")
    return checkpoint


def _load(module: FederatedModule, path: Path, data: DomainDataModule) -> None:
    """Give a module and its data what a checkpoint has."""
    clients = [client.name for client in module.clients]
    try:
        checkpoint = read(path, _read)
        check_there(checkpoint, [module.target.name])
        module.federation.roster.check(checkpoint["federation"]["roster"])
        if public_path(checkpoint["method"]) != class_path(module.run):
            sys.exit(
                f"fedlit: '{path}' is a checkpoint of {checkpoint['method']}, the run's config.yaml has "
                f"{class_path(module.run)}: give one of the same run"
            )
        states = {name: checkpoint["clients"].get(name, {}) for name in clients}
        if isinstance(data, Component):
            data.load_state(states, checkpoint, resumes=False)
        module.configure_model()
        join(checkpoint, clients)
        complete(module.run, checkpoint, clients)
        module.load_state_dict(checkpoint["state_dict"])
        module.run.outputs.load_state(states, checkpoint, resumes=False)
        module.federation.round_idx = int(checkpoint["federation"]["round_idx"])
    except RosterError as error:
        sys.exit(f"fedlit: {error}")
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        sys.exit(f"fedlit: '{path}' does not fit the run's config.yaml: give a checkpoint of the same run ({error})")
