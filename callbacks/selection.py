"""Selection of a method and a round without labels of the target: the most trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pydoc import locate
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from fedlit.callbacks.run_summary import FLOOR

if TYPE_CHECKING:  # reports select, too
    from fedlit.callbacks.report.run_folder import RunFolder

TRUST = "validator/trust"
"""The score that compares models; `Validators` log it."""

MARGIN = 0.05
"""Share of the highest trust within which SourceOnly is taken instead."""

NO_TRUST = 0.005
"""Trust up to which no model is selected.

Trust is a product of four numbers in [0, 1]. Models whose predictions are random get up to 0.002 with 60 samples, those
no better than naming the larger class up to 0.004 in the hospitals, untrained ones with ten classes less than 0.0001.
With two classes even random networks may have more: those that separate them by chance.
"""

MATCH = "validator/class_means"
"""The score that sees classes that are mixed up or left out; `Validators` log it."""

SAFE = (FLOOR, "FedAvg")
"""Methods to take where none is trusted, unless refined: the first that there is."""

LEAST_MATCH = 0.7
"""Share of the highest match below which a model is no member of a combination of more than two classes."""

KNOWN = "source/acc"
"""Accuracy on the sources' validation samples; the module logs it."""

LEAST_KNOWN = 0.5
"""Share of the highest accuracy above 1/2 on the sources, below which a model is no member with two classes."""

COMBINATION = "combination.json"
"""In the folder of a network that has learnt a combination: its members."""


