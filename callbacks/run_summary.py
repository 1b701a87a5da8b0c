"""RunSummary: the results of one run, as a file and for tables of several runs."""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean

import torch
from lightning.pytorch import Trainer

from fedlit.callbacks.clinic import ClinicMetrics
from fedlit.callbacks.intervals import ConformalIntervals
from fedlit.callbacks.oracle_accuracy import OracleAccuracy
from fedlit.callbacks.shared import check_fields, class_names, grouped
from fedlit.checks import check
from fedlit.federation import KEYS
from fedlit.federation.documents import fingerprint
from fedlit.module import FederatedModule
from fedlit.privacy import Description, GaussianMechanism
from fedlit.run.tasks import Classification, Regression

FLOOR = "SourceOnly"
"""The method without adaptation, which the others are compared with."""


@dataclass(frozen=True)
class RunSummary:
    """Results of one run of one method on one target.

    Args:
        method: Name in tables; runs of equal method and target count as repetitions.
        target: Client adapted to.
        seed: Of the run.
        oracle_accuracy: On the target's hidden labels, in [0, 1]; ``None`` without `OracleAccuracy`.
        target_score: Label-free score of the target, in [0, 1]; ``None`` without validation or test.
        rounds: Communication rounds.
        bytes_by_channel: Bytes sent, all rounds.
        seconds: By phase, of this process: "local", "exchange", "protection".
        seconds_total: From start to end; of a resumed run, with those up to its checkpoint.
        processes: Number of processes.
        target_sha256: Fingerprint of the target's weights, to compare runs bit by bit.
        backends: Descriptions by channel, of channels with a privacy backend.
        selected_accuracy: Accuracy on the target's hidden validation labels in the first validation with the highest
            ``target_score``, that is after choosing a round without labels. ``None`` without validation.
        best_accuracy: The highest such accuracy in any validation, which no federation could choose: an oracle.
        oracle_balanced_accuracy: Mean recall over classes; this and the others as `oracle_accuracy`.
        oracle_f1: F1 scores of classes weighted by their samples.
        oracle_r2: In regression, the share of the hidden labels' variance that is explained, at most 1.
        oracle_rmse: In regression, the root of the mean squared error, in the labels' unit; of several numbers to
            predict, the mean over these.
        oracle_mae: Likewise the mean absolute error.
        oracle_outputs: Of several numbers to predict, by name, each one's ``r2``, ``rmse``, ``mae`` and ``coverage``.
        oracle_coverage: Share of the hidden labels within the intervals of `ConformalIntervals`; of several numbers to
            predict, the mean over these.
        alpha: Of these intervals, the share of new samples like the sources' that may lie outside.
        oracle_clinic: By name, what `ClinicMetrics` measured with the hidden labels.
        oracle_alternatives: Accuracy of the method's other predictions of the target, by name.
        channels: Protection, contents, senders, receivers and frequency of each channel's messages, as declared.
        oracle_ece: Expected calibration error of the predicted probabilities.
        oracle_brier: Brier score of the predicted probabilities, in [0, 2].
        oracle_auc: Area under the ROC curve, of several classes each against the rest.
        oracle_class_accuracy: Accuracy on each class that the target has, by name.
        oracle_confusion: Test samples by true class (row) and predicted class (column).
        oracle_reliability: In 10 equal bins of the predicted class's probability: number of test samples, mean
            probability, and share that is right.
        classes: Names of the classes, in the order of `oracle_confusion`; empty where outputs are none.
        temperature: Divisor of logits, if `Calibration` fitted one.
        noised: Whether clients' numbers, the oracle's too, carry noise of differential privacy (``reports`` of the
            strategy), and may lie outside the ranges above.
    """

    method: str
    target: str
    seed: int
    oracle_accuracy: float | None
    target_score: float | None
    rounds: int
    bytes_by_channel: dict[str, int]
    seconds: dict[str, float]
    seconds_total: float
    processes: int
    target_sha256: str
    backends: dict[str, Description]
    selected_accuracy: float | None = None
    best_accuracy: float | None = None
    oracle_balanced_accuracy: float | None = None
    oracle_f1: float | None = None
    oracle_r2: float | None = None
    oracle_rmse: float | None = None
    oracle_mae: float | None = None
    oracle_outputs: dict[str, dict[str, float]] = field(default_factory=dict)
    oracle_coverage: float | None = None
    alpha: float | None = None
    oracle_clinic: dict[str, float] = field(default_factory=dict)
    oracle_alternatives: dict[str, float] = field(default_factory=dict)
    channels: dict[str, str] = field(default_factory=dict)
    oracle_ece: float | None = None
    oracle_brier: float | None = None
    oracle_auc: float | None = None
    oracle_class_accuracy: dict[str, float] = field(default_factory=dict)
    oracle_confusion: list[list[int]] | None = None
    oracle_reliability: list[list[float]] | None = None
    classes: list[str] = field(default_factory=list)
    temperature: float | None = None
    noised: bool = False

    @property
    def only_class(self) -> str | None:
        """The only predicted class of a model that has collapsed or not learnt; ``None`` if there are several."""
        if not self.oracle_confusion:
            return None
        columns = [sum(column) for column in zip(*self.oracle_confusion, strict=True)]
        predicted = [name for name, count in zip(self.classes, columns, strict=True) if count]
        return predicted[0] if len(columns) > 1 and len(predicted) == 1 else None

    @property
    def num_scored(self) -> list[int]:
        """Test samples of each class that the accuracy is of; empty in regression."""
        return [sum(row) for row in self.oracle_confusion or []]

    def to_json(self) -> str:
        """The fields as a JSON object."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)

    def oracle_scores(self) -> dict[str, float]:
        """Return the scores on hidden labels that are single numbers, by name without ``oracle_``."""
        found = {name: value for name, value in vars(self).items() if name.startswith("oracle_")}
        return {name.removeprefix("oracle_"): each for name, each in found.items() if isinstance(each, float)}

    def published_scores(self) -> dict[str, float]:
        """Return `oracle_scores` for a model card; none if they carry noise of differential privacy."""
        return {} if self.noised else self.oracle_scores()

    @classmethod
    def from_json(cls, text: str) -> RunSummary:
        """Read back what `to_json` wrote."""
        record = json.loads(text, parse_constant=_not_finite)
        backends = {channel: Description(**about) for channel, about in record["backends"].items()}
        summary = check_fields(cls(**(record | {"backends": backends})))
        _check_ranges(summary)
        _check_counts(summary)
        return summary


def _not_finite(constant: str) -> float:
    raise ValueError(f"it has {constant}, which no run writes")


_SHARE, _AMOUNT = (0.0, 1.0), (0.0, math.inf)
_SCORES = dict.fromkeys(
    (
        *("oracle_accuracy", "target_score", "selected_accuracy", "best_accuracy", "oracle_balanced_accuracy"),
        *("oracle_f1", "oracle_ece", "oracle_auc", "oracle_alternatives", "oracle_class_accuracy"),
        *("oracle_coverage", "alpha", "oracle_clinic"),
    ),
    _SHARE,
) | {"oracle_r2": (-math.inf, 1.0), "oracle_brier": (0.0, 2.0), "temperature": _AMOUNT}
_SCORES |= {"oracle_rmse": _AMOUNT, "oracle_mae": _AMOUNT}
_AMOUNTS = dict.fromkeys(("rounds", "seconds_total", "bytes_by_channel", "seconds"), _AMOUNT)
_ROUNDING = 1e-6


def _check_ranges(summary: RunSummary) -> None:
    """Refuse numbers of a file outside the range of their field; scores with noise are in any."""
    for name, (low, high) in (_SCORES | _AMOUNTS).items():
        if summary.noised and name in _SCORES:
            low, high = -math.inf, math.inf
        value, of_outputs = getattr(summary, name), summary.oracle_outputs.items()
        numbers = (
            {f"{name}[{key!r}]": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
        )
        numbers |= {f"{name} of {output!r}": row.get(name.removeprefix("oracle_")) for output, row in of_outputs}
        for argument, number in numbers.items():
            holds = number is None or (math.isfinite(number) and low - _ROUNDING <= number <= high + _ROUNDING)
            check(holds, argument, f"from {low:g} to {high:g}", number)


def _check_counts(summary: RunSummary) -> None:
    """Refuse counts of a file that do not fit the classes, or are none."""
    size = len(summary.classes)
    confusion = summary.oracle_confusion or []
    for row in confusion:
        holds = len(row) == len(confusion) == size and min(row, default=0) >= 0
        check(holds, "oracle_confusion", f"counts of {size} by {size} classes", row, shown=str(row)[:100])
    for bin_ in summary.oracle_reliability or []:
        holds = len(bin_) == 3 and bin_[0] >= 0 and all(0 <= each <= 1 + 1e-9 for each in bin_[1:])
        check(holds, "oracle_reliability", "a count and two shares", bin_, shown=str(bin_)[:100])


def summarise(trainer: Trainer, module: FederatedModule, seconds: float, method: str | None = None) -> RunSummary:
    """Sum up a run; called on all processes after ``fit``, or after the ``test`` that follows.

    After a ``test`` with ``ckpt_path``, rounds and bytes are still those of the run, not of that checkpoint. Numbers of
    the target are left out where `Federation.shows` has none.

    Args:
        trainer: Its latest ``oracle/target/acc`` and ``target/score`` are taken.
        module: The trained method.
        seconds: From start to end; those before a resume are `RoundTimer.resumed_s`.
        method: Name in tables; ``None`` is the class of ``module``.
    """
    federation = module.federation
    shown = federation.shows(module.target)

    def metric(name: str) -> float | None:
        value = trainer.callback_metrics.get(name) if shown else None
        return None if value is None or not math.isfinite(value) else float(value)

    sent = federation.ledger.bytes_by_channel()
    used = [federation.channels[channel] for channel in sent if not channel.endswith(KEYS)]
    watchers = [callback for callback in trainer.callbacks if isinstance(callback, OracleAccuracy)]  # type: ignore[attr-defined]
    oracle = watchers[0] if watchers and shown else OracleAccuracy()
    interval_makers = [callback for callback in trainer.callbacks if isinstance(callback, ConformalIntervals)]  # type: ignore[attr-defined]
    coverage = metric("oracle/target/coverage")
    measured = [each.names for each in trainer.callbacks if isinstance(each, ClinicMetrics)]  # type: ignore[attr-defined]
    clinic = {name: metric(f"oracle/target/{name}") for names in measured for name in names}
    seen = [pair for pair in oracle.history if all(map(math.isfinite, pair))]
    confusion = oracle.confusion
    has_classes = confusion is not None or isinstance(module.task, Classification)  # a module of one's own may not
    classes = class_names(trainer, module) if has_classes else []
    return RunSummary(
        method=method or type(module).__name__,
        target=module.target.name,
        seed=federation.seed,
        oracle_accuracy=metric("oracle/target/acc"),
        target_score=metric("target/score"),
        rounds=federation.round_idx,
        bytes_by_channel=sent,
        seconds=dict(federation.seconds),
        seconds_total=seconds,
        processes=trainer.world_size,
        target_sha256=_target_sha256(module),
        backends={channel.name: channel.description for channel in used if channel.description is not None},
        channels={channel.name: channel.sent for channel in used},
        selected_accuracy=max(seen, key=operator.itemgetter(0))[1] if seen else None,  # of equal scores the first
        best_accuracy=max(accuracy for _, accuracy in seen) if seen else None,
        oracle_balanced_accuracy=metric("oracle/target/balanced_acc"),
        oracle_f1=metric("oracle/target/f1"),
        oracle_r2=metric("oracle/target/r2"),
        oracle_rmse=metric("oracle/target/rmse"),
        oracle_mae=metric("oracle/target/mae"),
        oracle_outputs=_of_outputs(trainer, module, metric),
        oracle_coverage=coverage,
        alpha=None if coverage is None or not interval_makers else interval_makers[0].alpha,
        oracle_clinic={name: value for name, value in clinic.items() if value is not None},
        oracle_alternatives={
            name: accuracy
            for name in type(module).alternative_names
            if (accuracy := metric(f"oracle/target/{name}/acc")) is not None
        },
        oracle_ece=metric("oracle/target/ece"),
        oracle_brier=metric("oracle/target/brier"),
        oracle_auc=metric("oracle/target/auc"),
        oracle_class_accuracy={
            name: row[place] / sum(row)
            for place, (name, row) in enumerate(zip(classes, confusion, strict=True) if confusion else ())
            if sum(row)
        },
        oracle_confusion=confusion,
        oracle_reliability=oracle.reliability,
        classes=classes,
        temperature=metric("target/temperature"),
        noised=isinstance(federation.channels.reports, GaussianMechanism),
    )


def _of_outputs(
    trainer: Trainer, module: FederatedModule, metric: Callable[[str], float | None]
) -> dict[str, dict[str, float]]:
    """By number to predict, if there are several, what was measured of it."""
    if not isinstance(module.task, Regression) or module.num_classes == 1:
        return {}
    rows = {
        output: {
            name: value
            for name in (*module.task.means, "coverage")
            if (value := metric(f"oracle/target/{name}/{output}")) is not None
        }
        for output in class_names(trainer, module)
    }
    return {output: row for output, row in rows.items() if row}


def _target_sha256(module: FederatedModule) -> str:
    """Fingerprint of the target's weights; the process that hosts it sends it to the others."""
    federation = module.federation
    digest = ""
    if federation.is_local(module.target):
        sha = hashlib.sha256()
        for name, tensor in module.replicas[module.target.name].state_dict().items():
            if isinstance(tensor, torch.Tensor):
                sha.update(name.encode() + tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            else:  # of get_extra_state
                sha.update(name.encode() + fingerprint(tensor).encode())
        digest = sha.hexdigest()
    digests = federation.transport.all_gather(digest, "the fingerprint of the target")
    return str(digests[federation.roster.rank_of[module.target.name]] or "")  # empty if its process was lost


def methods_of(runs: Iterable[RunSummary]) -> list[str]:
    """Methods in the order in which they first occur."""
    return list(dict.fromkeys(run.method for run in runs))


def targets_of(runs: Iterable[RunSummary]) -> list[str]:
    """Targets in the order in which they first occur."""
    return list(dict.fromkeys(run.target for run in runs))


def split_by_task(runs: Iterable[RunSummary]) -> dict[str, list[RunSummary]]:
    """Runs with ``"accuracy"``, and those with ``"R2"``, if there are any: scores that are never compared."""
    by_task = grouped(runs, lambda run: "accuracy" if run.oracle_r2 is None else "R2")
    return dict(sorted(by_task.items(), reverse=True))  # accuracy first


def accuracies(runs: Iterable[RunSummary]) -> list[float]:
    """The compared scores: accuracies, or in regression R2."""
    scores = (run.oracle_accuracy if run.oracle_r2 is None else run.oracle_r2 for run in runs)
    return [score for score in scores if score is not None]


def errors(runs: Iterable[RunSummary], name: str) -> list[float]:
    """Scores in regression beside R2, by their field such as ``oracle_rmse``, of the runs that have them."""
    return [error for run in runs if (error := getattr(run, name)) is not None]


def averages(runs: Sequence[RunSummary], of: Callable[[Iterable[RunSummary]], list[float]] = accuracies) -> list[float]:
    """Mean over targets of what ``of`` takes from runs, one per seed, for runs of one task.

    A seed that lacks a target would shift the mean and is left out.
    """
    averages = []
    for seed in dict.fromkeys(run.seed for run in runs):
        by_target = [of(run for run in runs if run.seed == seed and run.target == t) for t in targets_of(runs)]
        if all(by_target):
            averages.append(fmean(map(fmean, by_target)))
    return averages


def gains(summaries: Sequence[RunSummary], method: str) -> dict[str, dict[int, float]]:
    """Points of accuracy, or of R2 in %, of a method above the floor: by target and by seed, where both have runs.

    The runs are of one task, see `split_by_task`. Those scored on other samples than the floor's, as a transductive
    target's whose labels are trained on in part, are left out: samples may be easier.
    """

    def points(name: str, of: RunSummary) -> list[float]:
        same = (run for run in summaries if (run.method, run.target, run.seed) == (name, of.target, of.seed))
        return [100 * each for each in accuracies(run for run in same if run.num_scored == of.num_scored)]

    by_target: dict[str, dict[int, float]] = {}
    for run in summaries:
        adapted, floor = points(method, run), points(FLOOR, run)
        if run.method == method and adapted and floor:
            by_target.setdefault(run.target, {})[run.seed] = fmean(adapted) - fmean(floor)
    return by_target


def mean_gains(by_target: Mapping[str, Mapping[int, float]]) -> list[float]:
    """Mean over targets of `gains`, one for each seed that all of them have."""
    first, *others = by_target.values()
    seeds = [seed for seed in first if all(seed in other for other in others)]
    return [fmean(by_seed[seed] for by_seed in by_target.values()) for seed in seeds]
