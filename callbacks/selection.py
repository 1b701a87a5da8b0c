"""Which of several methods to take, and after which round, when the target has no labels: the most trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from fedlit.callbacks.report.run_folder import RunFolder
from fedlit.callbacks.summary import FLOOR

TRUST = "validator/trust"
"""What models are compared by; `Validators` log it."""

MARGIN = 0.05
"""Share of the highest trust within which a model that adapts nothing is taken instead."""


class TrustedRound(ModelCheckpoint):
    """Keeps a checkpoint of the round with the highest ``validator/trust``, of equal ones the first.

    Needs `Validators` that log it. Validations without it, in which a method has nothing to predict with yet, are
    passed over.
    """

    def __init__(self) -> None:
        super().__init__(monitor=TRUST, mode="max", filename="trusted-{epoch}", save_on_train_epoch_end=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, if this round is trusted more than those before it."""
        if TRUST in trainer.callback_metrics:
            super().on_validation_end(trainer, pl_module)


@dataclass(frozen=True)
class Candidate:
    """A method after its most trusted round.

    Args:
        method: As the closing table calls it.
        round_idx: The round, from 0.
        trust: Its `fedlit.functional.trust_score`, in [0, 1].
        run: The run's folder.
    """

    method: str
    round_idx: int
    trust: float
    run: str


@dataclass(frozen=True)
class Selection:
    """What was chosen for one target and seed, without its labels.

    Args:
        target: Name of the client adapted to.
        seed: Of the runs.
        chosen: The model to take.
        candidates: Of all methods that have a score, the most trusted first.
        without: Methods of which no round has a score.
        in_doubt: Whether ``chosen`` adapts nothing, and was taken as others are hardly trusted more.
    """

    target: str
    seed: str
    chosen: Candidate
    candidates: Sequence[Candidate]
    without: Sequence[str]
    in_doubt: bool

    def __str__(self) -> str:
        """In sentences: what was chosen, and how sure that is."""
        best, chosen = self.candidates[0], self.chosen
        said = f"selected for {self.target} (seed {self.seed}): {chosen.method} after round {chosen.round_idx}"
        said += f", trust {chosen.trust:.3f}, in '{chosen.run}'"
        if self.in_doubt:
            said += f". {best.method} has {best.trust:.3f}, hardly more: in doubt the one that adapts nothing"
        elif len(self.candidates) > 1:
            second = self.candidates[1]
            share = 0.0 if not best.trust else 1 - second.trust / best.trust
            said += f". Next: {second.method} after round {second.round_idx}, {share:.0%} less"
            said += ", too little to be sure of" if share <= MARGIN else ""
        return said + (f". Without a score: {', '.join(self.without)}" if self.without else "")


def select(runs: Mapping[str, RunFolder]) -> list[Selection]:
    """The most trusted round of the most trusted method, for each target and seed.

    If SourceOnly, which adapts nothing and to which the target tells nothing, is among the methods and trusted at least
    95 per cent as much as the most trusted one, it is taken instead: there is little to gain by another.

    Args:
        runs: Finished ones, by the path of their folder.

    Returns:
        One for each target and seed, in the order of their first runs; without those of which no run has a score.
    """
    groups: dict[tuple[str, str], dict[str, RunFolder]] = {}
    for path, run in runs.items():
        groups.setdefault((run.target, run.seed), {})[path] = run
    found = []
    for (target, seed), own in groups.items():
        candidates, without = [], []
        for path, run in own.items():
            curve = run.curves.get(TRUST, {})
            if curve:
                at = max(curve, key=lambda round_idx: curve[round_idx])
                candidates.append(Candidate(run.method, at, curve[at], path))
            else:
                without.append(run.method)
        if not candidates:
            continue
        candidates.sort(key=lambda each: -each.trust)  # keeps the order of equal ones
        safe = next((each for each in candidates if each.method == FLOOR), candidates[0])
        in_doubt = safe is not candidates[0] and safe.trust >= (1 - MARGIN) * candidates[0].trust
        chosen = safe if in_doubt else candidates[0]
        found.append(Selection(target, seed, chosen, candidates, without, in_doubt))
    return found


def as_json(selections: Sequence[Selection]) -> str:
    """Selections as a JSON list of objects."""
    rows: list[dict[str, Any]] = [asdict(each) for each in selections]
    return json.dumps(rows, indent=2)
