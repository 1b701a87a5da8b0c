"""Images of DICOM files, against pydicom and the standard's formulas."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlit.data import DatasetLayoutError, ImageDomains
from fedlit.data.decoding import read_image
from fedlit.data.image_checks import check_images
from fedlit.data.intensities import Reading
from refused import refused

pydicom = pytest.importorskip("pydicom")
from pydicom.data import get_testdata_file  # noqa: E402
from pydicom.dataset import FileDataset, FileMetaDataset  # noqa: E402
from pydicom.pixels import apply_modality_lut, apply_voi_lut, pixel_array  # noqa: E402
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, RLELossless, generate_uid  # noqa: E402

RNG = np.random.default_rng(0)
STORED = Reading(stored=True)
SHAPE = (20, 26)


def write(path: Path, values: np.ndarray, bits: int = 12, syntax: Any = ExplicitVRLittleEndian, **tags: Any) -> Path:
    """Write a file with an image; ``tags`` are set or, where ``None``, removed."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = "1.2.840.10008.5.1.4.1.1.7", generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian if syntax == RLELossless else syntax
    file = FileDataset(str(path), {}, file_meta=meta, preamble=bytes(128))
    file.SOPClassUID, file.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    file.Rows, file.Columns = values.shape[:2] if values.ndim == 2 or values.shape[2] == 3 else values.shape[1:]
    file.SamplesPerPixel = 3 if values.ndim == 3 and values.shape[2] == 3 else 1
    file.PhotometricInterpretation = "RGB" if file.SamplesPerPixel == 3 else "MONOCHROME2"
    if file.SamplesPerPixel == 3:
        file.PlanarConfiguration = 0
    file.BitsAllocated, file.BitsStored, file.HighBit = 8 * values.dtype.itemsize, bits, bits - 1
    file.PixelRepresentation = int(values.dtype.kind == "i")
    file.PixelData = values.tobytes()
    for name, value in tags.items():
        setattr(file, name, value)
    if syntax == RLELossless:
        file.compress(RLELossless)
    path.parent.mkdir(parents=True, exist_ok=True)
    file.save_as(path, enforce_file_format=True)
    return path


def radiograph(bits: int = 12, signed: bool = False) -> np.ndarray:
    low = -(1 << (bits - 1)) if signed else 0
    return RNG.integers(low, low + (1 << bits), SHAPE).astype(np.int16 if signed else np.uint16)


def read(path: Path, reading: Reading = STORED) -> np.ndarray:
    return np.asarray(read_image(path, reading))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, RLELossless, DeflatedExplicitVRLittleEndian])
def test_values_are_rescaled_by_slope_and_intercept(tmp_path: Path, syntax: Any, signed: bool) -> None:
    values = radiograph(signed=signed)
    path = write(tmp_path / "a.DCM", values, syntax=syntax, RescaleSlope=1.5, RescaleIntercept=-1024)
    np.testing.assert_array_equal(read(path), values * 1.5 - 1024)
    file = pydicom.dcmread(path)
    np.testing.assert_array_equal(read(path), apply_modality_lut(pixel_array(file), file))
    np.testing.assert_array_equal(read(write(tmp_path / "b.dcm", values, syntax=syntax)), values)
    assert [header.depth for header in check_images("a", [path], STORED, 20)] == ["DICOM of 12 bits"]


@pytest.mark.parametrize("name", ["CT_small.dcm", "MR_small.dcm", "MR_small_bigendian.dcm", "MR_small_RLE.dcm"])
def test_files_of_scanners_are_read_as_pydicom_reads_them(name: str) -> None:
    path = Path(get_testdata_file(name, download=False))
    file = pydicom.dcmread(path)
    np.testing.assert_array_equal(read(path), apply_modality_lut(pixel_array(file), file))
    (header,) = check_images("a", [path], STORED, 20)
    assert header.depth == ("DICOM in HU" if name.startswith("CT") else "DICOM of 16 bits")


@pytest.mark.parametrize("signed", [False, True])
def test_white_is_the_largest_value_whichever_way_a_file_has_it(tmp_path: Path, signed: bool) -> None:
    values, rescaled = radiograph(10, signed), {"RescaleSlope": 2, "RescaleIntercept": 100}
    inverse = write(tmp_path / "a.dcm", values, 10, PhotometricInterpretation="MONOCHROME1", **rescaled)
    low, high = (-512, 511) if signed else (0, 1023)
    # within the range of the bits, so that a negative of the same image is the same image
    np.testing.assert_array_equal(read(inverse), 2 * (low + high - values) + 100)
    negative = write(tmp_path / "b.dcm", (low + high - values).astype(values.dtype), 10, **rescaled)
    np.testing.assert_array_equal(read(inverse), read(negative))
    # a window is one of the values in the file, and what it shows is inverted
    reading = Reading(True, (700.0, 500.0))
    shown = ((values * 2.0 + 100 - 450) / 500).clip(0, 1)
    np.testing.assert_allclose(reading.scale(torch.tensor(read(inverse, reading))), 1 - shown, atol=1e-6)


