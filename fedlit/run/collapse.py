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


_SCATTER = 0.25
"""Of the most information so far: with less by more than that, near samples are no longer predicted alike."""

_LEAST_INFORMATION = 0.2
"""Below it neighbourhoods have too little information for a fall to mean anything."""


class _Fall:
    """A number that has been below its best so far for some validations in a row."""

    def __init__(self) -> None:
        self.best, self.best_round = 0.0, 0
        self._low = 0

    def see(self, value: float, round_idx: int, allowed: float) -> bool:
        """Whether ``value`` is lower than the best by more than ``allowed`` for as long as makes it no chance."""
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
    """Compares each validation of a run with the best one before.

    The variety of predictions is the number of classes that, all equally frequent, would have their entropy, less 1: 0
    where all are of one class. Classes that mix, though all are there and the network is sure, are seen where near
    inputs are no longer predicted to be of one class. Classes that change places are not seen.
    """

    def __init__(self) -> None:
        self._variety, self._most = 0.0, 1.0  # greatest, and the largest class's share then
        self._score, self._information = _Fall(), _Fall()
        self._reported = False

    def see(self, predicted: Mapping[str, int], score: float, round_idx: int, information: float | None = None) -> str:
        """Text of a warning about a validation: none if it is about as good as those before, or there was one already.

        Args:
            predicted: How often each class was predicted, by its name.
            score: `fedlit.functional.information_score`.
            round_idx: Of the last round before.
            information: `fedlit.functional.neighbourhood_information` of the predicted classes, among inputs as they
                come; ``None`` where nobody has looked for neighbours.
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
