"""Detection of a collapse of the target's predictions, without labels."""

from __future__ import annotations

import math
from collections.abc import Mapping

_VARIETY = 0.25
"""Predictions have collapsed with less than this share of the greatest variety so far."""

_FALL = 0.05
"""A score has fallen by more than this share of the best so far (at least 0.01)."""

_PATIENCE = 3
"""Successive validations with a fallen score that rule out chance."""

FEW = 10
"""Number of predictions below which one class alone is plausible."""


_SCATTER = 0.25
"""Neighbourhoods have scattered with less information by more than this share of the maximum so far."""

_LEAST_INFORMATION = 0.2
"""Information of neighbourhoods below which a fall means nothing."""


class _Fall:
    """Count successive validations in which a number is below its maximum so far."""

    def __init__(self) -> None:
        self.best, self.best_round = 0.0, 0
        self._low = 0

    def see(self, value: float, round_idx: int, allowed: float) -> bool:
        """Return whether ``value`` has been more than ``allowed`` below the maximum for `_PATIENCE` validations."""
        self._low = self._low + 1 if self.best - value > allowed else 0
        if value > self.best:
            self.best, self.best_round = value, round_idx
        return self._low == _PATIENCE

    def text(self, now: float) -> str:
        return (
            f"was {self.best:.3f} after round {self.best_round}, and has been lower in {_PATIENCE} validations since, "
            f"now {now:.3f}"
        )


class CollapseWatch:
    """Compare each validation of a run with the best one before.

    Variety is exp(entropy of the predicted classes) - 1: 0 where all are of one class. Mixed classes show where
    neighbouring inputs are no longer predicted alike. Permuted classes are not detected.
    """

    def __init__(self) -> None:
        self._variety, self._most = 0.0, 1.0  # greatest, and the largest class's share then
        self._score, self._information = _Fall(), _Fall()
        self._reported = False

    def see(self, predicted: Mapping[str, int], score: float, round_idx: int, information: float | None = None) -> str:
        """Return the text of a warning, at most once in a run; empty while predictions are about as good as before.

        Args:
            predicted: Number of predictions by class name.
            score: `fedlit.functional.information_score`.
            round_idx: Of the last round before.
            information: `fedlit.functional.neighbourhood_information` of predicted classes, if there are neighbours.
        """
        total = sum(predicted.values())
        if self._reported or total < FEW:
            return ""
        shares = {name: number / total for name, number in predicted.items() if number}
        largest = max(shares, key=shares.__getitem__)
        variety = math.exp(-math.fsum(share * math.log(share) for share in shares.values())) - 1
        fallen = self._score.see(score, round_idx, max(_FALL * self._score.best, 0.01))
        scattered = information is not None and self._information.see(
            information, round_idx, _SCATTER * max(self._information.best, _LEAST_INFORMATION)
        )
        text = ""
        if self._variety and variety <= _VARIETY * self._variety:  # of no variety yet, nothing is left to lose
            text = (
                f"{100 * shares[largest]:.0f}% of them are of class {largest}, and the largest class had "
                f"{100 * self._most:.0f}% before"
            )
        elif fallen:
            text = f"their label-free score (target/score) {self._score.text(score)}"
        elif scattered and information is not None:
            text = (
                "near samples are put into different classes more often: the information that a sample's neighbours "
                f"have of its class {self._information.text(information)}"
            )
        if variety > self._variety:
            self._variety, self._most = variety, shares[largest]
        self._reported = bool(text)
        return text
