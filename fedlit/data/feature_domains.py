"""Features that were extracted before: one vector per sample, from .npz files or a folder of .mat files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedlit.data.base import DatasetLayoutError, DatasetNotFoundError, Domain, DomainDataModule
from fedlit.data.files import read_mat, read_npz
from fedlit.data.raw_inputs import RankNetwork, RawInputs, VectorNetwork
from fedlit.data.table_numbers import some
from fedlit.federation.labels import UNLABELLED
from fedlit.federation.names import alike, check_list, difference, shown

_MAT_FEATURES = ("fts", "feas", "features")
_MAT_LABELS = ("labels", "label")

Normalise = Literal["none", "unit", "zscore", "zscore_unit", "ranks"]

_STANDARDISES = "standardises them with mean and deviation of the target's training samples"
_HOW = {
    "unit": "scales each sample to length 1",
    "zscore": _STANDARDISES,
    "zscore_unit": f"{_STANDARDISES}, then scales each sample to length 1,",
    "ranks": "ranks them among the target's training samples, takes normal scores of the ranks and scales to length 1",
}


class FeatureDomains(DomainDataModule):
    """Feature vectors of several domains, from ``.npz`` files or a folder of ``.mat`` files.

    - ``.npz``: arrays ``DOMAIN_x`` (n, d) and ``DOMAIN_y`` (n,) with labels 0..C-1 for each domain, and optionally
      ``classes``, the C class names. Other entries must be scalars and are ignored. ``fedlit features`` writes such
      files. At the target, samples without a label have -1, and ``DOMAIN_y`` may be left out where none has one.
    - folder of ``.npz`` files: such files of one or more domains each. Those of clients that another process hosts need
      not be there.
    - folder of ``.mat`` files: one ``DOMAIN.mat`` per domain, with ``fts``, ``feas`` or ``features`` (n, d) and
      ``labels`` or ``label``, 1..C, as the DeCAF and SURF features of Office-Caltech are published.

    Args:
        path: The ``.npz`` file, or the folder of ``.npz`` or ``.mat`` files.
        normalise: ``"unit"`` scales each sample to Euclidean length 1 (a sample of zeros stays); ``"zscore"``
            standardises each feature with mean and standard deviation of the client's own training split, and
            ``"zscore_unit"`` scales what comes of it to length 1; ``"ranks"`` takes each feature's rank among the
            client's own training split to the number that a standard normal sample has there (`normal_scores`; between
            two ranks, what lies between), and scales to length 1; ``"none"`` leaves them. Where domains differ in
            brightness or style, what is standardised at each client by itself is more alike. An exported model of
            ``"ranks"`` has all values of the target's training samples in it, each feature's in order.
        classes: Names of the classes to keep, in the order of their new labels; ``None`` keeps all. Samples of
            other classes are left out.
        target: The domain that is adapted to; ``None`` takes the last of the clients.
        kwargs: See `DomainDataModule`.

    Raises:
        DatasetNotFoundError: If there is nothing at ``path``.
        DatasetLayoutError: If it is laid out in another way.
    """

    def __init__(
        self,
        path: str,
        *,
        normalise: Normalise = "unit",
        classes: list[str] | None = None,
        target: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(target=target, **kwargs)
        if normalise not in (known := get_args(Normalise)):
            raise ValueError(f"normalise must be one of {list(known)}, got {normalise!r}")
        self.path = Path(path)
        self.normalise = normalise
        self._wanted = classes
        self.spread = self.path.is_dir()  # others' files may be on their machines
        self._arrays = self._open()
        self._all_classes = self._name_classes()
        check_list("classes", classes)
        for name in classes or ():
            if name not in self._all_classes:
                raise ValueError(f"classes has {name!r}, which is not among the classes {self._all_classes}")
        if classes is not None and len(set(classes)) < max(2, len(classes)):
            raise ValueError(f"classes must name at least 2 classes, each once, got {classes}")
        self.check_roster()

    def _open(self) -> _Arrays:
        if not self.path.exists():
            raise DatasetNotFoundError(
                f"no features at path={str(self.path)!r} (looked for {str(self.path.absolute())!r}): give the .npz "
                "file, or the folder with one .npz or .mat file per domain. FeatureDomains documents the layout: write "
                "them with fedlit features, save the output of any extractor with numpy.savez, or get the DeCAF or "
                "SURF features that others published"
            )
        if self.path.is_dir():
            return _NpzFolder(self.path) if any(self.path.glob("*.npz")) else _MatFolder(self.path)
        if self.path.suffix != ".npz":
            raise DatasetLayoutError(
                f"path must be an .npz file or a folder of .npz or .mat files, got the file {str(self.path)!r}"
                + (": give the folder it is in" if self.path.suffix == ".mat" else "")
            )
        return _NpzFile(self.path)

    def _name_classes(self) -> list[str]:
        names = self._arrays.classes
        if names is not None:
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise DatasetLayoutError(
                    f"classes in {str(self.path)!r} must be different names, got {twice} more than once: rename them, "
                    "or give their samples one label"
                )
            for group in alike(names):
                if not {*group} <= {*(self._wanted or ())}:
                    raise DatasetLayoutError(
                        f"classes in {str(self.path)!r} have {shown(group)}, which differ in {difference(group)}: "
                        "rename one, or name all in classes if they are different"
                    )
            return names
        labels = [self._arrays.labels(name) for name in self._arrays.names]
        highest, most = max(int(y.max(initial=0)) for y in labels), sum(map(len, labels))
        if highest > most:
            raise DatasetLayoutError(
                f"labels in {str(self.path)!r} go up to {highest}, but there are {most} samples in all: number the "
                "classes from 0 without gaps, or name them in classes"
            )
        return [str(label) for label in range(highest + 1)]

    def check_facts(self, told: Mapping[str, Any]) -> None:
        """As of the base; and labels that nobody has named must begin at 0."""
        super().check_facts(told)
        has = {name: each["has"] for name, each in told.items() if each["has"] is not None}
        if self._arrays.classes is None and self._wanted is None and has and not any(each[0] for each in has.values()):
            raise DatasetLayoutError(
                f"labels must begin at 0, and no sample of {[*has]} has 0: if theirs count from 1, subtract 1; if not, "
                f"name the classes that there are in classes, of {self._all_classes[1:]}"
            )

    def domain_names(self) -> list[str]:
        """Domains found at the path, in the order in which they are stored."""
        return self._arrays.names

    def class_names(self) -> list[str]:
        """The classes kept; those that have no names are called by their labels."""
        return self._all_classes if self._wanted is None else self._wanted

    def load(self, domain: str) -> Domain:
        """Features of one domain as floats."""
        x, y = self._arrays.features(domain), torch.from_numpy(self._arrays.labels(domain))
        rows = torch.arange(len(x))
        if len(x) == len(y) and self._wanted is not None:
            if len(y) and int(y.max()) >= len(self._all_classes):
                return Domain(x, y)  # the base class refuses the labels
            new = torch.tensor([self._wanted.index(c) if c in self._wanted else -1 for c in self._all_classes])
            unknown = y == UNLABELLED
            kept = unknown | (new[y] >= 0)
            x, y, rows = x[kept], torch.where(unknown, UNLABELLED, new[y])[kept], rows[kept]
        # a length is not finite either where squares are not
        usable = torch.linalg.vector_norm(x, dim=1).isfinite() if self.normalise == "unit" else x.isfinite().all(dim=1)
        bad = rows[~usable].tolist()
        if bad:
            what = "NaN, infinity or a length that is infinite" if self.normalise == "unit" else "NaN or infinity"
            raise DatasetLayoutError(
                f"features of domain {domain!r} in {str(self.path)!r} hold {what} at samples {some(bad)}: "
                "leave these samples out, scale features down, or fill in what is missing"
            )
        return Domain(x, y)

    def finish(self, x: Tensor, train: Tensor) -> Tensor:
        """Normalise, with statistics of the training split at ``train`` where there are any."""
        if self.normalise == "ranks":
            ranked: Tensor = RankNetwork(x[train])(x)
            return ranked
        if self.normalise.startswith("zscore"):
            mean, deviation = _statistics(x[train])
            x = (x - mean) / deviation
        if self.normalise.endswith("unit"):
            length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
            x = x / length.clamp(min=torch.finfo(x.dtype).tiny)
        return x

    def raw_inputs(self) -> RawInputs | None:
        """Features as they are in the target's file, and the network that normalises them."""
        if self.normalise == "none":
            return None
        x = self.load(self.target).x
        train = x[self.split(self.target).train]
        network: nn.Module
        if self.normalise == "ranks":
            network = RankNetwork(train)
        else:
            own = _statistics(train) if self.normalise != "unit" else (torch.zeros(x.shape[1]), torch.ones(x.shape[1]))
            network = VectorNetwork(*own, unit=self.normalise != "zscore")
        words = f"Features as they are in {self.path.name!r}; the model {_HOW[self.normalise]} by itself."
        return RawInputs(network, x[:1] * 0, words)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each feature, 1 of a constant one, which has nothing to scale."""
    # the computed deviation of a constant feature may be a rounding error instead of 0
    constant = x.amin(dim=0) == x.amax(dim=0)
    return x.mean(dim=0), x.std(dim=0, correction=0).masked_fill(constant, 1.0)


class _Arrays(ABC):
    """Names of the domains at a path, and their arrays when asked for."""

    names: list[str]
    classes: list[str] | None = None

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def raw(self, domain: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Features and labels (from 0) of one domain, as stored."""

    def labels(self, domain: str) -> npt.NDArray[np.int64]:
        y = self.raw(domain)[1]
        if y.ndim != 1 or y.dtype.kind not in "iuf":
            raise DatasetLayoutError(
                f"labels of domain {domain!r} in {str(self.path)!r} must be whole numbers of shape (n,), got shape "
                f"{y.shape} of {y.dtype}: number the classes from 0, and put their names into the array classes"
            )
        wrong = np.flatnonzero(~np.isfinite(y) | (y % 1 != 0))
        if len(wrong):
            raise DatasetLayoutError(
                f"labels of domain {domain!r} in {str(self.path)!r} must be whole numbers of shape (n,), got "
                f"{y[wrong[0]]} at sample {wrong[0]} ({len(wrong)} such): number the classes from 0, and give samples "
                f"without a label {UNLABELLED}"
            )
        return y.astype(np.int64)

    def features(self, domain: str) -> Tensor:
        x = self.raw(domain)[0]
        if x.ndim != 2 or x.dtype.kind not in "iuf" or x.shape[1] == 0:
            raise DatasetLayoutError(
                f"features of domain {domain!r} in {str(self.path)!r} must be numbers of shape (n, d), got shape "
                f"{x.shape} of {x.dtype}: give one vector per sample"
            )
        return torch.from_numpy(x.astype(np.float32))  # also out of uint8, in which arithmetic wraps around