class TrustedRound(ModelCheckpoint):
    """Keep a checkpoint of the round with the highest ``validator/trust``, of equal ones the first.

    Needs `Validators` that log it. Validations without it, in which a method has no classifier yet, are skipped.
    """

    def __init__(self) -> None:
        super().__init__(monitor=TRUST, mode="max", filename="trusted-{epoch}", save_on_train_epoch_end=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, if this round is trusted more than those before it."""
        if TRUST in trainer.callback_metrics:
            super().on_validation_end(trainer, pl_module)


@dataclass(frozen=True)
class Candidate:
    """A method (name in tables), its most trusted round and trust in [0, 1], and the run's folder.

    ``match`` is ``validator/class_means`` of that round, in [-1, 1], and ``known`` its ``source/acc``, in [0, 1], if
    they were logged. A method that is not ``ranked`` trains its predictions to be certain, which trust takes for a good
    sign.
    """

    method: str
    round_idx: int
    trust: float
    run: str
    match: float | None = None
    ranked: bool = True
    known: float | None = None


@dataclass(frozen=True)
class Member:
    """A model of a combination."""

    method: str  # name in tables
    round_idx: int  # of its checkpoint
    trust: float  # in [0, 1]
    weight: float  # in the mean, in [0, 1]
    information: float  # of a sample's predicted class about its neighbours', in [0, 1]
    agreement: float  # share of samples of which it names the class of the combination


@dataclass(frozen=True)
class Selection:
    """The model that is selected for one target and seed, without labels of the target."""

    target: str  # name of the client adapted to
    seed: str  # of the runs
    chosen: Candidate | None  # the model to take; ``None`` if none that is ranked has more trust than `NO_TRUST`
    candidates: Sequence[Candidate]  # all methods that have a score, by falling trust
    without: Sequence[str]  # methods without a score in any round
    in_doubt: bool  # whether ``chosen`` is SourceOnly, though others have more trust: hardly more, or of two classes
    two_classes: bool = False  # of which trust says little; see `choose`
    safe: str | None = None  # the method that adapts nothing or least, to take where none is trusted; if there is one

    def __str__(self) -> str:
        """The selection in sentences, and how clear it is."""
        missing = f". Without a score: {', '.join(self.without)}" if self.without else ""
        unranked = [each.method for each in self.candidates if not each.ranked]
        if unranked and len(unranked) < len(self.candidates):
            missing += f". Not ranked, as they train predictions to be certain: {', '.join(unranked)}"
        if self.chosen is None:
            return (
                f"nothing is selected for {self.target} (seed {self.seed}): {self.refusal}{missing.removeprefix('.')}"
            )
        best, chosen = self.candidates[0], self.chosen
        text = f"selected for {self.target} (seed {self.seed}): {chosen.method} after round {chosen.round_idx}"
        text += f", trust {chosen.trust:.3f}, in '{chosen.run}'"
        if self.in_doubt:
            why = "which says little of two classes" if self.two_classes else "hardly more"
            text += f". {best.method} has {best.trust:.3f}, {why}: in doubt the one that adapts nothing"
        elif len(self.candidates) > 1 and self.candidates[1].ranked:
            second = self.candidates[1]
            share = 1 - max(0.0, second.trust) / best.trust
            text += f". Next: {second.method} after round {second.round_idx}, {share:.0%} less"
            text += ", too little to be sure of" if share <= MARGIN else ""
            if self.two_classes and chosen.method != self.safe:
                text += f". Of two classes trust says little: compare with {FLOOR}"
        return text + missing

    @property
    def refusal(self) -> str:
        """The reason why no model is selected; for a selection without ``chosen``."""
        safe = "" if self.safe is None else f" Until then {self.safe} is the safe one."
        if not any(each.ranked for each in self.candidates):
            return (
                "all methods train predictions to be certain, which trust takes for a good sign. Compare them with "
                f"one that does not, such as {FLOOR}, which is the safe one"
            )
        return (
            f"the highest trust is {max(0.0, self.candidates[0].trust):.2g}, and models that have learnt nothing reach "
            f"{NO_TRUST:g} by chance. Train for more rounds, give more validation samples (data.val_fraction), or a "
            f"few labels of the target (data.target_labels).{safe}"
        )


def select(runs: Mapping[str, RunFolder]) -> list[Selection]:
    """Select the most trusted round of the most trusted method, for each target and seed with a score.

    SourceOnly, which adapts nothing and receives nothing from the target, is taken instead if it has at least 95 % of
    the highest trust, or there are two classes. Where no trust is above `NO_TRUST`, no model is chosen, and neither
    where all of several methods train predictions to be certain. Runs are by the path of their folder.
    """
    groups: dict[tuple[str, str], dict[str, RunFolder]] = {}
    for path, run in runs.items():
        groups.setdefault((run.target, run.seed), {})[path] = run
    selections = []
    for (target, seed), group in groups.items():
        candidates, without = [], []
        for path, run in group.items():
            curve = trust_of(run)
            if curve:
                at = max(curve) if changes_at_end(run) else max(curve, key=lambda round_idx: curve[round_idx])
                match = run.curves.get(MATCH, {}).get(at)
                known = run.curves.get(KNOWN, {}).get(at)
                candidates.append(Candidate(run.title, at, curve[at], path, match, not _is_certain(run), known))
            else:
                without.append(run.title)
        if not candidates:
            continue
        alone = len({each.method for each in candidates}) < 2  # its rounds are compared, not methods
        compared = [each for each in candidates if each.ranked or alone]
        two_classes = any(run.summary is not None and len(run.summary.classes) == 2 for run in group.values())
        floors = [adapts_nothing(group[each.run]) for each in compared]
        taken = choose([each.trust for each in compared], floors, two_classes)
        chosen = None if taken is None else compared[taken]
        candidates.sort(key=lambda each: (not each.ranked, -each.trust))  # keeps the order of equal ones
        in_doubt = chosen is not None and chosen is not candidates[0]
        safe = next((run.title for name in SAFE for run in group.values() if _is_plain(run, name)), None)
        selections.append(Selection(target, seed, chosen, candidates, without, in_doubt, two_classes, safe))
    return selections


def members_of(selection: Selection, num_classes: int) -> list[Candidate]:
    """Candidates that a combination has: all but those whose classes match the sources' far less than others' do.

    With two classes, whose means are opposite directions, the match says too little, and so does trust: all but those
    that know far less of the sources' samples, as an untrained one or one that names a single class.
    """
    candidates = selection.candidates
    if num_classes == 2:
        above = max((each.known - 0.5 for each in candidates if each.known is not None), default=0.0)
        return [each for each in candidates if each.known is None or each.known - 0.5 >= LEAST_KNOWN * above]
    match = max((each.match for each in candidates if each.match is not None), default=0.0)
    return [each for each in candidates if each.match is None or each.match >= LEAST_MATCH * match]


def rule_of_members(num_classes: int) -> str:
    """The reason why a candidate is none of `members_of`, in words."""
    if num_classes == 2:
        return f"its {KNOWN} is above 1/2 by less than {LEAST_KNOWN} of what the highest is"
    return f"its {MATCH} is below {LEAST_MATCH} of the highest"


def choose(trust: Sequence[float], adapts_nothing: Sequence[bool], two_classes: bool = False) -> int | None:
    """Position of the model to take, or ``None`` if none is trusted.

    Of two classes, whose means are opposite directions, the match of means says nothing: what adapts nothing is taken.
    """
    first = max(range(len(trust)), key=trust.__getitem__, default=None)
    if first is None or not trust[first] > NO_TRUST:
        return None
    floors = [position for position, is_floor in enumerate(adapts_nothing) if is_floor]
    floor = max(floors, key=trust.__getitem__, default=first)
    return floor if two_classes or trust[floor] >= (1 - MARGIN) * trust[first] else first


def trust_of(run: RunFolder) -> dict[int, float]:
    """Trust by round, where it is finite."""
    return {round_idx: trust for round_idx, trust in run.curves.get(TRUST, {}).items() if math.isfinite(trust)}


def adapts_nothing(run: RunFolder) -> bool:
    """Whether a run is of SourceOnly, whatever its name in tables; refined, it adapts to the target."""
    return _is_plain(run, FLOOR)


def changes_at_end(run: RunFolder) -> bool:
    """Whether the last round is another model than those before: a refined one, or one whose method ends so."""
    ends = bool(_requires(run.config.get("model.class_path"), "changes_at_end"))
    return ends or any(run.curves.get("refine/taken", {}).values())


def trains_on_information(class_path: object, arguments: Mapping[str, Any]) -> str | None:
    """The reason why scores of certainty do not rank a method: its loss has that of the target's predictions.

    Returns:
        What brings it in, such as ``"refine=network"`` or the name of an argument; ``""`` if nothing has to, and
        ``None`` if the loss has no such term.
    """
    trains = _requires(class_path, "trains_on_information")
    if isinstance(trains, str) and arguments.get(trains) is not None:
        return trains
    if arguments.get("refine") == "network":
        return "refine=network"
    return "" if trains is True else None


def _is_certain(run: RunFolder) -> bool:
    prefix = "model.init_args."
    arguments = {key.removeprefix(prefix): value for key, value in run.config.items() if key.startswith(prefix)}
    return trains_on_information(run.config.get("model.class_path"), arguments) is not None


def _requires(class_path: object, name: str) -> Any:
    """A field of a method's `Requires`; false for what is no method of fedlit's kind."""
    return getattr(getattr(locate(str(class_path)), "requires", None), name, False)


def _is_plain(run: RunFolder, method: str) -> bool:
    """Whether a run is of a class of this name, and not refined."""
    if run.config.get("model.init_args.refine"):
        return False
    path = run.config.get("model.class_path")
    return run.method == method if path is None else str(path).rpartition(".")[2] == method


def as_json(selections: Sequence[Selection]) -> str:
    """Selections as a JSON list of objects."""
    rows: list[dict[str, Any]] = [asdict(each) for each in selections]
    return json.dumps(rows, indent=2)
