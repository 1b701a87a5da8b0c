"""Heart disease in four hospitals: a small real federation that ships with the package."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedlit.checks import check_one_of
from fedlit.data.base import DomainDataModule
from fedlit.data.plots import plot_components, plot_labels
from fedlit.data.raw_inputs import RawRows, TableNetwork, ZeroIsMissing
from fedlit.data.samples import Domain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOSPITALS = {
    "cleveland": "Cleveland",
    "hungary": "Hungary",
    "switzerland": "Switzerland",
    "va_long_beach": "VA Long Beach",
}
NUMERIC = {
    "age": "age in years",
    "trestbps": "resting blood pressure, mm Hg",
    "chol": "serum cholesterol, mg/dl",
    "thalch": "highest heart rate reached, per minute",
    "oldpeak": "ST depression by exercise, mm",
}
ZERO_IS_MISSING = ("trestbps", "chol")  # nobody alive has a blood pressure or a cholesterol of 0
CATEGORIES = {
    # The code book's categories, fixed in advance: a hospital's columns do not depend on the patients of another.
    "sex": ("Female", "Male"),
    "cp": ("typical angina", "atypical angina", "non-anginal", "asymptomatic"),
    "fbs": ("FALSE", "TRUE"),
    "restecg": ("normal", "st-t abnormality", "lv hypertrophy"),
    "exang": ("FALSE", "TRUE"),
    "slope": ("upsloping", "flat", "downsloping"),
    "ca": ("0", "1", "2", "3"),
    "thal": ("normal", "fixed defect", "reversable defect"),
}
NEVER_MISSING = ("age", "sex", "cp")
RATE = "thalch"
RATE_MEAN, RATE_UNIT = 140.0, 25.0
"""Heart rates are predicted in units of 25 per minute above 140; fixed, so that no hospital reveals its own."""


class HeartDisease(DomainDataModule):
    """Does a patient have heart disease? Four hospitals, 920 patients (UCI, as in Fed-Heart); embedded.

    Hospitals: ``cleveland`` (304 patients), ``hungary`` (293), ``switzerland`` (123), ``va_long_beach`` (200). They
    differ in how many are ill (36 to 93%) and in what was measured: whole columns are missing, and Switzerland has no
    cholesterol at all. Zeros for blood pressure and cholesterol are missing values too.

    Each patient is a vector of 38 numbers: five measurements, a mark for each of the four that can be missing, and
    one-hot categories with one more level for "missing" where that happens. Which category comes where is fixed by the
    code book, so no hospital learns anything from another one to write its table.

    With ``predict="heart_rate"`` it is a regression: the highest heart rate that a patient reaches (``thalch``), in
    units of 25 per minute above 140, from the other measurements, 36 numbers. The 55 patients without it are left out.

    Args:
        predict: ``"disease"`` or ``"heart_rate"``.
        normalise: ``"local"`` standardises the measurements with mean and standard deviation of the client's own
            training split and puts its mean where one is missing (0 where it never measured); nothing is shared.
            ``"none"`` keeps the physical units, with 0 where one is missing.
        target: The hospital that is adapted to.
        kwargs: See `DomainDataModule`.

    References:
        Janosi, Steinbrunn, Pfisterer, Detrano: Heart Disease, UCI Machine Learning Repository 1988, CC BY 4.0.
    """

    def __init__(
        self,
        *,
        predict: Literal["disease", "heart_rate"] = "disease",
        normalise: Literal["local", "none"] = "local",
        target: str = "va_long_beach",
        **kwargs: Any,
    ) -> None:
        super().__init__(target=target, **kwargs)
        check_one_of("predict", predict, ("disease", "heart_rate"))
        check_one_of("normalise", normalise, ("local", "none"))
        self.normalise = normalise
        self.task = "classification" if predict == "disease" else "regression"
        self.numeric = [name for name in NUMERIC if self.task == "classification" or name != RATE]
        self.check_roster()

    def domain_names(self) -> list[str]:
        """Return the four hospitals."""
        return list(HOSPITALS)

    def class_names(self) -> list[str]:
        """Return healthy and ill; or the heart rate."""
        return ["healthy", "disease"] if self.task == "classification" else ["heart rate, 25 per minute above 140"]

    def feature_names(self) -> list[str]:
        """Return names of a patient's numbers."""
        marks = [f"{name} missing" for name in self.numeric if name not in NEVER_MISSING]
        return [*self.numeric, *marks, *(f"{name}={level}" for name in CATEGORIES for level in _levels(name))]

    def load(self, domain: str) -> Domain:
        """Return one hospital's patients; missing measurements are NaN until `finish`."""
        x, y = _table(HOSPITALS[domain], self.task, tuple(self.numeric))
        return Domain(x.clone(), y.clone())

    def finish(self, x: Tensor, train: Tensor) -> Tensor:
        """Standardise and fill in the measurements, with the statistics of the training split at ``train``."""
        x = x.clone()
        numbers = x[:, : len(self.numeric)]
        mean, deviation = self._statistics(numbers[train])
        numbers.sub_(mean).div_(deviation)
        numbers.nan_to_num_(nan=0.0)  # after standardisation 0 is the client's own mean
        return x

    def _statistics(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation by which measurements are standardised, from those of training patients, shape (n, d)."""
        mean, deviation = torch.zeros(numbers.shape[1]), torch.ones(numbers.shape[1])
        for index, column in enumerate(numbers.T if self.normalise == "local" else ()):
            known = column[~column.isnan()]
            if len(known) > 0:
                mean[index] = known.mean()
                # a measurement that is the same for all its known patients has nothing to scale
                deviation[index] = known.std(correction=0) if known.min() < known.max() else 1.0
        return mean, deviation

    def raw_inputs(self) -> RawRows:
        """Return rows of the table, and the network that makes a patient's vector of them."""
        x, train = self.load(self.target).x, self.split(self.target).train
        mean, deviation = self._statistics(x[train, : len(self.numeric)])
        columns = (*((name, None) for name in self.numeric), *((name, _levels(name)) for name in CATEGORIES))
        network = nn.Sequential(
            ZeroIsMissing([self.numeric.index(name) for name in ZERO_IS_MISSING], len(columns)),
            TableNetwork(
                range(len(self.numeric)),
                [index for index, name in enumerate(self.numeric) if name not in NEVER_MISSING],
                [(len(self.numeric) + index, len(_levels(name))) for index, name in enumerate(CATEGORIES)],
                mean.tolist(),
                deviation.tolist(),
            ),
        )
        text = (
            "Rows as they are in heart_disease_uci.csv; the model replaces missing measurements, and standardises them "
            "if the data did, by itself."
        )
        return RawRows(network, torch.zeros(1, len(columns), dtype=torch.float64), text, columns, "missing")

    def plot(self, num_samples: int = 10) -> Figure:
        """Draw patients in two principal components, what is to be predicted, and what hospitals did not measure."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(15, 4.8), layout="constrained")
        scatter, histogram, missing = figure.subplots(1, 3, width_ratios=[1.2, 0.8, 1.2])
        plot_components(self, scatter)
        plot_labels(self, histogram)
        columns = [*NUMERIC, *CATEGORIES]
        names = [client.name for client in self.check_roster()]
        shares = np.array([[_missing_share(name, column) for name in names] for column in columns], np.float32)
        missing.imshow(shares, cmap="Reds", vmin=0, vmax=1, aspect="auto")
        for (row, column), share in np.ndenumerate(shares):
            color = "white" if share > 0.6 else "black"
            missing.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=8, color=color)
        missing.set_xticks(range(len(names)), names, fontsize=8)
        missing.set_yticks(range(len(columns)), columns, fontsize=8)
        missing.set_title("Share of patients without a value")
        return figure


@cache
def patients() -> list[dict[str, str]]:
    """Return the rows of the table as they stand, one per patient."""
    table = resources.files("fedlit.data").joinpath("heart_disease_uci.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(table.splitlines()))


@cache
def _table(hospital: str, task: str, numeric: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    rows = [row for row in patients() if row["dataset"] == hospital]
    if task == "regression":
        rows = [row for row in rows if row[RATE]]
        y = (torch.tensor([float(row[RATE]) for row in rows]) - RATE_MEAN) / RATE_UNIT
    else:
        y = torch.tensor([int(int(row["num"]) > 0) for row in rows])
    return torch.tensor([_vector(row, numeric) for row in rows]), y


def _measurement(row: dict[str, str], name: str) -> float:
    value = float(row[name]) if row[name] else math.nan
    return math.nan if value == 0 and name in ZERO_IS_MISSING else value


def _levels(name: str) -> tuple[str, ...]:
    return CATEGORIES[name] if name in NEVER_MISSING else (*CATEGORIES[name], "missing")


def _vector(row: dict[str, str], numeric: Sequence[str]) -> list[float]:
    numbers = {name: _measurement(row, name) for name in numeric}
    marks = [math.isnan(number) for name, number in numbers.items() if name not in NEVER_MISSING]
    one_hot = [level == (row[name] or "missing") for name in CATEGORIES for level in _levels(name)]
    return [*numbers.values(), *map(float, (*marks, *one_hot))]


def _missing_share(domain: str, column: str) -> float:
    rows = [row for row in patients() if row["dataset"] == HOSPITALS[domain]]
    gone = [math.isnan(_measurement(row, column)) if column in NUMERIC else not row[column] for row in rows]
    return sum(gone) / len(rows)
