"""Lightning data modules that give every client of a federation a domain of its own.

Each data set is one class on `DomainDataModule`: `Digits` and `HeartDisease` ship with the package; `CSVDomains`,
`ImageDomains` and `FeatureDomains` read tables, folders and files of one's own; `DigitFive` gathers five sets of
digits, and `PublishedDigitFive` reads those of the benchmark; `FashionMNIST`, `CIFAR10` and `ColoredMNIST` shift known
data sets. `SignalDomains` reads time series; `HAPT`, `PAMAP2` and
`Widar3` are those of sensors.
"""

from __future__ import annotations

from fedlit.data.base import DomainDataModule
from fedlit.data.csv_domains import CSVDomains
from fedlit.data.digit_five import DigitFive
from fedlit.data.digits import Digits
from fedlit.data.feature_domains import FeatureDomains
from fedlit.data.hapt import HAPT
from fedlit.data.heart import HeartDisease
from fedlit.data.image_domains import ImageDomains
from fedlit.data.mnist_likes import CIFAR10, ColoredMNIST, FashionMNIST
from fedlit.data.pamap2 import PAMAP2
from fedlit.data.published_digits import PublishedDigitFive
from fedlit.data.raw_inputs import RawInputs
from fedlit.data.samples import DatasetLayoutError, DatasetNotFoundError, Domain, DomainDataset
from fedlit.data.signal_domains import SignalDomains
from fedlit.data.widar3 import Widar3
from fedlit.federation.loader import FederatedLoader

__all__ = [
    "CIFAR10",
    "HAPT",
    "PAMAP2",
    "CSVDomains",
    "ColoredMNIST",
    "DatasetLayoutError",
    "DatasetNotFoundError",
    "DigitFive",
    "Digits",
    "Domain",
    "DomainDataModule",
    "DomainDataset",
    "FashionMNIST",
    "FeatureDomains",
    "FederatedLoader",
    "HeartDisease",
    "ImageDomains",
    "PublishedDigitFive",
    "RawInputs",
    "SignalDomains",
    "Widar3",
]
