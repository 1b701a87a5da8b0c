"""Features that were extracted before: one vector per sample, from .npz files or a folder of .mat files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedlit.checks import check_one_of
from fedlit.data.base import DomainDataModule
from fedlit.data.files import read_mat, read_npz
from fedlit.data.normalising import HOW, Normalise, feature_normaliser
from fedlit.data.raw_inputs import RawInputs
from fedlit.data.samples import DatasetNotFoundError, Domain, check_data, refuse_data
from fedlit.data.source import check_classes
from fedlit.data.tables.values import check_once, some
from fedlit.federation.labels import UNLABELLED
from fedlit.federation.names import alike, check_list, difference, shown

Pair = tuple[npt.NDArray[Any], npt.NDArray[Any]]

_MAT_FEATURES = ("fts", "feas", "features")
_MAT_LABELS = ("labels", "label")


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
            standardises each feature with mean and standard deviation of the client's training split;
            ``"zscore_unit"`` does both; ``"ranks"`` takes each feature's rank among the client's training split to
            `normal_scores`, interpolated, and scales to length 1; ``"none"`` leaves them. An exported model of
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
        check_one_of("normalise", normalise, get_args(Normalise))
        self.path = Path(path)
        self.normalise = normalise
        self._wanted = classes
        self.spread = self.path.is_dir()  # others' files may be on their machines
        self._arrays, self._stored_classes = self._read()
        self._all_classes = self._name_classes()
        check_list("classes", classes)
        check_classes(classes)
        for name in classes or ():
            check_one_of("classes", name, self._all_classes)
        self.check_roster()

    def _read(self) -> tuple[dict[str, Pair], list[str] | None]:
        if not self.path.exists():
            raise DatasetNotFoundError(
                f"no features at path={str(self.path)!r} (looked for {str(self.path.absolute())!r}): give the .npz "
                "file, or the folder with one .npz or .mat file per domain, as FeatureDomains documents. fedlit "
                "features and numpy.savez write them; others published DeCAF and SURF features"
            )
        if self.path.is_dir():
            return _read_npz_folder(self.path) if any(self.path.glob("*.npz")) else _read_mat_folder(self.path)
        way_out = "give the folder it is in" if self.path.suffix == ".mat" else ""
        rule = "an .npz file or a folder of .npz or .mat files"
        check_data(self.path.suffix == ".npz", "path", rule, f"the file {str(self.path)!r}", way_out)
        return _read_npz_file(self.path)

    def _labels_at(self, domain: str) -> npt.NDArray[np.int64]:
        """Labels of a domain as stored, from 0, checked."""
        y = self._arrays[domain][1]
        what, rule = f"{domain}_y (labels in {self.path})", "whole numbers of shape (n,)"
        way_out = "number the classes from 0, put their names into the array classes, and give -1 where there is none"
        numbers = y.ndim == 1 and y.dtype.kind in "iuf"
        check_data(numbers, what, rule, f"shape {y.shape} of {y.dtype}", way_out)
        wrong = np.flatnonzero(~np.isfinite(y) | (y % 1 != 0))
        check_data(not len(wrong), what, rule, f"{some(y[wrong].tolist())} at samples {some(wrong.tolist())}", way_out)
        return y.astype(np.int64)

    def _features_at(self, domain: str) -> Tensor:
        x = self._arrays[domain][0]
        fits, shown = x.ndim == 2 and x.dtype.kind in "iuf" and x.shape[1] > 0, f"shape {x.shape} of {x.dtype}"
        check_data(fits, f"{domain}_x (features in {self.path})", "numbers of shape (n, d)", shown)
        return torch.from_numpy(x.astype(np.float32))  # also out of uint8, in which arithmetic wraps around

    def _name_classes(self) -> list[str]:
        names = self._stored_classes
        if names is not None:
            check_once(names, f"classes (in {self.path})", "rename them, or give their samples one label")
            for group in alike(names):
                got = f"{shown(group)}, which differ in {difference(group)}"
                way_out = "rename one, or name all in classes if they are different"
                check_data({*group} <= {*(self._wanted or ())}, "classes", "different names", got, way_out)
            return names
        labels = [self._labels_at(name) for name in self._arrays]
        highest, size = max(int(y.max(initial=0)) for y in labels), sum(map(len, labels))
        way_out = "number the classes from 0 without gaps, or name them in classes"
        check_data(highest <= size, f"labels in {self.path}", f"up to {size}, as many as samples", highest, way_out)
        return [str(label) for label in range(highest + 1)]

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """As of the base; and labels without names must begin at 0."""
        super().check_facts(facts)
        has = {name: each["has"] for name, each in facts.items() if each["has"] is not None}
        named = self._stored_classes is not None or self._wanted is not None
        way_out = f"subtract 1, or name the classes that there are in classes, of {self._all_classes[1:]}"
        begin_at_0 = named or not has or any(each[0] for each in has.values())
        check_data(begin_at_0, "labels", "numbers from 0", f"no 0 in {[*has]}", way_out)
        later = [] if named else [name for name, each in has.items() if not each[0]]
        if later:
            text = "have no label 0, and others have: if they count from 1, subtract 1 from their labels"
            warnings.warn(f"samples of {', '.join(later)} {text}", stacklevel=2)

    def domain_names(self) -> list[str]:
        """Return domains at the path, in the order in which they are stored."""
        return [*self._arrays]

    def class_names(self) -> list[str]:
        """Return the classes kept; those that have no names are called by their labels."""
        return self._all_classes if self._wanted is None else self._wanted

    def load(self, domain: str) -> Domain:
        """Return features of one domain as floats."""
        x, y = self._features_at(domain), torch.from_numpy(self._labels_at(domain))
        rows = torch.arange(len(x))
        if len(x) == len(y) and self._wanted is not None:
            if len(y) and not UNLABELLED <= int(y.min()) <= int(y.max()) < len(self._all_classes):
                return Domain(x, y)  # the base class refuses the labels
            new = torch.tensor([self._wanted.index(c) if c in self._wanted else -1 for c in self._all_classes])
            unknown = y == UNLABELLED
            kept = unknown | (new[y] >= 0)
            x, y, rows = x[kept], torch.where(unknown, UNLABELLED, new[y])[kept], rows[kept]
        # a length is not finite either where squares are not
        usable = torch.linalg.vector_norm(x, dim=1).isfinite() if self.normalise == "unit" else x.isfinite().all(dim=1)
        bad = rows[~usable].tolist()
        rule = "finite numbers" + (" with a length that is finite" if self.normalise == "unit" else "")
        way_out = "leave these samples out, scale features down, or fill in what is missing"
        what = f"{domain}_x (features in {self.path})"
        check_data(not bad, what, rule, f"others at samples {some(bad)}", way_out)
        return Domain(x, y)

    def finish(self, x: Tensor, train: Tensor) -> Tensor:
        """Normalise, with statistics of the training split at ``train`` where there are any."""
        if self.normalise == "none":
            return x
        normalised: Tensor = feature_normaliser(self.normalise, x[train])(x)
        return normalised

    def raw_inputs(self) -> RawInputs | None:
        """Return features as they are in the target's file, and the network that normalises them."""
        if self.normalise == "none":
            return None
        x = self.load(self.target).x
        text = f"Features as they are in {self.path.name!r}; the model {HOW[self.normalise]} by itself."
        network = feature_normaliser(self.normalise, x[self.split(self.target).train])
        return RawInputs(network, x[:1] * 0, text)


