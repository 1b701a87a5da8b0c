"""List files of images, lines of ``path label`` as DomainNet, ImageCLEF-DA and VisDA-C publish them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from posixpath import normpath

from fedlit.checks import check
from fedlit.data.samples import DatasetNotFoundError, check_data, refuse_data
from fedlit.data.tables.values import some

DOMAIN = "{domain}"


@dataclass(frozen=True)
class ImageLists:
    """Images of each domain by class; paths are texts with forward slashes, of which there may be 600,000.

    Attributes:
        images: Paths by class, in the order of the files, those for training first; none of domains that are not read.
        tests: Paths that the domain's list for testing has.
        numbers: Label of each class in the files.
    """

    images: dict[str, dict[str, list[str]]]
    tests: dict[str, frozenset[str]]
    numbers: dict[str, int]


def read_lists(root: Path, lists: str, test_lists: str | None, wanted: Collection[str] | None = None) -> ImageLists:
    """Read the list files of domains below ``root``; `ImageDomains` documents both patterns.

    Args:
        root: Folder of the data set.
        lists: Path of a list file below it.
        test_lists: The same, of images to test on.
        wanted: Domains to read, ``None`` for all; of others, whose files may be no lists of images, only the names are.

    Raises:
        DatasetNotFoundError: If there is no such file.
        DatasetLayoutError: If a file has other lines, or files do not fit together.
    """
    of_train = _files(root, "lists", lists)
    of_test = {} if test_lists is None else _files(root, "test_lists", test_lists)
    train, test = (
        {name: _read(root, file) for name, file in files.items() if wanted is None or name in wanted}
        for files in (of_train, of_test)
    )
    rule = f"files of the domains that lists has, {sorted(train)}"
    fits = test_lists is None or {*test} == {*train}
    check_data(fits, "test_lists", rule, f"files of {sorted(test)}", "name the domains in clients, or mend the pattern")
    tests = {name: frozenset(path for paths in each.values() for path in paths) for name, each in test.items()}
    for name, each in train.items():
        both = [path for paths in each.values() for path in paths if path in tests.get(name, ())]
        rule, shown = "without images for training", f"{len(both)} of them, {some(both)}"
        check_data(not both, f"test_lists ({name})", rule, shown)
    names = _names({(name, part): each for part, of in enumerate((train, test)) for name, each in of.items()})
    images: dict[str, dict[str, list[str]]] = {name: {} for name in of_train}
    for name in train:
        for of in (train, test):
            for number, paths in sorted(of.get(name, {}).items()):
                images[name].setdefault(names.get(number, str(number)), []).extend(paths)
    every = {number for of in (train, test) for each in of.values() for number in each}
    return ImageLists(images, tests, {names.get(number, str(number)): number for number in every})


def check_there(domain: str, paths: list[Path]) -> None:
    """Refuse a domain whose list names images that are missing: how many, and the first of them."""
    missing = [str(path) for path in paths if not path.is_file()]
    way_out = "unpack the archive below root, or take their lines out of the list"
    shown = f"{len(missing)} of {len(paths)} that are missing: {some(missing)}"
    check_data(not missing, f"lists ({domain})", "images that are there", shown, way_out)


def _files(root: Path, argument: str, pattern: str) -> dict[str, Path]:
    """The files that have the name that ``pattern`` gives, by domain."""
    rule = f"a path below root with {DOMAIN} in it, once"
    check(pattern.count(DOMAIN) == 1 and not Path(pattern).is_absolute(), argument, rule, pattern)
    check(not {*pattern} & {*"*?["}, argument, "a path without *, ? and [", pattern, "give the name as it is")
    before, after = map(re.escape, pattern.split(DOMAIN))
    matches = {path: re.fullmatch(f"{before}([^/]+){after}", path.relative_to(root).as_posix())
               for path in sorted(root.glob(pattern.replace(DOMAIN, "*"))) if path.is_file()}  # fmt: skip
    found = {match[1]: path for path, match in matches.items() if match}
    if not found:
        raise DatasetNotFoundError(
            f"no list files {argument}={pattern!r} in root={str(root)!r} (looked for {str(root.absolute())!r}), with "
            f"the name of a domain in place of {DOMAIN}: put the published lists there, or mend the pattern"
        )
    return dict(sorted(found.items()))


def _read(root: Path, file: Path) -> dict[int, list[str]]:
    """Images by label; their paths start at the root or, if none is there, at the list's folder."""
    lines: list[tuple[str, int]] = []
    text = file.read_text(encoding="utf-8-sig", errors="replace")
    for count, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        name, label = [*line.strip().rsplit(maxsplit=1), ""][:2]
        fits = label.isdecimal() and not name.startswith("/") and ".." not in name.split("/")
        rule, way_out = "a path below root, a blank and a whole number", "mend the line, or name the domains in clients"
        check_data(fits, f"{file} (line {count})", rule, repr(line), way_out)
        lines.append((normpath(name), int(label)))
    check_data(bool(lines), str(file), "lines of a path and a whole number", "none", "get it again")
    twice = [name for name, times in Counter(name for name, _ in lines).items() if times > 1]
    shown = f"{len(twice)} named again: {some(twice)}"  # one copy would be trained on, and another tested on
    check_data(not twice, str(file), "each image once", shown, "leave one line of each")
    base = next((each for each in (root, file.parent) if any((each / name).is_file() for name, _ in lines)), root)
    start = (base / "x").as_posix()[:-1]  # empty for the working directory, as in the text of a Path
    found: dict[int, list[str]] = {}
    for name, number in lines:
        found.setdefault(number, []).append(start + name)
    return found


def _names(files: Mapping[tuple[str, int], Mapping[int, list[str]]]) -> dict[int, str]:
    """Names of labels, by the folders of their images; none where folders are no classes, as in a domain without any.

    Lists that number classes in different ways are refused.
    """
    names: dict[int, str] = {}
    for (domain, _), images in files.items():
        folders = {
            label: Counter(path.rpartition("/")[0].rpartition("/")[2] for path in paths)
            for label, paths in images.items()
        }
        # a few images may lie elsewhere, as in a folder below that of their class
        most = {label: each.most_common(1)[0] for label, each in folders.items()}
        first = {label: name for label, (name, count) in most.items() if 2 * count > len(images[label])}
        if len({*first.values()}) < max(2, len(images)):
            continue
        for label, name in first.items():
            known = names.setdefault(label, name)
            if known != name:
                got = f"label {label} for {known!r}, and for {name!r} in the list of {domain!r}"
                refuse_data("lists", "one class for each label in all domains", got, "number classes alike")
    twice = {name for name in names.values() if [*names.values()].count(name) > 1}
    got = f"several labels for {some(sorted(twice))}"
    check_data(not twice, "lists", "one label for each class in all domains", got, "number classes alike")
    return names
