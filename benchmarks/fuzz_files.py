"""Files that anybody may have made, for `fuzz.py`: data sets, the folder of a run, and its checkpoint."""

from __future__ import annotations

import csv
import gzip
import io
import struct
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

import mutations
from fedlit.data import CSVDomains, DatasetLayoutError, DatasetNotFoundError, FeatureDomains
from fedlit.data.decoding import decode
from fedlit.data.digit_five import DigitFive
from fedlit.data.files import read_mat
from fedlit.data.image_checks import check_images
from fedlit.data.intensities import Reading
from fedlit.data.mnist_likes import load_idx
from fedlit.federation import RosterError
from fuzz_formats import Format, Make, spoilt
from mutations import spoil

NO_DATA: tuple[type[BaseException], ...] = (DatasetLayoutError, DatasetNotFoundError, RosterError)


def npz(folder: Path) -> Format:
    """Features and digits, as data modules read them."""
    rng = np.random.default_rng(0)
    arrays = {f"{d}_{part}": x for d in "ab" for part, x in (("x", rng.normal(size=(12, 3))), ("y", np.arange(12) % 2))}
    digits = {"mnist_x": np.zeros((20, 28, 28), np.uint8), "usps_x": np.zeros((20, 16, 16), np.uint8)}
    pool = [
        archived(arrays | {"classes": np.array(["x", "y"])}),
        archived(arrays | {"a_x": np.ones((12, 3), np.uint8)}),
    ]
    pool.append(archived(digits | {"mnist_y": np.arange(20) % 10, "usps_y": np.arange(20) % 10}))
    path = folder / "data.npz"

    def draw(rng: Random) -> bytes:
        data = rng.choice(pool)
        return mutations.archive(rng, data, pool, ways=(*mutations.BYTES, mutations.numbers, mutations.numbers))

    def read(data: bytes) -> None:
        path.write_bytes(data)
        if b"mnist" in data:
            DigitFive(str(path)).load("usps")
            return
        for normalise in ("unit", "zscore"):
            module = FeatureDomains(str(path), normalise=normalise)  # type: ignore[arg-type]
            for name in module.domain_names():
                domain = module.load(name)
                module.finish(domain.x, torch.arange(len(domain.x)))

    return Format(40, draw, read, NO_DATA)


def archived(arrays: dict[str, Any]) -> bytes:
    """An .npz file."""
    made = io.BytesIO()
    np.savez(made, **arrays)
    return made.getvalue()


def mat(folder: Path) -> Format:
    """Files of MATLAB, which a process of their own reads: a second each, so there are few."""
    from scipy.io import savemat

    pool = []
    for compressed in (False, True):
        made = io.BytesIO()
        savemat(made, {"fts": np.eye(4, 3), "labels": np.array([[1, 2, 1, 2]])}, do_compression=compressed)
        pool.append(made.getvalue())
    path = folder / "a.mat"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_mat(path, seconds=8.0)

    return Format(1, spoilt(pool), read, NO_DATA)


def idx(folder: Path) -> Format:
    """The four files of MNIST, one of them spoilt, gzipped or not."""
    root = folder / "mnist"
    root.mkdir(exist_ok=True)
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    whole = [struct.pack(">4B3i", 0, 0, 8, 3, 5, 2, 2) + bytes(20), struct.pack(">4Bi", 0, 0, 8, 1, 5) + bytes(5)]

    def draw(rng: Random) -> bytes:
        place = rng.randrange(2)
        if rng.random() < 0.5:
            return bytes([place]) + spoil(rng, whole[place], whole)
        data = gzip.compress(spoil(rng, whole[place], whole), mtime=0)
        return bytes([place + 2]) + (spoil(rng, data) if rng.random() < 0.5 else data)

    def read(case: bytes) -> None:
        for place, name in enumerate(names):
            (root / name).write_bytes(whole[place % 2])
        if case[0] > 1:
            (root / names[case[0] - 2]).unlink()
        else:
            (root / f"{names[case[0]]}.gz").unlink(missing_ok=True)
        (root / (names[case[0] % 2] + (".gz" if case[0] > 1 else ""))).write_bytes(case[1:])
        load_idx(str(root), "MNIST", download=False)

    return Format(60, draw, read, NO_DATA)


def images(folder: Path) -> Format:
    """Pictures of a folder of classes, of all kinds that are read."""
    from PIL import Image

    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8))
    pool = []
    for kind in ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF", "PPM"):
        made = io.BytesIO()
        picture.save(made, kind)
        pool.append(made.getvalue())
    floats = io.BytesIO()
    picture.convert("F").save(floats, "TIFF")
    # of 64 bits, which Pillow does not read
    pool += [floats.getvalue(), floats.getvalue().replace(b"\x02\x01\x03\0\x01\0\0\0 ", b"\x02\x01\x03\0\x01\0\0\0@")]
    path = folder / "image.png"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(DatasetLayoutError):
            decode(path, 8, 8, reading=Reading(stored=True))
        check_images("a", [path], Reading(), 8)
        decode(path, 8, 8)

    return Format(40, spoilt(pool), read, NO_DATA)