def _read_npz_file(path: Path) -> tuple[dict[str, Pair], list[str] | None]:
    """Features and labels of each domain of a file, and the names of the classes, if it has them."""
    arrays = read_npz(path)
    names = [key[:-2] for key in arrays if key.endswith("_x") and len(key) > 2]
    check_data(bool(names), str(path), "of arrays DOMAIN_x and DOMAIN_y for each domain", sorted(arrays))
    known = {"classes"} | {f"{name}_{part}" for name in names for part in "xy"}
    for key, array in arrays.items():
        fits, shown = key in known or array.ndim == 0, f"{key!r} of shape {array.shape}"
        check_data(fits, str(path), "of arrays DOMAIN_x, DOMAIN_y and classes", shown, "rename it or leave it out")
    classes = None
    if "classes" in arrays:
        texts = np.atleast_1d(arrays["classes"])
        classes = [text.decode() if isinstance(text, bytes) else str(text) for text in texts]
    pairs = {}
    for name in names:
        x = arrays[f"{name}_x"]
        pairs[name] = (x, arrays.get(f"{name}_y", np.full(len(x) if x.ndim else 0, UNLABELLED)))
    return pairs, classes


def _read_npz_folder(path: Path) -> tuple[dict[str, Pair], list[str] | None]:
    """The same of all files in a folder."""
    pairs: dict[str, Pair] = {}
    file_of: dict[str, Path] = {}
    classes: dict[str, list[str] | None] = {}
    for file in sorted(path.glob("*.npz")):
        content, classes[file.name] = _read_npz_file(file)
        for name in content.keys() & pairs.keys():
            both = f"{str(file_of[name])!r} and {str(file)!r}"
            refuse_data(name, "a domain of one file", both, "take one away")
        pairs |= content
        file_of |= dict.fromkeys(content, file)
    common = next(iter(classes.values()))
    check_data(all(each == common for each in classes.values()), "classes", "the same in all files", classes)
    return pairs, common


def _read_mat_folder(path: Path) -> tuple[dict[str, Pair], None]:
    """The same of a folder with a .mat file for each domain."""
    pairs = {file.stem: _read_mat_file(file) for file in sorted(path.glob("*.mat"))}
    way_out = "give the folder with these files, or an .npz file"
    check_data(bool(pairs), "path", "a folder with one .npz or .mat file per domain", f"none in {str(path)!r}", way_out)
    return pairs, None


def _read_mat_file(file: Path) -> Pair:
    arrays = read_mat(file)
    x, y = (next((arrays[key] for key in keys if key in arrays), None) for keys in (_MAT_FEATURES, _MAT_LABELS))
    if x is None or y is None:
        rule = f"of features as one of {list(_MAT_FEATURES)} and labels as one of {list(_MAT_LABELS)}"
        refuse_data(str(file), rule, sorted(arrays))
    y, shown = y.reshape(-1), f"features of shape {x.shape} with {y.size} labels"
    is_turned = x.ndim == 2 and len(x) != len(y) and x.shape[1] == len(y)
    check_data(not is_turned, str(file), "of one row per sample", shown, "transpose the features")
    from_1, way_out = not y.size or y.min() >= 1, "add 1, or save the data as .npz, whose labels count from 0"
    check_data(from_1, str(file), "of labels that count from 1", y.min(initial=1), way_out)
    return x, y.astype(np.float64) - 1
