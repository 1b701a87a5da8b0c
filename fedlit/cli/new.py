"""``fedlit new csv|images|features DIR``: a configuration that runs, with data of one's own or with an example."""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_DESCRIPTION = """
Write a folder with experiment.yaml, which trains and compares methods, and README.md, which has the commands from
training to an exported model. Without --data it comes with a small example, so that all of it runs as it is; with
--data it reads your files. Nothing that is there is written over.
"""

_KINDS = {
    "csv": "tables, a CSV or Parquet file for each client, or one file and --site",
    "images": "images in folders, DIR/CLIENT/CLASS/*.jpg",
    "features": "feature vectors in an .npz file, NAME_x and NAME_y for each client",
}
_RECOMMENDED = {"csv": "SourceOnly", "images": "FedAvg", "features": "SourceOnly"}
"""The class of the recommended method, which names the folder of its runs."""

_TABLES = (".csv", ".tsv", ".parquet")
_PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")

_FEW = 20
"""Labels of the target that FedAvg is given beside methods that are given none."""


@dataclass(frozen=True)
class Study:
    """What a configuration says of the data.

    Args:
        files: Where they are, as the configuration has it.
        target: The client that is adapted to.
        labelled: Samples of the target whose class is known.
        about: What the data are, in a sentence.
        listing: Entries of the README's list, for what is written besides.
        place: Where to put one's own data, in sentences.
        more: Placeholders of this kind of data.
    """

    files: object
    target: str
    labelled: int
    about: str
    listing: str
    place: str
    more: dict[str, object]


def new(args: list[str]) -> None:
    """Write the folder, and say what to do with it."""
    parser = argparse.ArgumentParser("fedlit new", description=_DESCRIPTION)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="csv|images|features")
    for kind, what in _KINDS.items():
        one = kinds.add_parser(kind, help=what, description=f"A study of {what}.")
        one.add_argument("dir", type=Path, metavar="DIR", help="folder that is made, or that has your data already")
        one.add_argument("--data", type=Path, metavar="PATH", help="your data; without it an example is written")
        one.add_argument("--target", metavar="NAME", help="client without labels, which is adapted to; with --data")
        if kind == "csv":
            one.add_argument("--label", metavar="COLUMN", help="column of the classes to predict; with --data")
            one.add_argument("--id", metavar="COLUMN", help="column that names the rows, which is no feature")
            one.add_argument("--site", metavar="COLUMN", help="column of the client's name, if all are in one file")
            one.add_argument("--leave_out", metavar="COLUMN", nargs="+", help="columns that are no features")
            one.add_argument("--categories", metavar="COLUMN", nargs="+", help="categories that look like numbers")
            one.add_argument("--classes", metavar="CLASS", nargs="+", help="their names, in the order of their labels")
            one.add_argument("--missing_values", metavar="TEXT", nargs="+", help="texts that stand for missing values")
            one.add_argument("--separator", help="between columns, such as ';'")
            one.add_argument("--decimal", help="sign before decimals, such as ','")
            one.add_argument("--encoding", help="of the text, such as latin-1")
        if kind == "images":
            one.add_argument("--image_size", type=int, help="side of the square that the network sees, in pixels")
    given = parser.parse_args(args)
    _check(given)
    writers: list[Callable[[], None]] = []
    study = _OWN[given.kind](given) if given.data is not None else _EXAMPLES[given.kind](given.dir, writers)
    texts = {"experiment.yaml": _configuration(given.kind, study), "README.md": _readme(given.kind, given.dir, study)}
    given.dir.mkdir(parents=True, exist_ok=True)
    for write in writers:
        write()
    for name, text in texts.items():
        (given.dir / name).write_text(text, encoding="utf-8")
    print(f"wrote {given.dir / 'experiment.yaml'} and {given.dir / 'README.md'}: {study.about}")
    print(f"next: cd {given.dir} && fedlit fit --config experiment.yaml    # README.md has what follows")


