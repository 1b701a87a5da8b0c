"""Whether the target's predictions fall together as training goes on: seen in them alone, without a label."""

from __future__ import annotations

import math
from collections.abc import Mapping

_VARIETY = 0.25
"""Of the greatest variety so far: with less of it, predictions have collapsed."""

_FALL = 0.05
"""Of the best score so far, and 0.01 at least: by more than that a score has fallen."""

_PATIENCE = 3
"""Validations in a row with a fallen score that are no chance any more."""

FEW = 10
"""Predictions of which all may well be of one class."""


class CollapseWatch:
    """Compares each validation of a run with the best one before.

    The variety of predictions is the number of classes that, all equally frequent, would have their entropy, less 1: 0
    where all are of one class. Collapses that keep all classes and a sure network, such as classes that change places,
    are not seen.
    """

    def __init__(self) -> None:
        self._variety, self._most = 0.0, 1.0  # greatest, and the largest class's share then
        self._score, self._best_round = 0.0, 0
        self._low = 0
        self._told = False

    def see(self, predicted: Mapping[str, int], score: float, round_idx: int) -> str:
        """What to say of a validation: nothing if it is about as good as those before, or all was said.

        Args:
            predicted: How often each class was predicted, by its name.
            score: `fedlit.functional.information_score`.
            round_idx: Of the last round before.
        """
        total = sum(predicted.values())
        if self._told or total < FEW:
            return ""
        shares = {name: number / total for name, number in predicted.items() if number}
        largest = max(shares, key=shares.__getitem__)
        variety = math.exp(-math.fsum(share * math.log(share) for share in shares.values())) - 1
        self._low = self._low + 1 if self._score - score > max(_FALL * self._score, 0.01) else 0
        said = ""
        if variety <= _VARIETY * self._variety:
            said = (
                f"{100 * shares[largest]:.0f}% of them are of class {largest}, and the largest class had "
                f"{100 * self._most:.0f}% before"
            )
        elif self._low == _PATIENCE:
            said = (
                f"their label-free score (target/score) was {self._score:.3f} after round {self._best_round}, and has "
                f"been lower in {_PATIENCE} validations since, now {score:.3f}"
            )
        if variety > self._variety:
            self._variety, self._most = variety, shares[largest]
        if score > self._score:
            self._score, self._best_round = score, round_idx
        self._told = bool(said)
        return said