def run_folder(folder: Path) -> Format:
    """The folder that a run left, one file spoilt; read and made into a page."""
    from fedlit.callbacks.report import read_runs, report_on

    run = a_run(folder)
    names = ["summary.json", "privacy.json", "config.yaml", "metrics.csv", "ledger.csv", "embeddings.csv", "a.png"]
    (run / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
    whole = {name: (run / name).read_bytes() for name in names}

    def draw(rng: Random) -> bytes:
        name = rng.choice(names)
        ways = (mutations.tree,) * 3 + mutations.TEXT if name.endswith("json") else mutations.TEXT
        return bytes([names.index(name)]) + spoil(rng, whole[name], list(whole.values()), ways)

    def read(case: bytes) -> None:
        for name, content in whole.items():
            (run / name).write_bytes(content)
        (run / names[case[0]]).write_bytes(case[1:])
        report_on(read_runs([run]))

    return Format(20, draw, read, (OSError, ValueError))


def table(folder: Path) -> Format:
    """A client's CSV or Parquet file, as `CSVDomains` reads it; of CSV no row may be lost, and none be shifted."""
    import pandas as pd

    frame = pd.DataFrame(
        {
            "patient": [f"p{row}" for row in range(12)],
            "age": [20.5, None, 33, 47, 51, 60, 61, 72, 35, 48, 59, 66],
            "ward": ["a", "b, c", None, 'd "e"', "a", "b\nc", "ä", "a", "a", "b", "b", "a"],
            "ill": ["yes", "no"] * 6,
        }
    )
    pool = [frame.to_csv(index=False).encode(), frame.to_csv(index=False, sep=";").encode(), frame.to_parquet()]
    pool += [frame.to_csv(index=False).encode("utf-16"), frame.assign(when=pd.Timestamp("2020-01-01")).to_parquet()]

    def read(data: bytes) -> None:
        path = folder / ("a.parquet" if data[:2] == b"PA" else "a.csv")
        path.write_bytes(data)
        other = folder / "b.csv"
        frame.to_csv(other, index=False)
        module = CSVDomains({"a": str(path), "b": str(other)}, label="ill", id="patient", target="b")
        domain = module.load("a")
        if not bool(domain.x.isfinite().all()):
            raise AssertionError("features that are not finite")
        if path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                names, *rows = [row for row in csv.reader(file, skipinitialspace=True) if row]
            ids = module.table("a")["patient"].fillna("").tolist()
            if [row[[name.strip() for name in names].index("patient")].strip() for row in rows] != [
                str(each).strip() for each in ids
            ]:
                raise AssertionError("rows that are not those of the file")

    return Format(30, spoilt(pool, (*mutations.TEXT, *mutations.BYTES)), read, (*NO_DATA, ValueError))


def checkpoint(folder: Path) -> Format:
    """What ``fedlit export`` is given in place of a run's checkpoint; it ends by a SystemExit that says so."""
    from fedlit.cli.stored import _load, _progress, _StoredCLI

    run = a_run(folder)
    (path,) = (run / "checkpoints").glob("*.ckpt")
    whole = path.read_bytes()
    content = torch.load(path, weights_only=True)
    stored = _StoredCLI(["fit", "--config", str(run / "config.yaml")])
    read_keys = ("federation", "clients", "method", "state_dict", "lr_schedulers", "set", "plan")
    whole_parts = {key: value for key, value in content.items() if key in read_keys} | {"set": "x"}
    odd = (
        *mutations.ODD,
        torch.zeros(0),
        torch.tensor(float("nan")),
        torch.ones(2, 2).to_sparse(),
        torch.ones(3).int(),
    )
    strange, part = run / "strange.ckpt", run / "strange.ckpt.part1"

    def draw(rng: Random) -> bytes:
        kind = rng.choice(b"cccp")  # a checkpoint, or the part of one that another process has written
        if rng.random() < 0.4:
            return bytes([kind]) + mutations.archive(rng, whole, (), names=rng.choice(("data.pkl", "data.pkl", "")))
        made = io.BytesIO()
        spoilt = mutations.odd_node(rng, whole_parts, odd)
        torch.save(content | spoilt if isinstance(spoilt, dict) and rng.random() < 0.5 else spoilt, made)
        return bytes([kind]) + made.getvalue()

    def read(case: bytes) -> None:
        part.unlink(missing_ok=True)
        if case[:1] == b"p":
            torch.save(content | {"set": "x"}, strange)
            part.write_bytes(case[1:])
        else:
            strange.write_bytes(case[1:])
        in_words(lambda: _progress(strange))
        in_words(lambda: _load(stored.model, strange, stored.datamodule))

    return Format(12, draw, read, (SystemExit,))


def in_words(step: Callable[[], object]) -> None:
    """Take a step of a command, which may end in words to the user and in nothing else."""
    try:
        step()
    except SystemExit as error:
        if str(error.code).startswith("fedlit: "):
            raise
        raise AssertionError(f"a command ends without saying why: {error.code!r}") from error


def a_run(folder: Path) -> Path:
    """The folder of a short run, made once."""
    from fedlit.cli import main

    root = folder / "runs"
    if not root.exists():
        config = ["--config", "experiments/digits_fedavg", "--config", "privacy/masking", "--compare=null"]
        small = [
            "--model.extractor.init_args.hidden=[4]",
            "--trainer.max_epochs=2",
            f"--trainer.default_root_dir={root}",
        ]
        with redirect_stdout(io.StringIO()):
            main(["fit", *config, *small, "--trainer.callbacks+=fedlit.callbacks.PrivacyReport"])
    (run,) = root.glob("FedAvg/version_0")
    return Path(run)


FORMATS: dict[str, Make] = {
    "npz files": npz,
    "mat files": mat,
    "idx files": idx,
    "pictures": images,
    "run folders": run_folder,
    "tables": table,
    "checkpoints": checkpoint,
}