def _check(given: argparse.Namespace) -> None:
    """Refuse what would write over something, and options that belong to one's own data."""
    folder: Path = given.dir
    if folder.exists() and not folder.is_dir():
        sys.exit(f"fedlit: DIR must be a folder, or a new name, and '{folder}' is a file: give another")
    there = [name for name in ("experiment.yaml", "README.md") if (folder / name).exists()]
    if there:
        sys.exit(
            f"fedlit: '{folder}' has {' and '.join(there)} already, and nothing is written over: give another DIR, or "
            "move it away"
        )
    if given.data is not None:
        if not given.data.exists():
            sys.exit(f"fedlit: --data '{given.data}' is not there (looked for '{given.data.absolute()}')")
        return
    own = [key for key in vars(given) if key not in ("kind", "dir", "data") and getattr(given, key) is not None]
    if own:
        sys.exit(f"fedlit: --{own[0]} is of your own data: give --data PATH, too, or leave it out for the example")
    found = _data_in(folder, given.kind)
    if found:
        sys.exit(
            f"fedlit: '{folder}' has data already ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''}): give "
            f"--data {folder} to use them, or another DIR for an example"
        )
    for name in ("data", "features.npz"):
        if (folder / name).exists():
            sys.exit(
                f"fedlit: '{folder / name}' is there, where the example would be, and nothing is written over: give "
                f"--data {folder / name} if these are your data, or another DIR"
            )


def _data_in(folder: Path, kind: str) -> list[str]:
    """Names of what looks like one's own data."""
    if not folder.is_dir():
        return []
    if kind == "csv":
        return sorted(file.name for file in folder.iterdir() if file.suffix.lower() in _TABLES)
    if kind == "features":
        return sorted(file.name for file in folder.glob("*.npz"))
    found = (file for depth in ("*/*", "*/*/*") for file in folder.glob(depth))
    return sorted({file.relative_to(folder).parts[0] for file in found if file.suffix.lower() in _PICTURES})


# ---------------------------------------------------------------- what is written


