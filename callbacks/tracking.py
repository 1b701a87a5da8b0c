"""What trackers (W&B, MLflow, TensorBoard) get of a run beside its metrics: parameters, tags and files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from fedlit.callbacks.run_summary import RunSummary
from fedlit.callbacks.shared import federated, is_dry
from fedlit.callbacks.summary import closing_table
from fedlit.configs import flat
from fedlit.module import FederatedModule
from fedlit.privacy import Plain

_ANSWERS_WITHIN = 10.0
"""Seconds for a tracking server, when a run begins."""

SETTINGS = ("config.yaml", "settings.yaml")
"""Files of a run's settings: of the command, and of a script."""

_PER_SAMPLE = ("predictions.csv", "embeddings.csv")
"""Files with a row for each sample."""

_SENT = (".csv", ".json", ".yaml", ".md", ".html", ".png", ".onnx", ".pt2")
"""Suffixes of files that a run leaves to be looked at, or used."""


# ---------------------------------------------------------------- parameters and tags


def public(config: Mapping[str, Any], hides: bool) -> dict[str, Any]:
    """What of a configuration leaves the machine: no settings of loggers, which may have keys of services.

    Where several processes ``hide`` messages from each other, paths are names of files, and the ``seat`` is left out.
    """
    if hides:
        config = {key: without_folders(value) for key, value in config.items() if key != "seat"}
    trainer = config.get("trainer")
    kept = {key: value for key, value in trainer.items() if key != "logger"} if isinstance(trainer, dict) else trainer
    return {key: kept if key == "trainer" else value for key, value in config.items()}


def without_folders(value: Any) -> Any:
    """A configuration's value with the last part of each path in it."""
    if isinstance(value, dict):
        return {key: without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_folders(each) for each in value]
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1] if isinstance(value, str) else value


def hides_from_others(module: FederatedModule) -> bool:
    """Whether several processes hide messages from each other."""
    return module.federation.hides and module.federation.transport.world_size > 1