class _NpzFile(_Arrays):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.arrays = read_npz(path)
        self.names = [key[:-2] for key in self.arrays if key.endswith("_x") and len(key) > 2]
        if not self.names:
            raise DatasetLayoutError(
                f"{str(path)!r} must hold arrays DOMAIN_x and DOMAIN_y for each domain, got {sorted(self.arrays)}"
            )
        known = {"classes"} | {f"{name}_{part}" for name in self.names for part in "xy"}
        for key, array in self.arrays.items():
            if key not in known and array.ndim > 0:
                raise DatasetLayoutError(
                    f"{str(path)!r} has an array {key!r} of shape {array.shape} that is neither DOMAIN_x, DOMAIN_y nor "
                    "classes: rename it or leave it out"
                )
        if "classes" in self.arrays:
            names = np.atleast_1d(self.arrays["classes"])
            self.classes = [name.decode() if isinstance(name, bytes) else str(name) for name in names]

    def raw(self, domain: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        x = self.arrays[f"{domain}_x"]
        return x, self.arrays.get(f"{domain}_y", np.full(len(x) if x.ndim else 0, UNLABELLED))


class _NpzFolder(_Arrays):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.files: dict[str, _NpzFile] = {}
        for file in (_NpzFile(each) for each in sorted(path.glob("*.npz"))):
            for name in file.names:
                if name in self.files:
                    both = f"{str(self.files[name].path)!r} and {str(file.path)!r}"
                    raise DatasetLayoutError(f"{both} both have domain {name!r}: take one away")
                self.files[name] = file
        self.names = list(self.files)
        first = next(iter(self.files.values()))
        self.classes = first.classes
        for other in self.files.values():
            if other.classes != first.classes:
                raise DatasetLayoutError(
                    f"classes of all files in {str(path)!r} must be the same, but {first.path.name!r} has "
                    f"{first.classes} and {other.path.name!r} {other.classes}: write them with the same classes"
                )

    def raw(self, domain: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        return self.files[domain].raw(domain)


class _MatFolder(_Arrays):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.names = sorted(file.stem for file in path.glob("*.mat"))
        self.cache: dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}
        if not self.names:
            raise DatasetLayoutError(
                f"folder {str(path)!r} must hold one .npz or .mat file per domain, got none: give the folder with "
                "these files, or an .npz file"
            )

    def raw(self, domain: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        if domain not in self.cache:
            self.cache[domain] = self._read(self.path / f"{domain}.mat")
        return self.cache[domain]

    def _read(self, file: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        found = read_mat(file)
        x, y = (next((found[key] for key in keys if key in found), None) for keys in (_MAT_FEATURES, _MAT_LABELS))
        if x is None or y is None:
            raise DatasetLayoutError(
                f"{str(file)!r} must hold features as one of {list(_MAT_FEATURES)} and labels as one of "
                f"{list(_MAT_LABELS)}, got {sorted(found)}"
            )
        y = y.reshape(-1)
        if x.ndim == 2 and len(x) != len(y) and x.shape[1] == len(y):
            raise DatasetLayoutError(
                f"features in {str(file)!r} must have one row per sample, got shape {x.shape} with {len(y)} labels: "
                "transpose them"
            )
        if y.size and y.min() < 1:
            raise DatasetLayoutError(
                f"labels in {str(file)!r} must count from 1, got {y.min()}: add 1, or save the data as .npz, whose "
                "labels count from 0"
            )
        return x, y.astype(np.float64) - 1