@pytest.mark.parametrize("function", [None, "LINEAR", "LINEAR_EXACT", "SIGMOID"])
@pytest.mark.parametrize("kind", ["MONOCHROME1", "MONOCHROME2"])
def test_the_window_of_a_file_is_applied_as_pydicom_does(tmp_path: Path, kind: str, function: str | None) -> None:
    tags = {"WindowCenter": [600, 40], "WindowWidth": [900, 400], "PhotometricInterpretation": kind}
    tags |= {} if function is None else {"VOILUTFunction": function}
    path = write(tmp_path / "a.dcm", radiograph(), RescaleSlope=1, RescaleIntercept=-1024, **tags)
    file = pydicom.dcmread(path)
    values = apply_modality_lut(pixel_array(file), file)
    shown = apply_voi_lut(values, file, prefer_lut=False)
    low, high = -1024, 4095 - 1024  # what pydicom maps a window to
    expected = (shown - low) / (high - low)
    found = read(path, Reading(True, "file"))
    np.testing.assert_allclose(found, 1 - expected if kind == "MONOCHROME1" else expected, atol=1e-6)
    with refused(str(path), DatasetLayoutError):
        read(write(path, radiograph()), Reading(True, "file"))
    lungs = read(write(path, radiograph(), WindowCenter=0, WindowWidth=4096), Reading(True, "file"))
    assert lungs.min() >= 0.5


def test_colours_of_8_bits_are_as_those_of_other_files(tmp_path: Path) -> None:
    colours = RNG.integers(0, 256, (*SHAPE, 3), dtype=np.uint8)
    path = write(tmp_path / "a.dcm", colours, 8)
    for reading in (Reading(), STORED, Reading(True, "file")):
        np.testing.assert_array_equal(read(path, reading), colours)
    assert check_images("a", [path], Reading(), 20)[0].colours
    ultrasound = Path(get_testdata_file("SC_rgb_jpeg_dcmtk.dcm", download=False))  # YBR, by Pillow's JPEG
    np.testing.assert_array_equal(read(ultrasound), pixel_array(ultrasound))


@pytest.mark.parametrize(
    ("name", "tags", "what"),
    [
        ("frames", {"NumberOfFrames": 3}, "3 frames"),
        ("palette", {"PhotometricInterpretation": "PALETTE COLOR"}, "PALETTE COLOR of 16 bits"),
        ("report", {"Rows": None}, "a DICOM file with an image"),
        ("huge", {"Rows": 60000, "Columns": 60000}, "3600000000"),
    ],
)
def test_what_is_no_single_image_is_refused_by_its_header(
    tmp_path: Path, name: str, tags: dict[str, Any], what: str
) -> None:
    path = write(tmp_path / f"{name}.dcm", radiograph(), **{key: value for key, value in tags.items() if value})
    if None in tags.values():
        file = pydicom.dcmread(path)
        del file.Rows
        file.save_as(path)
    for attempt in (lambda: read(path), lambda: check_images("a", [path], STORED, 20)):
        with pytest.raises(DatasetLayoutError, match=what):
            attempt()


@pytest.mark.parametrize("name", ["JPEGLSNearLossless_16.dcm", "SC_rgb_jpeg_gdcm.dcm"])
def test_a_compression_that_cannot_be_read_names_what_to_install(name: str) -> None:
    path = Path(get_testdata_file(name, download=False))
    if pydicom.pixels.get_decoder(pydicom.dcmread(path).file_meta.TransferSyntaxUID).is_available:
        pytest.skip("a plugin for it is installed")
    with refused("images", DatasetLayoutError) as caught:
        check_images("a", [path], STORED, 20)
    assert "pip install one of: gdcm - requires" in str(caught.value)


def test_files_that_end_early_or_are_no_dicom_are_named(tmp_path: Path) -> None:
    paths = []
    for name, syntax in (("plain", ExplicitVRLittleEndian), ("packed", RLELossless)):
        path = write(tmp_path / f"{name}.dcm", radiograph(), syntax=syntax)
        path.write_bytes(path.read_bytes()[:-100])
        paths.append(path)
    (tmp_path / "text.dcm").write_text("no image")
    paths.append(tmp_path / "text.dcm")
    with refused("images", DatasetLayoutError) as caught:
        check_images("a", paths, STORED, 20)
    assert all(str(path) in str(caught.value) for path in paths)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for client in ("north", "south"):
        for number, name in enumerate(("ill", "well")):
            for image in range(6):
                values = (RNG.integers(0, 1000, (20, 20)) + 1000 * number).astype(np.uint16)
                write(tmp_path / "scans" / client / name / f"{image}.dcm", values, Modality="CT", RescaleIntercept=-500,
                      RescaleSlope=1, WindowCenter=500, WindowWidth=3000)  # fmt: skip
    return tmp_path / "scans"


def test_dicom_needs_a_window_or_statistics(root: Path) -> None:
    given = {"image_size": 20, "resized_side": 20, "seed": 0}
    with refused("images", DatasetLayoutError) as caught:
        ImageDomains(str(root), **given).train_dataloader()
    assert str(root / "north" / "ill" / "0.dcm") in str(caught.value)
    assert "window=[level, width]" in str(caught.value)
    x = ImageDomains(str(root), window=(400, 600), **given).dataset("north", "train").batch(torch.arange(4))[0]
    assert x.shape == (4, 3, 20, 20)
    client = ImageDomains(str(root), normalise="client", **given)
    x, _ = client.dataset("north", "train").batch(torch.arange(len(client.split("north").train)))
    assert float(x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(x.std()) == pytest.approx(1, abs=1e-3)
    file = ImageDomains(str(root), window="file", **given)
    assert "from 0 to 1 by the window of their file" in file.raw_inputs().words
    assert float(file.pixels("north", torch.arange(12)).max()) <= 1
    for path in root.rglob("*.dcm"):  # 8-bit files have no such window
        shutil.move(path, path.with_suffix(".png"))
    with refused("images", DatasetLayoutError):
        ImageDomains(str(root), window="file", **given).train_dataloader()


def test_without_the_extra_the_error_names_file_and_command(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("pydicom")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    module = ImageDomains(str(root), image_size=20, normalise="client")
    with pytest.raises(ImportError, match=r"0.dcm' needs: pip install 'fedlit\[dicom\]'"):
        module.train_dataloader()