def parameters_of(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """A configuration with a key for each value: ``model`` is the name of its class, ``model.lr`` an argument of it.

    Lists become texts, and nulls are left out.
    """
    parameters: dict[str, bool | int | float | str] = {}
    for key, value in flat(config).items():
        parts = [part for part in key.split(".") if part not in ("init_args", "dict_kwargs")]
        if parts[-1] == "class_path":
            parts, value = parts[:-1], str(value).rpartition(".")[2]
        if isinstance(value, list | dict):
            value = ", ".join(map(str, value))
        if value is not None:
            parameters[".".join(parts)] = value if isinstance(value, bool | int | float | str) else str(value)
    return parameters


def tags_of(method: str, target: str, seed: int, backends: Iterable[str]) -> dict[str, str]:
    """What a list of runs is filtered by."""
    tags = {"method": method, "target": target, "seed": str(seed)}
    tags["backend"] = ", ".join(sorted({*backends})) or Plain.__name__
    revision = _git_revision()
    return {**tags, "fedlit": version("fedlit"), **({} if revision is None else {"git": revision})}


def tags_at_start(trainer: Trainer, module: FederatedModule, method: str | None) -> dict[str, str]:
    """The tags of a run that begins; without a method's name in tables it is that of its class."""
    privacy = getattr(trainer.strategy, "privacy", None)
    backends = [] if privacy is None else privacy.values() if isinstance(privacy, Mapping) else [privacy]
    names = [type(each).__name__ for each in backends]
    return tags_of(method or type(module).__name__, module.target.name, module.federation.seed, names)


def tags_at_end(summary: RunSummary) -> dict[str, str]:
    """The tags of a run that has ended."""
    backends = [each.backend for each in summary.backends.values()]
    return tags_of(summary.method, summary.target, summary.seed, backends)


def _git_revision() -> str | None:
    """Of the working directory's repository, with ``-dirty`` where tracked files differ from it."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        described = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None


def log_settings(loggers: Iterable[Logger], config: Mapping[str, Any], tags: Mapping[str, str]) -> None:
    """Log parameters and tags to all loggers but those of CSV files; trackers without tags get them as parameters."""
    parameters = parameters_of(config)
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            continue
        if isinstance(logger, MLFlowLogger):
            logger.log_hyperparams({re.sub(r"[^\w./: -]", "_", key): value for key, value in parameters.items()})
        else:
            logger.log_hyperparams({**parameters, **{f"tags.{key}": value for key, value in tags.items()}})
        log_tags(logger, tags)


@rank_zero_only
def log_tags(logger: Logger, tags: Mapping[str, str]) -> None:
    """Set tags of a run in MLflow and W&B."""
    if isinstance(logger, MLFlowLogger):
        if isinstance(logger, MLflow) and logger._run_name is None:
            tags = {**tags, "mlflow.runName": f"{tags['method']}, {tags['target']}, seed {tags['seed']}"}
        tags = {**tags, "mlflow.source.name": "fedlit"}  # without the folder of the command
        with _tolerated(logger):
            for key, value in tags.items():
                logger.experiment.set_tag(logger.run_id, key, value)
    elif isinstance(logger, WandbLogger):
        texts = [f"{key}:{value}"[:64] for key, value in tags.items()]  # W&B takes no longer ones
        logger.experiment.tags = tuple(dict.fromkeys([*(logger.experiment.tags or ()), *texts]))


# ---------------------------------------------------------------- files


@rank_zero_only
def send_files(loggers: Iterable[Logger], folder: Path, hides: bool, per_sample: bool = True) -> None:
    """Send what a run has left in its folder, the closing table and a report to W&B and MLflow; the table to others.

    Checkpoints stay where they are, and without ``per_sample`` files with a row for each sample. Settings are `public`.
    """
    from fedlit.callbacks.report import read_runs, write_report  # needs this package

    takers = [logger for logger in loggers if isinstance(logger, MLFlowLogger | WandbLogger | TensorBoardLogger)]
    if not takers:
        return
    (run,) = read_runs([folder])
    config = {name: public(settings_in(folder / name), hides) for name in SETTINGS if (folder / name).is_file()}
    run = replace(run, config=flat(next(iter(config.values()), {})), embeddings=run.embeddings if per_sample else ())
    table = "" if run.summary is None else closing_table([run.summary]).markdown()
    with tempfile.TemporaryDirectory() as made:
        report, *_ = write_report([run], Path(made, "report.html"))
        files = {path.name: path for path in sorted(folder.iterdir()) if _is_sent(path, per_sample)}
        files["report.html"] = report
        texts = {name: yaml.safe_dump(each, sort_keys=False) for name, each in config.items()}
        for name, text in {**texts, "table.md": f"{table}\n"}.items():
            files[name] = Path(made, name)
            files[name].write_text(text, encoding="utf-8")
        for logger in takers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("table", table)
                logger.save()
            elif isinstance(logger, MLFlowLogger):
                _send_to_mlflow(logger, files)
            else:
                _send_to_wandb(logger, files)


def settings_in(path: Path) -> dict[str, Any]:
    """Content of a file of settings."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _is_sent(path: Path, per_sample: bool) -> bool:
    """Whether a file or folder is one that a run writes to be looked at: no checkpoint, journal or link."""
    if path.is_symlink() or (path.name in _PER_SAMPLE and not per_sample):
        return False
    if path.is_dir():
        return (path / "model.safetensors").is_file() and not any(each.is_symlink() for each in path.rglob("*"))
    return path.is_file() and path.suffix in _SENT and not path.name.startswith(".")


def _send_to_mlflow(logger: MLFlowLogger, files: Mapping[str, Path]) -> None:
    with _tolerated(logger):
        for name, path in files.items():
            if path.is_dir():
                logger.experiment.log_artifacts(logger.run_id, str(path), name)
            else:
                logger.experiment.log_artifact(logger.run_id, str(path))


def _send_to_wandb(logger: WandbLogger, files: Mapping[str, Path]) -> None:
    import wandb

    artifact = wandb.Artifact(f"run-{logger.experiment.id}", type="run")
    for name, path in files.items():
        (artifact.add_dir if path.is_dir() else artifact.add_file)(str(path), name=name)
    logger.experiment.log_artifact(artifact)


class Artifacts(Callback):
    """Send the files of a run to W&B and MLflow when it ends: closing table, report, settings, ledger, model.

    The process of rank 0 sends what is in the folder of its `RunRecord`, checkpoints excepted, and of a federation
    across organisations that has no samples or models of other organisations. Files that cannot be sent stay there, for
    ``fedlit send``.

    Args:
        predictions: Also predict the target's test samples, under the command, and send files with a row for each
            sample: ``predictions.csv`` and ``embeddings.csv``.
        model: Also export the target's model, to the folder ``model`` that `fedlit.load` reads, unless ``export`` of
            `RunRecord` names another.
    """

    def __init__(self, predictions: bool = True, model: bool = True) -> None:
        self.predictions = predictions
        self.model = model

    def send_(self, trainer: Trainer, module: FederatedModule, folder: Path) -> None:
        """Send all that is in a folder; of all processes, as the target's may still be writing."""
        if is_dry(trainer):
            return
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            send_files(trainer.loggers, folder, hides_from_others(module), self.predictions)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Send again what ``predict`` has added."""
        folder = trainer.log_dir
        if stage == "predict" and folder is not None and Path(folder, "summary.json").is_file():
            self.send_(trainer, federated(pl_module, self), Path(folder))


# ---------------------------------------------------------------- MLflow


class MLflow(MLFlowLogger):
    """Lightning's logger for MLflow, with which a run goes on if the tracking server fails.

    A server that does not answer, when the run begins or later, gets nothing more; what the run has logged and made is
    in its folder, and ``fedlit send`` sends it afterwards.

    Args:
        experiment_name: Of MLflow.
        run_name: Of the run; ``None`` has its method, target and seed.
        tracking_uri: Such as ``http://HOST:5000``; ``None`` is ``MLFLOW_TRACKING_URI``, and without that
            the file ``mlflow.db`` in the working directory.
        log_model: Whether checkpoints are artifacts: ``True`` when the run ends, ``"all"`` each as it is written.
        artifact_location: Of a new experiment; ``None`` leaves it to the server.
        run_id: Of a run of MLflow that goes on.

    Attributes:
        lost: Why the server gets nothing more; ``None`` while it does.
    """

    def __init__(
        self,
        experiment_name: str = "fedlit",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        log_model: bool | str = False,
        artifact_location: str | None = None,
        run_id: str | None = None,
    ) -> None:
        self.lost: str | None = None
        # by default a request is repeated for four minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # of the library, to its makers
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path('mlflow.db').resolve()}"
        super().__init__(
            experiment_name=experiment_name,
            run_name=run_name,
            tracking_uri=uri,
            log_model=log_model,  # type: ignore[arg-type]  # jsonargparse has no Literal of a bool and a text
            artifact_location=artifact_location,
            run_id=run_id,
        )
        if rank_zero_only.rank == 0 and uri.startswith("http"):  # type: ignore[attr-defined]
            with self.tolerating(), suppress(HTTPError):  # an answer, too
                urlopen(uri, timeout=_ANSWERS_WITHIN).close()

    @contextmanager
    def tolerating(self) -> Iterator[None]:
        """Take a failure of the server within for the end of logging; what the server refuses is a warning."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except (MlflowException, OSError) as error:  # those of a connection are the latter
            reason = str(error).splitlines()[0][:200]
            refused = isinstance(error, MlflowException) and error.get_http_status_code() < 500  # type: ignore[no-untyped-call]
            if refused:
                rank_zero_warn(f"MLflow at {self._tracking_uri} does not take all that is logged: {reason}")
            elif self.lost is None:
                self.lost = reason
                rank_zero_warn(
                    f"MLflow at {self._tracking_uri} does not answer, and gets nothing more of this run, which goes "
                    f"on: {reason}"
                )

    @property
    def experiment(self) -> Any:
        """The client; one that does nothing if the server is lost."""
        from lightning.fabric.loggers.logger import _DummyExperiment

        if self.lost is None:
            with self.tolerating():
                return super().experiment
            if self.lost is None:  # refused, as for a wrong password: a run that logs nothing is not what was asked for
                return super().experiment
        return _DummyExperiment()

    def log_hyperparams(self, params: Any) -> None:
        """Log parameters."""
        self._unless_lost(super().log_hyperparams, params)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers of a step."""
        self._unless_lost(super().log_metrics, metrics, step)

    def finalize(self, status: str = "success") -> None:
        """Tell the server that the run has ended."""
        self._unless_lost(super().finalize, status)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Send a checkpoint, if ``log_model`` asks for it."""
        self._unless_lost(super().after_save_checkpoint, checkpoint_callback)

    def _unless_lost(self, call: Callable[..., None], *args: Any) -> None:
        if self.lost is None:
            with self.tolerating():
                call(*args)


@contextmanager
def _tolerated(logger: MLFlowLogger) -> Iterator[None]:
    """Calls of an MLflow client, which may fail if the logger is fedlit's."""
    if not isinstance(logger, MLflow):
        yield
        return
    with logger.tolerating():
        yield


def tell_of_lost(loggers: Iterable[Logger], folder: Path | None) -> None:
    """Print how the files of a run get to servers that were lost."""
    for logger in loggers:
        if isinstance(logger, MLflow) and logger.lost is not None and folder is not None:
            print(
                f"fedlit: MLflow at {logger._tracking_uri} lacks this run: when it answers again, send it with "
                f"fedlit send {folder}",
                file=sys.stderr,
                flush=True,
            )
