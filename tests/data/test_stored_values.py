"""Grey values as they are stored, against tifffile, Pillow and NumPy; windows; and statistics of a client's images."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedlit.data import DatasetLayoutError, ImageDomains
from fedlit.data.decoding import decode, read_image
from fedlit.data.image_checks import check_images
from fedlit.data.image_samples import IMAGENET_MEAN, IMAGENET_STD
from fedlit.data.intensities import Reading, moments, quantile_scale
from fedlit.export import export_target
from fedlit.methods import SourceOnly
from fedlit.models import SmallCNN
from helpers import trainer
from refused import refused, slow

tifffile = pytest.importorskip("tifffile")

RNG = np.random.default_rng(0)
SIDE = 24
STORED = Reading(stored=True)
TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "float32", "float64")


def values_of(dtype: str, shape: tuple[int, ...] = (SIDE, SIDE + 6)) -> np.ndarray:
    """Random values, over the whole range of integers."""
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return (1000 * RNG.normal(size=shape)).astype(kind)
    limits = np.iinfo(kind)
    return RNG.integers(limits.min, limits.max, shape, dtype=kind, endpoint=True)


def read(path: Path, reading: Reading = STORED) -> np.ndarray:
    return np.asarray(read_image(path, reading))


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("dtype", TYPES)
def test_grey_tiffs_of_any_type_are_read_as_tifffile_reads_them(tmp_path: Path, dtype: str, byteorder: str) -> None:
    path, values = tmp_path / "a.TIF", values_of(dtype)
    for options in ({}, {"rowsperstrip": 7}, {"tile": (16, 16)} if dtype not in ("float16", "float64") else {}):
        if not (options and byteorder == ">" and dtype == "uint32"):  # neither Pillow nor we read these in tiles
            tifffile.imwrite(path, values, byteorder=byteorder, **options)
            np.testing.assert_array_equal(read(path), tifffile.imread(path).astype(np.float32))
    if np.dtype(dtype).kind == "u" and dtype != "uint32":  # white is 0, which tifffile does not turn
        tifffile.imwrite(path, values, byteorder=byteorder, photometric="miniswhite")
        np.testing.assert_array_equal(read(path), np.iinfo(dtype).max - values.astype(np.float32))
    else:
        tifffile.imwrite(path, values, byteorder=byteorder, photometric="miniswhite")
        with refused(str(path), DatasetLayoutError):
            read(path)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_colours_of_tiffs_are_read_as_tifffile_reads_them(tmp_path: Path, dtype: str) -> None:
    values = values_of(dtype, (SIDE, SIDE, 3))
    tifffile.imwrite(tmp_path / "a.tiff", values, photometric="rgb")
    for reading in (Reading(), STORED):
        expected = values if dtype == "uint8" else values >> 8
        np.testing.assert_array_equal(read(tmp_path / "a.tiff", reading), expected)
    tifffile.imwrite(tmp_path / "b.tiff", np.moveaxis(values, 2, 0), photometric="rgb", planarconfig="separate")
    if dtype == "uint8":
        np.testing.assert_array_equal(read(tmp_path / "b.tiff"), values)
    else:  # Pillow reads each byte of these as a pixel
        with refused(str(tmp_path / "b.tiff"), DatasetLayoutError):
            read(tmp_path / "b.tiff")
        with refused(str(tmp_path / "a.tiff"), DatasetLayoutError):  # whose low bits are lost
            read(tmp_path / "a.tiff", Reading(True, (1000.0, 500.0)))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"compression": "zlib"}, "compression 8"),
        ({"photometric": "rgb"}, "3 channels of f64"),
        ({"photometric": "minisblack"}, "further pages"),
    ],
)
def test_tiffs_that_nobody_here_reads_say_what_they_are(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    shape = (3, SIDE, SIDE) if options == {"photometric": "minisblack"} else (SIDE, SIDE, 3)[: 2 + len(options)]
    shape = (SIDE, SIDE) if "compression" in options else shape
    tifffile.imwrite(tmp_path / "a.tif", values_of("float64", shape), **options)
    with refused(str(tmp_path / "a.tif"), DatasetLayoutError) as caught:
        read(tmp_path / "a.tif")
    assert what in str(caught.value)


def test_values_of_other_formats_and_orientations(tmp_path: Path) -> None:
    deep, turned = values_of("uint16"), Image.Exif()
    turned[0x0112] = 6
    for name in ("a.PNG", "b.tif"):
        Image.fromarray(deep).save(tmp_path / name, exif=turned)
        np.testing.assert_array_equal(read(tmp_path / name), np.rot90(deep, -1))
    # one that we read ourselves
    tifffile.imwrite(tmp_path / "c.tif", deep.astype(np.float64), extratags=[(274, 3, 1, 6, True)])
    np.testing.assert_array_equal(read(tmp_path / "c.tif"), np.rot90(deep, -1))
    grey = values_of("uint8")
    for name in ("a.bmp", "a.png", "a.webp"):
        Image.fromarray(grey).save(tmp_path / name, **({"lossless": True} if name == "a.webp" else {}))
        found = read(tmp_path / name)
        np.testing.assert_array_equal(found if found.ndim == 2 else found[..., 0], grey)
    Image.fromarray(grey > 99).save(tmp_path / "one.png")
    np.testing.assert_array_equal(read(tmp_path / "one.png"), 255 * (grey > 99))
    Image.fromarray(deep).save(tmp_path / "t.png", transparency=int(deep[3, 4]))
    np.testing.assert_array_equal(read(tmp_path / "t.png"), np.where(deep == deep[3, 4], 65535, deep))
    for wrong in (np.nan, np.inf):
        floats = values_of("float32")
        floats[0, 0] = wrong
        tifffile.imwrite(tmp_path / "nan.tif", floats)
        with refused(str(tmp_path / "nan.tif"), DatasetLayoutError):
            read(tmp_path / "nan.tif")


def test_values_are_scaled_and_cut_as_pillow_does_with_floats(tmp_path: Path) -> None:
    values = values_of("float32", (30, 41))
    tifffile.imwrite(tmp_path / "a.tif", values)
    found = decode(tmp_path / "a.tif", 20, 16, "bicubic", STORED)
    plain = Image.fromarray(values).resize((int(20 * 41 / 30), 20), Image.Resampling.BICUBIC)
    assert found.shape == (1, 16, 16)
    np.testing.assert_array_equal(found[0], np.asarray(plain)[2:18, round(11 / 2) : round(11 / 2) + 16])
    # 8 bits: the same as bytes, up to their rounding
    grey = values_of("uint8", (30, 41))
    Image.fromarray(grey).save(tmp_path / "a.png")
    bytes_ = decode(tmp_path / "a.png", 20, 16).float()
    assert (decode(tmp_path / "a.png", 20, 16, "bilinear", STORED) - bytes_).abs().max() < 1


# ---------------------------------------------------------------- folders


def write(root: Path, domain: str, dtype: str = "uint16", suffix: str = "tif", scale: float = 1.0, n: int = 8) -> None:
    rng = np.random.default_rng(len(domain))
    for label, name in enumerate(("ill", "well")):
        folder = root / domain / name
        folder.mkdir(parents=True)
        for number in range(n):
            values = 1000 + 300 * label + 200 * rng.normal(size=(20, 20))
            values = (scale * values.clip(0, 4095)).astype(dtype)
            if suffix == "tif":
                tifffile.imwrite(folder / f"{number}.{suffix}", values)
            else:
                Image.fromarray(values).save(folder / f"{number}.{suffix}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for domain, dtype in (("a", "uint16"), ("bb", "uint16"), ("ccc", "uint16")):
        write(tmp_path / "scans", domain, dtype)
    return tmp_path / "scans"


GIVEN = {"image_size": 20, "resized_side": 20, "seed": 0}


def prepared(module: ImageDomains, client: str, stage: str) -> torch.Tensor:
    dataset = module.dataset(client, stage)
    return torch.stack([dataset[index][0] for index in range(len(dataset))])


def raw(module: ImageDomains, client: str, stage: str = "train") -> np.ndarray:
    files = [module.load(client).x[position] for position in getattr(module.split(client), stage).tolist()]
    return np.stack([tifffile.imread(file) for file in files]).astype(np.float64)


def normalised(x: np.ndarray) -> np.ndarray:
    mean, std = (np.array(each).reshape(3, 1, 1) for each in (IMAGENET_MEAN, IMAGENET_STD))
    return (x[:, None] - mean) / std


@pytest.mark.parametrize("cache_limit_mb", [100, 0])
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_a_window_maps_values_in_their_unit_to_0_and_1(tmp_path: Path, dtype: str, cache_limit_mb: int) -> None:
    for domain in ("a", "bb"):
        write(tmp_path, domain, dtype)
    module = ImageDomains(str(tmp_path), window=(1100, 800), cache_limit_mb=cache_limit_mb, **GIVEN)
    for client in ("a", "bb"):
        x = prepared(module, client, "train")
        shown = ((raw(module, client) - 700) / 800).clip(0, 1)
        assert 0 < (shown == 0).mean() < 0.5
        np.testing.assert_allclose(x.numpy(), normalised(shown), atol=1e-5)
        np.testing.assert_allclose(module.pixels(client, module.split(client).train)[:, 0], shown, atol=1e-6)


@pytest.mark.parametrize("cache_limit_mb", [100, 0])
def test_each_client_is_standardised_by_its_own_training_images(tmp_path: Path, cache_limit_mb: int) -> None:
    write(tmp_path, "a")
    write(tmp_path, "bb", "float32", scale=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # each in its own unit
        module = ImageDomains(str(tmp_path), normalise="client", cache_limit_mb=cache_limit_mb, **GIVEN)
        module.train_dataloader()
    for client in ("a", "bb"):
        train = raw(module, client)
        for stage in ("train", "test"):
            x = prepared(module, client, stage)
            expected = (raw(module, client, stage) - train.mean()) / train.std()
            np.testing.assert_allclose(x.numpy(), expected[:, None].repeat(3, axis=1), atol=1e-4)
    assert float(module.pixels("a", torch.arange(4)).mean()) == pytest.approx(0.5, abs=0.2)
    windowed = ImageDomains(str(tmp_path), normalise="client", window=[1100, 800], clients=["a", "bb"], **GIVEN)
    shown = ((raw(windowed, "a") - 700) / 800).clip(0, 1)
    x = prepared(windowed, "a", "train")
    np.testing.assert_allclose(x[:, 0].numpy(), (shown - shown.mean()) / shown.std(), atol=1e-4)


def test_quantiles_of_each_client_become_0_and_1(root: Path) -> None:
    module = ImageDomains(str(root), normalise="quantiles", **GIVEN)
    x = prepared(module, "bb", "test")
    low, high = np.quantile(raw(module, "bb"), [0.01, 0.99], method="nearest")
    shown = ((raw(module, "bb", "test") - low) / (high - low)).clip(0, 1)
    np.testing.assert_allclose(x.numpy(), normalised(shown), atol=1e-5)
    assert (shown == 0).any()
    assert (shown == 1).any()


def test_statistics_of_large_values_with_small_differences_and_of_constants() -> None:
    x = 1e6 + RNG.normal(size=(5, 1, 8, 8))
    mean, deviation = moments([torch.from_numpy(x[:3]), torch.from_numpy(x[3:])])
    np.testing.assert_allclose(mean, [x.mean()] * 3)
    np.testing.assert_allclose(deviation, [x.std()] * 3, rtol=1e-9)
    colours = RNG.normal(size=(4, 3, 8, 8))
    colours[:, 1] = 7
    mean, deviation = moments([torch.from_numpy(colours)])
    np.testing.assert_allclose(mean, colours.mean(axis=(0, 2, 3)))
    np.testing.assert_allclose(deviation, [colours[:, 0].std(), 1, colours[:, 2].std()])
    values = torch.from_numpy(RNG.normal(size=(2, 1, 64, 64)))
    scale = quantile_scale([values])
    grid = values[..., ::2, ::2].numpy()
    assert scale.low == pytest.approx(np.quantile(grid, 0.01, method="nearest"))
    assert scale.low + scale.span == pytest.approx(np.quantile(grid, 0.99, method="nearest"))
    few = torch.zeros(1, 1, 32, 32)
    few[0, 0, 0, 0] = 5
    assert quantile_scale([few]) == (0, 5, True)
    assert quantile_scale([few * 0 + 3])(few * 0 + 3).abs().max() == 0


def test_augmented_images_are_normalised_by_the_statistics_of_those_that_are_not(root: Path) -> None:
    given = {"normalise": "client", "image_size": 16, "seed": 0}
    plain, cut = (ImageDomains(str(root), **given, augment=augment) for augment in (False, True))
    assert cut.transform(True, "a").mean == pytest.approx(plain.transform(True, "a").mean)
    for (x, _), (y, _) in zip(plain.dataset("a", "test"), cut.dataset("a", "test"), strict=True):
        torch.testing.assert_close(x, y)


def test_grey_images_beside_colours_become_three_channels(root: Path) -> None:
    Image.fromarray(RNG.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(root / "a" / "ill" / "colours.png")
    for domain in ("bb", "ccc"):
        shutil.rmtree(root / domain)
        write(root, domain, "uint8", scale=0.05)
    for file in (root / "a").rglob("*.tif"):
        Image.fromarray((np.asarray(Image.open(file)) // 20).astype(np.uint8)).save(file)
    for pool in (False, True):
        module = ImageDomains(str(root), normalise="client", pool_sources=pool, **GIVEN)
        x = prepared(module, "sources" if pool else "a", "train")
        assert x.shape[1:] == (3, 20, 20)


def test_several_bit_depths_are_told_with_client_and_file(root: Path) -> None:
    write(root, "eight", "uint8", "png", 0.05)
    scans = {name: {"clients": clients} for name, clients in {"one": ["a", "eight"], "two": ["a", "bb"]}.items()}
    with pytest.warns(UserWarning, match=r"at \['a'\]; 8 bits at \['eight'\]") as caught:
        ImageDomains(str(root), **scans["one"], window=(1000, 2000), **GIVEN).train_dataloader()
    assert "0.tif" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ImageDomains(str(root), **scans["one"], normalise="client", **GIVEN).train_dataloader()
        ImageDomains(str(root), **scans["two"], window=(1000, 2000), **GIVEN).train_dataloader()
    shutil.copy(root / "eight" / "ill" / "0.png", root / "bb" / "ill" / "odd.png")
    for given in ({"window": (1000, 2000)}, {"normalise": "client"}):
        with refused("bit", DatasetLayoutError) as error:
            ImageDomains(str(root), **scans["two"], **given, **GIVEN).train_dataloader()
        assert str(root / "bb" / "ill" / "odd.png") in str(error.value)
        assert "client 'bb'" in str(error.value)
    tifffile.imwrite(root / "a" / "ill" / "colours.tif", values_of("uint16", (20, 20, 3)), photometric="rgb")
    with refused("bit", DatasetLayoutError) as error:  # of colours the high 8 bits are read
        ImageDomains(str(root), **scans["two"], normalise="client", **GIVEN).load("a")
    assert "8 bits" in str(error.value)
    with pytest.warns(UserWarning, match=r"'bb' has images of several bit depths.*odd.png"):
        ImageDomains(str(root), **scans["two"], **GIVEN).train_dataloader()


@pytest.mark.parametrize(("window", "becomes"), [((40, 400), "white"), ((40000, 400), "black")])
def test_a_window_that_shows_nothing_is_told(root: Path, window: tuple[float, float], becomes: str) -> None:
    with pytest.warns(UserWarning, match=rf"shows nothing of .*0.tif.* becomes {becomes}"):
        ImageDomains(str(root), clients=["a", "bb"], window=window, **GIVEN).train_dataloader()


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        *(("window", {"window": window}) for window in ((40,), (40, 0), (40, float("nan")), "file.dcm", 40)),
        ("normalise", {"normalise": "window"}),
        ("normalise", {"normalise": "client", "mean": [0.5] * 3}),
        ("normalise", {"normalise": "quantiles", "window": (40, 400)}),
    ],
)
def test_intensities_that_cannot_be_are_refused(root: Path, argument: str, given: dict[str, Any]) -> None:
    with refused(argument):
        ImageDomains(str(root), **given)


def test_clients_with_other_windows_are_refused(root: Path) -> None:
    one, other = (ImageDomains(str(root), window=(1000, width), **GIVEN) for width in (400, 500))
    with refused("reading", DatasetLayoutError):
        one.check_facts({"a": one.facts("a"), "bb": other.facts("bb")})


# ---------------------------------------------------------------- files that cannot be read


def spoil(root: Path) -> list[Path]:
    """Files of each format that end early, and others."""
    folder, image = root / "a" / "ill", Image.fromarray(RNG.integers(0, 256, (90, 90, 3), dtype=np.uint8))
    spoilt = []
    for name in ("cut.jpg", "cut.png", "cut.bmp", "cut.webp", "cut.tiff"):
        image.save(folder / name)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-40])
        spoilt.append(folder / name)
        (folder / f"whole{name[3:]}").write_bytes(content)
    (folder / "text.JPG").write_text("no image")
    (folder / "bomb.png").write_bytes(b"P6\n20000 20000\n255\n")
    (folder / "strip.png").write_bytes(b"P5\n1 65000\n255\n" + bytes(65000))
    tifffile.imwrite(folder / "f.tif", values_of("float32"))
    return [*spoilt, *(folder / name for name in ("text.JPG", "bomb.png", "strip.png", "f.tif"))]


@pytest.mark.filterwarnings("ignore:Truncated File Read")
def test_all_files_that_cannot_be_read_are_named_before_training(root: Path) -> None:
    spoilt = spoil(root)
    module = ImageDomains(str(root), image_size=224, target="ccc")
    with refused("images", DatasetLayoutError) as caught:
        module.load("a")
    message = str(caught.value)
    assert "client 'a'" in message
    assert f"{len(spoilt)} that cannot" in message
    named = [line.partition(" must be ")[0].removeprefix("- ") for line in message.splitlines()[1:]]
    assert {str(path) for path in spoilt} == {name for each in named for name in each.split(", ")}
    assert "give window=[level, width]" in next(line for line in message.splitlines() if "f.tif" in line)
    for number in range(30):
        (root / "bb" / "ill" / f"x{number}.png").write_text("none")
    with refused("images", DatasetLayoutError) as caught:
        module.load("bb")
    assert "x26.png and 10 more must be an image" in str(caught.value)
    assert str(caught.value).count("\n") == 1


def test_whole_files_are_not_decoded_to_be_checked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, paths = Image.fromarray(RNG.integers(0, 256, (40, 50, 3), dtype=np.uint8)), []
    for suffix in ("jpg", "png", "bmp", "webp", "tif"):
        paths.append(root / f"a.{suffix}")
        image.save(paths[-1])
    with (root / "more.jpg").open("wb") as file:  # telephones put films behind photographs
        file.write(paths[0].read_bytes() + bytes(range(256)))
    loaded: list[str] = []
    load = Image.Image.load
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: (loaded.append(str(self.filename)), load(self))[1])
    assert {header.depth for header in check_images("a", paths, Reading(), 256)} == {"8 bits"}
    assert not loaded
    monkeypatch.undo()
    assert len(check_images("a", [root / "more.jpg"], Reading(), 256)) == 1


def test_files_that_are_damaged_in_the_middle_are_all_named_when_they_are_decoded(root: Path) -> None:
    for name in ("0.png", "1.png"):
        Image.fromarray(RNG.integers(0, 256, (90, 90, 3), dtype=np.uint8)).save(root / "a" / "well" / name)
        content = bytearray((root / "a" / "well" / name).read_bytes())
        content[2000:6000] = bytes(4000)
        (root / "a" / "well" / name).write_bytes(content)
    module = ImageDomains(
        str(root), image_size=20, target="ccc", val_fraction=0.0, test_fraction=0.0, transductive=True
    )
    with pytest.warns(UserWarning, match="several bit depths"):
        module.load("a")
    with refused("images", DatasetLayoutError) as caught:
        module.dataset("a", "train")
    assert [name in str(caught.value) for name in ("well/0.png", "well/1.png")] == [True, True]


@pytest.mark.parametrize("form", ["noise", "steps", "palette", "16 bits"])
def test_a_png_of_which_any_byte_has_changed_is_refused(tmp_path: Path, form: str) -> None:
    """Also where the rows that it decodes to look whole: what compresses well has few bits that lead anywhere else."""
    steps = (np.arange(300) // 10).astype(np.uint8) + np.zeros((300, 300), np.uint8)
    image = {
        "noise": Image.fromarray(RNG.integers(0, 256, (30, 30, 3), dtype=np.uint8)),
        "steps": Image.fromarray(steps),
        "palette": Image.fromarray(steps).convert("P"),
        "16 bits": Image.fromarray(steps.astype(np.uint16) * 256),
    }[form]
    path = tmp_path / "a.png"
    image.save(path)
    whole = path.read_bytes()
    pixels = read(path, Reading())
    end = len(whole) - 12  # of what is before the last part, which says that it is the last
    for place in range(0, end, max(1, end // 150)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(DatasetLayoutError):
            read(path, Reading())
    path.write_bytes(whole)
    np.testing.assert_array_equal(read(path, Reading()), pixels)


def test_whole_numbers_that_32_bits_do_not_hold_are_warned_of_and_what_overflows_is_refused(tmp_path: Path) -> None:
    counted = np.uint32(3_000_000_000) + np.arange(400, dtype=np.uint32).reshape(20, 20) % 100
    for name, values in (("a.tif", counted), ("b/b.tif", counted - np.uint32(3_000_000_000))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        tifffile.imwrite(tmp_path / name, values)
    with pytest.warns(UserWarning, match=r"a.tif', such as 30000000\d\d, are rounded to 24 bits"):
        assert len(np.unique(read(tmp_path / "a.tif"))) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(np.unique(read(tmp_path / "b" / "b.tif"))) == 100
        tifffile.imwrite(tmp_path / "b" / "c.tif", RNG.normal(size=(20, 20)))  # of 64 bits, all of which are rounded
        read(tmp_path / "b" / "c.tif")
        tifffile.imwrite(tmp_path / "b" / "c.tif", np.full((20, 20), 1e300))
        with refused(str(tmp_path / "b" / "c.tif"), DatasetLayoutError):
            read(tmp_path / "b" / "c.tif")


# ---------------------------------------------------------------- export, and processes without images


@pytest.mark.parametrize(
    ("suffix", "arguments"),
    [
        ("pt2", {"normalise": "client"}),
        slow("onnx", {"normalise": "client"}),
        slow("onnx", {"window": (1100, 800)}),
        slow("onnx", {"normalise": "quantiles"}),
        slow("onnx", {}),
    ],
)
def test_a_file_predicts_of_stored_values_what_the_module_does(
    root: Path, suffix: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    data = ImageDomains(str(root), **arguments, **GIVEN)
    module = SourceOnly(data.clients, data.target, data.num_classes, SmallCNN(in_channels=3, width=4))
    trainer(1).fit(module, data)
    expected = module.replicas["ccc"].eval()(prepared(data, "ccc", "test")).softmax(dim=1)
    stored = raw(data, "ccc", "test")[:, None].astype(np.float32)
    if not arguments:
        stored = (stored // 256).astype(np.uint8).repeat(3, axis=1)
    path = tmp_path / f"target.{suffix}"
    export_target(module, path, data)
    if suffix == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(path)
        (found,) = map(torch.from_numpy, session.run(["predictions"], {"inputs": stored}))
    else:
        found = torch.export.load(path).module()(torch.from_numpy(stored))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    card = path.with_name(f"{path.name}.md").read_text()
    assert ("Grey values of images in the unit of their files" in card) == bool(arguments)
    assert f"`inputs`, shape (n, {stored.shape[1]}, 20, 20), {stored.dtype}" in card


def test_a_process_without_images_is_given_clients_and_classes(root: Path) -> None:
    given = {"clients": ["a", "bb", "ccc"], "classes": ["ill", "well"], "normalise": "client"}
    server, site = ImageDomains(None, **given, **GIVEN), ImageDomains(str(root), **given, **GIVEN)
    assert server.input_shape == site.input_shape == (3, 20, 20)
    assert server.clients == site.clients
    assert server.classes == site.classes
    assert "elsewhere" in str(server)
    for name in ("clients", "classes"):
        with refused(name):
            ImageDomains(None, **(given | {name: None}), **GIVEN)
    with pytest.raises(FileNotFoundError, match="in a process without any"):
        server.dataset("a", "train")
