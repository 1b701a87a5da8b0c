"""Labels from the column of a table that is to be predicted: classes, or numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedlit.data.samples import DatasetLayoutError
from fedlit.data.tables.messages import cells, lines, some
from fedlit.data.tables.numbers import NumberFormat, texts_of
from fedlit.federation.labels import UNLABELLED

if TYPE_CHECKING:
    import pandas as pd

_MAX_CLASSES = 50
"""Different labels that may be classes without being named."""


@dataclass(frozen=True)
class LabelReader:
    """Reads labels of the tables of a federation; ``classes`` if the user named them. The target may lack labels."""

    label: str
    numbers: NumberFormat
    classes: Sequence[str] | None
    target: str

    def texts(self, values: pd.Series[Any], where: str) -> pd.Series[Any]:
        """Return classes as texts, missing where unknown; refuse what does not look like classes and is not named."""
        texts = texts_of(values)
        known = texts.dropna()
        numbers = self.numbers.numbers(known)
        others, fractions = known[numbers.isna()], known[numbers % 1 != 0]
        if self.classes is None:
            way_out = self.numbers.way_out({*known}) if len(others) else ""
            if way_out:
                raise DatasetLayoutError(
                    f"label={self.label!r} of {where} has numbers that are written as {cells(others)}, with "
                    f"decimal={self.numbers.decimal!r}: {way_out}; if they are names, name the classes in classes"
                )
            if (len(fractions) and not len(others)) or known.nunique() > _MAX_CLASSES:
                raise DatasetLayoutError(
                    f"label={self.label!r} of {where} looks continuous, with {known.nunique()} different values, such "
                    f"as {cells(fractions if len(fractions) else known)}: give task: regression, name the classes in "
                    "classes, or choose another column"
                )
        if str(UNLABELLED) in (self.classes or ()):
            return texts
        return texts.where(self.numbers.numbers(texts) != UNLABELLED, None)

    def class_numbers(self, values: pd.Series[Any], classes: Sequence[str], client: str, where: str) -> Tensor:
        """Return the number of each row's class, int64, shape (n,), -1 where it is not known."""
        texts = self.texts(values, where)
        unknown = texts[texts.notna() & ~texts.isin([*classes])]
        if len(unknown):
            raise DatasetLayoutError(
                f"label={self.label!r} of {where} has {some(unknown)}, which classes {[*classes]} lack "
                f"({lines(unknown.index)}): name all in classes, or mend the labels"
            )
        missing = texts.index[texts.isna()]
        if len(missing) and client != self.target:
            raise DatasetLayoutError(
                f"label={self.label!r} of {where} is empty or -1 in {len(missing)} of {len(texts)} rows, "
                f"{lines(missing)}, where None, NA and the like count as empty unless classes name them, and -1, too; "
                f"only the target ({self.target!r}) may lack labels: leave these rows out, make {client!r} the target, "
                "or name all in classes if one of these is a class"
            )
        number_of = {name: number for number, name in enumerate(classes)}
        return torch.tensor([number_of.get(text, UNLABELLED) for text in texts], dtype=torch.int64)

    def numbers_to_predict(self, values: pd.Series[Any], client: str, where: str) -> Tensor:
        """Return the number of each row, float64, shape (n,), NaN where it is not known."""
        numbers = self.numbers.numbers(values)
        wrong = values[numbers.isna() & values.notna()]
        if len(wrong):
            way_out = self.numbers.way_out({*texts_of(values).dropna()})
            raise DatasetLayoutError(
                f"label={self.label!r} of {where} must be numbers with decimal={self.numbers.decimal!r}, got "
                f"{cells(wrong)}: {way_out or 'mend them, name them in missing_values, or give task: classification'}"
            )
        missing = values.index[numbers.isna()]
        if len(missing) and client != self.target:
            raise DatasetLayoutError(
                f"label={self.label!r} of {where} is empty in {len(missing)} of {len(numbers)} rows "
                f"({lines(missing)}), and only the target ({self.target!r}) may lack labels: leave these rows out"
            )
        infinite = values[numbers.abs() == float("inf")]
        if len(infinite):
            raise DatasetLayoutError(
                f"{where} has infinite numbers in {self.label!r} (label, {lines(infinite.index)}): mend them"
            )
        return torch.tensor([*numbers.astype(float)], dtype=torch.float64)