def _configuration(kind: str, study: Study) -> str:
    few = min(_FEW, study.labelled // 4)
    own = f'name: "FedAvg, {few} target labels", data: {{target_labels: {few}}}'
    fedavg = f"  - {{class_path: fedlit.methods.FedAvg, {own}}}\n"
    if not few:
        fedavg = (
            "  # FedAvg needs labels of the target: {class_path: fedlit.methods.FedAvg, data: {target_labels: 20}}\n"
        )
    values = {"files": _flow(study.files), "target": _flow(study.target), "fedavg": fedavg}
    return _template(f"{kind}.yaml", values | study.more)


def _readme(kind: str, folder: Path, study: Study) -> str:
    run = f"runs/recommended/{_RECOMMENDED[kind]}/version_0"
    name = folder.absolute().name or "Study"
    values = {"name": name, "about": study.about, "listing": study.listing, "place": study.place, "run": run}
    return _template(f"{kind}.md", values | {"root": study.files})


def _template(name: str, values: dict[str, Any]) -> str:
    text = files("fedlit.cli").joinpath("templates", name).read_text(encoding="utf-8")
    return Template(text).substitute(values)


def _flow(value: object) -> str:
    """A value in one line of YAML."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _seen_from(folder: Path, path: Path) -> str:
    """A path as it is written in a configuration in a folder: relative to it, if it lies in it."""
    path, folder = path.resolve(), folder.resolve()
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


# ---------------------------------------------------------------- one's own data


def _own_tables(given: argparse.Namespace) -> Study:
    from fedlit.data import CSVDomains, DatasetLayoutError

    options = ("id", "leave_out", "categories", "classes", "missing_values", "separator", "decimal", "encoding", "site")
    arguments = {key: getattr(given, key) for key in options if getattr(given, key) is not None}
    if given.data.is_file() and given.site is None:
        sys.exit(
            f"fedlit: --data '{given.data}' is one file: give --site COLUMN, the column that says whose a row is, or a "
            "folder with a file for each client"
        )
    try:
        probe = CSVDomains(str(given.data), label=given.label or "", **arguments)
        names = probe.domain_names()
        columns = [str(name) for name in probe.table(names[0]).columns]
        if given.label is None:
            sys.exit(f"fedlit: --label must name the column to predict, and the tables have {columns}")
        _check_target(given.target, names)
        data = CSVDomains(str(given.data), label=given.label, target=given.target, **arguments)
        told = {name: data.facts(name) for name in names}
        data.check_facts(told)
        labelled = int(data._label_texts(given.target).notna().sum())
    except DatasetLayoutError as error:
        sys.exit(f"fedlit: {error}. What it says to give is an option of fedlit new csv, with -- before it: --help")
    features = list(told[names[0]]["columns"][names[0]])
    for name in features:
        if all(_counts(data.table(client)[name]) for client in names):
            print(f"fedlit: column {name!r} has another whole number in each row: if it names them, give --id {name}")
    if given.site is None:
        paths = {name: _seen_from(given.dir, data._paths[name]) for name in names}
    own = "".join(f"    {key}: {_flow(value)}\n" for key, value in arguments.items())
    total = sum(len(data.table(name)) for name in names)
    return Study(
        paths if given.site is None else _seen_from(given.dir, given.data),
        given.target,
        labelled,
        f"tables of {len(names)} clients ({', '.join(names)}), {total} rows; {given.target!r} is adapted to.",
        "",
        f"They are read from `{given.data}`; other files of the same columns may take their places.",
        {"label": _flow(given.label), "own": own, "lr": f"{2 / len(features):.2g}"},
    )


def _counts(values: Any) -> bool:
    """Whether a column has another whole number in each row, as one that numbers them."""
    known = values.dropna()
    return bool(len(values) > _FEW and len(known) == len(values) == known.nunique() and known.dtype.kind == "i")


def _own_images(given: argparse.Namespace) -> Study:
    from fedlit.data import ImageDomains

    size = 64 if given.image_size is None else given.image_size
    names = ImageDomains(str(given.data), image_size=size).domain_names()
    _check_target(given.target, names)
    data = ImageDomains(str(given.data), target=given.target, image_size=size)
    classes, labelled = data.class_names(), int((data.load(given.target).y >= 0).sum())
    return Study(
        _seen_from(given.dir, given.data),
        given.target,
        labelled,
        f"images of {len(names)} clients ({', '.join(names)}) in {len(classes)} classes; {given.target!r} is adapted "
        "to.",
        "",
        f"They are read from `{given.data}`, which has a folder for each client, and in it one for each class.",
        {"image_size": size, "rounds": 40},
    )


def _own_features(given: argparse.Namespace) -> Study:
    from fedlit.data import FeatureDomains

    names = FeatureDomains(str(given.data)).domain_names()
    _check_target(given.target, names)
    data = FeatureDomains(str(given.data), target=given.target)
    sets = {name: data.load(name) for name in names}
    width = sets[names[0]].x.shape[1]
    return Study(
        _seen_from(given.dir, given.data),
        given.target,
        int((sets[given.target].y >= 0).sum()),
        f"{width} features of {len(names)} clients ({', '.join(names)}) in {data.num_classes} classes; "
        f"{given.target!r} is adapted to.",
        "",
        f"They are read from `{given.data}`.",
        {},
    )


def _check_target(target: str | None, names: Sequence[str]) -> None:
    if len(names) < 2:
        sys.exit(f"fedlit: --data must have at least 2 clients, a source and the target, and has {[*names]}")
    if target not in names:
        got = "" if target is None else f", got {target!r}"
        sys.exit(f"fedlit: --target must name the client that is adapted to, one of {[*names]}{got}")


# ---------------------------------------------------------------- examples

_HOSPITALS = {
    "Cleveland": "cleveland", "Hungary": "hungary", "Switzerland": "switzerland", "VA Long Beach": "long_beach",
}  # fmt: skip

_LEFT_OUT = ("id", "dataset", "num", "chol", "ca")
"""Columns that the example has otherwise, or not, as whole hospitals did not measure them."""


def _example_tables(folder: Path, writers: list[Callable[[], None]]) -> Study:
    """The embedded patients of four hospitals, as tables that somebody might have."""
    text = files("fedlit").joinpath("data", "heart_disease_uci.csv").read_text(encoding="utf-8")
    patients = [*csv.DictReader(text.splitlines())]
    tables: dict[str, list[dict[str, str]]] = {name: [] for name in _HOSPITALS.values()}
    for patient in patients:
        name = _HOSPITALS[patient["dataset"]]
        row = {"patient": f"{name}-{len(tables[name]) + 1}"}
        row |= {key: value for key, value in patient.items() if key not in _LEFT_OUT}
        if row["trestbps"] and float(row["trestbps"]) == 0:  # nobody alive has a blood pressure of 0
            row["trestbps"] = ""
        tables[name].append(row | {"disease": "yes" if float(patient["num"]) > 0 else "no"})

    def write() -> None:
        (folder / "data").mkdir()
        for name, rows in tables.items():
            with (folder / "data" / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                table = csv.DictWriter(file, list(rows[0]))
                table.writeheader()
                table.writerows(rows)

    writers.append(write)
    columns = len(tables["cleveland"][0]) - 2
    return Study(
        {name: f"data/{name}.csv" for name in tables},
        "long_beach",
        len(tables["long_beach"]),
        "tables of four hospitals as an example (920 patients, UCI heart disease data, CC BY 4.0): who is ill at Long "
        "Beach, which tells nobody who is?",
        "- `data/`: the example, a table for each hospital.\n",
        "The example runs as it is. Then put a CSV or Parquet file for each client into `data/`, in place of those "
        "there.",
        {"label": "disease", "own": "    id: patient  # names the rows, in predictions\n", "lr": f"{2 / columns:.2g}"},
    )


_CLIENTS = ("ink", "outline", "chalk", "colour")
_SHAPES = ("circle", "square", "triangle")


def _example_images(folder: Path, writers: list[Callable[[], None]]) -> Study:
    """Shapes that each client draws in its own way."""

    def write() -> None:
        import numpy as np

        for place, client in enumerate(_CLIENTS):
            random = np.random.default_rng(place)
            for shape in _SHAPES:
                (folder / "data" / client / shape).mkdir(parents=True)
                for number in range(30):
                    _drawn(shape, client, random).save(folder / "data" / client / shape / f"{number:02d}.png")

    writers.append(write)
    return Study(
        "data",
        "colour",
        30 * len(_SHAPES),
        "drawings of circles, squares and triangles as an example: three clients name what they have drawn in ink, "
        "outlines and chalk, and the fourth, in colour, does not.",
        "- `data/`: the example, a folder for each client, and in it one for each class.\n",
        "The example runs as it is. Then put a folder of your own for each client into `data/`, in place of those "
        "there, and in it one for each class: `data/CLIENT/CLASS/*.jpg`.",
        {"image_size": 28, "rounds": 40},
    )


def _drawn(shape: str, client: str, random: np.random.Generator) -> Image:
    """A shape of random place, size and turn, in the manner of a client."""
    import numpy as np
    from PIL import Image, ImageDraw

    side, radius = 28, random.uniform(6, 10)
    x, y = random.uniform(radius + 1, side - radius - 1, size=2)
    back, front = {"ink": (245, 20), "outline": (235, 40), "chalk": (40, 225)}.get(client, (0, 0))
    colours = [(back,) * 3, (front,) * 3]
    if client == "colour":
        colours = [tuple(random.integers(90, 200, 3).tolist()), tuple(random.integers(0, 110, 3).tolist())]
    image = Image.new("RGB", (side, side), colours[0])
    draw = ImageDraw.Draw(image)
    how: dict[str, Any] = {"outline": colours[1], "width": 2} if client == "outline" else {"fill": colours[1]}
    if shape == "circle":
        draw.ellipse([x - radius, y - radius, x + radius, y + radius], **how)
    else:
        corners = 4 if shape == "square" else 3
        turn = random.uniform(-0.3, 0.3) + (math.pi / 4 if shape == "square" else -math.pi / 2)
        angles = [turn + 2 * math.pi * corner / corners for corner in range(corners)]
        draw.polygon([(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles], **how)
    pixels = np.asarray(image) + random.normal(0, 12, (side, side, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _example_features(folder: Path, writers: list[Callable[[], None]]) -> Study:
    """Classes that are apart in the same directions at each client; the target's features are in other units."""
    clients, width, classes = ("north", "east", "west", "south"), 32, ("a", "b", "c")

    def write() -> None:
        import numpy as np

        random = np.random.default_rng(0)
        means = random.normal(0, 0.45, (len(classes), width))
        arrays: dict[str, Any] = {"classes": np.array(classes)}
        for client in clients:
            y = np.arange(150) % len(classes)
            own = means + random.normal(0, 0.3, means.shape)  # of this client, somewhat apart from the others'
            x = own[y] + random.normal(0, 1, (len(y), width))
            if client == clients[-1]:
                x = x * 10 ** random.uniform(-1, 1, width) + random.normal(0, 2, width)
            arrays |= {f"{client}_x": x.astype(np.float32), f"{client}_y": y}
        np.savez(folder / "features.npz", **arrays)

    writers.append(write)
    return Study(
        "features.npz",
        "south",
        150,
        "made-up features of four clients as an example, 150 samples of three classes each; the target, south, has "
        "them in other units.",
        "- `features.npz`: the example.\n",
        "The example runs as it is. Then put a file of your own in place of `features.npz`.",
        {},
    )


_OWN: dict[str, Callable[[argparse.Namespace], Study]] = {
    "csv": _own_tables,
    "images": _own_images,
    "features": _own_features,
}
_EXAMPLES: dict[str, Callable[[Path, list[Callable[[], None]]], Study]] = {
    "csv": _example_tables,
    "images": _example_images,
    "features": _example_features,
}
