"""The decoder of image files: every mode, against pixels made or blended with NumPy by hand; and what is refused."""

from __future__ import annotations

import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image, ImageCms
from torchvision.transforms import v2

from fedlit.data import DatasetLayoutError, decoding
from fedlit.data.decoding import SUFFIXES, decode, read_image
from refused import refused

PILLOW = int(PIL.__version__.partition(".")[0])
SIDE = 16
RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
ALPHA = RNG.integers(0, 256, (SIDE, SIDE), dtype=np.uint8)
GREY = COLOURS[..., 0]
DEEP = np.linspace(0, 65535, SIDE * SIDE).round().astype(np.uint16).reshape(SIDE, SIDE)
TURNS = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: np.rot90(x, 1),
    9: lambda x: x,
}
"""What a viewer does to an image with each orientation, from the definition of EXIF."""


@pytest.fixture(autouse=True)
def _no_warnings_left() -> None:
    decoding._dark_folders.clear()


def read(path: Path) -> np.ndarray:
    return np.asarray(read_image(path))


def unread(path: Path) -> str:
    """The error of a file that is refused."""
    with refused(str(path), DatasetLayoutError) as caught:
        read(path)
    return str(caught.value)


def saved(path: Path, image: Image.Image, **options: object) -> np.ndarray:
    image.save(path, **options)
    return read(path)


def three(grey: np.ndarray) -> np.ndarray:
    return np.stack([grey] * 3, axis=-1)


def over_white(colours: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[..., None] / 255
    return colours * share + 255 * (1 - share)


def png(path: Path, pixels: np.ndarray, bits: int, colour_type: int, transparent: bytes = b"") -> None:
    """Write a PNG by its specification, as Pillow cannot write all depths."""
    height = len(pixels)
    if bits == 16:
        rows = pixels.astype(">u2").reshape(height, -1).view(np.uint8)
    elif bits == 8:
        rows = pixels.astype(np.uint8).reshape(height, -1)
    else:
        places = np.unpackbits(pixels.astype(np.uint8).reshape(height, -1, 1), axis=2)[..., -bits:]
        rows = np.packbits(places.reshape(height, -1), axis=1)

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", pixels.shape[1], height, bits, colour_type, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    parts = [chunk(b"IHDR", header), *([chunk(b"tRNS", transparent)] if transparent else [])]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join([*parts, chunk(b"IDAT", body), chunk(b"IEND", b"")]))


def tiff(path: Path, pixels: np.ndarray, bits: int, photometric: int = 1, sample_format: int = 1) -> None:
    """Write an uncompressed grey TIFF of one strip by its specification."""
    content = pixels.astype(pixels.dtype.newbyteorder("<")).tobytes()
    height, width = pixels.shape
    entries = [(256, width), (257, height), (258, bits), (259, 1), (262, photometric), (273, 0), (277, 1)]
    entries += [(278, height), (279, len(content)), (339, sample_format)]
    start = 8 + 2 + 12 * len(entries) + 4
    values = b"".join(struct.pack("<HHII", tag, 4 if tag in (273, 279) else 3, 1, start if tag == 273 else value)
                      for tag, value in entries)  # fmt: skip
    path.write_bytes(b"II*\0" + struct.pack("<IH", 8, len(entries)) + values + bytes(4) + content)


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "jpg", "webp"])
def test_eight_bits_of_red_green_and_blue_give_the_pixels_that_pillow_and_torchvision_give(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"a.{suffix}"
    wide = np.concatenate([COLOURS, COLOURS[:, ::-1], COLOURS[:, :9]], axis=1)
    Image.fromarray(wide).save(path)
    plain = v2.functional.center_crop(v2.functional.resize(Image.open(path).convert("RGB"), [40]), [32, 32])
    assert np.array_equal(decode(path, 40, 32).numpy(), np.asarray(plain).transpose(2, 0, 1))
    if suffix in ("png", "bmp", "tif"):
        assert np.array_equal(read(path), wide)


@pytest.mark.parametrize("suffix", ["png", "tif", "tiff"])
def test_grey_values_of_16_bits_are_scaled_by_their_full_range(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    assert np.array_equal(saved(path, Image.fromarray(DEEP)), three((DEEP // 256).astype(np.uint8)))
    # no image is scaled by its own extremes, and 8 bits that were stretched to 16 in either usual way come back
    for factor in (256, 257):
        assert np.array_equal(saved(path, Image.fromarray(GREY.astype(np.uint16) * factor)), three(GREY))
    if suffix == "tif":  # the other order of bytes
        big = saved(path, Image.frombytes("I;16B", (SIDE, SIDE), DEEP.astype(">u2").tobytes()))
        assert path.read_bytes()[:2] == b"MM"
        assert np.array_equal(big, three((DEEP >> 8).astype(np.uint8)))


def test_tiffs_in_which_white_is_0_are_not_negatives(tmp_path: Path) -> None:
    tiff(tmp_path / "8.tif", 255 - GREY, 8, photometric=0)
    tiff(tmp_path / "16.tif", 65535 - DEEP, 16, photometric=0)
    tiff(tmp_path / "bright.tif", DEEP >> 4, 16, photometric=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is not dark
        assert read(tmp_path / "bright.tif").min() == 240
    assert np.array_equal(read(tmp_path / "8.tif"), three(GREY))
    assert np.array_equal(read(tmp_path / "16.tif"), three((DEEP >> 8).astype(np.uint8)))


def test_grey_values_of_12_bits_are_scaled_by_their_range(tmp_path: Path) -> None:
    values = (DEEP >> 4).astype(np.uint32).reshape(-1, 2)
    packed = np.stack([values[:, 0] >> 4, (values[:, 0] & 15) << 4 | values[:, 1] >> 8, values[:, 1] & 255], axis=1)
    tiff(tmp_path / "a.tif", packed.astype(np.uint8).reshape(SIDE, -1), 12)
    content = bytearray((tmp_path / "a.tif").read_bytes())
    content[10 + 8 : 10 + 10] = struct.pack("<H", SIDE)  # the width in pixels, not in bytes
    (tmp_path / "a.tif").write_bytes(content)
    assert np.array_equal(read(tmp_path / "a.tif"), three((DEEP >> 8).astype(np.uint8)))


@pytest.mark.parametrize("colour_type", [2, 4, 6])
def test_colours_and_alpha_of_16_bits_are_read_by_their_high_bits(tmp_path: Path, colour_type: int) -> None:
    deep = RNG.integers(0, 65536, (SIDE, SIDE, 4), dtype=np.uint16)
    channels = {2: deep[..., :3], 4: deep[..., 2:], 6: deep}[colour_type]
    png(tmp_path / "a.png", channels, 16, colour_type)
    high = (channels >> 8).astype(np.uint8)
    colours = three(high[..., 0]) if colour_type == 4 else high[..., :3]
    expected = colours if colour_type == 2 else over_white(colours, high[..., -1])
    np.testing.assert_allclose(read(tmp_path / "a.png"), expected, atol=0.51)


def test_a_dark_image_of_16_bits_is_warned_of_once_in_a_folder(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.fromarray(DEEP >> 4).save(tmp_path / name)
    with pytest.warns(UserWarning, match=r"'.*a.png' reach 4095"):
        found = read(tmp_path / "a.png")
    assert found.max() == 15
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(tmp_path / "b.png")


@pytest.mark.parametrize("suffix", ["png", "webp", "tif"])
def test_transparent_pixels_show_white(tmp_path: Path, suffix: str) -> None:
    options = {"lossless": True, "exact": True} if suffix == "webp" else {}
    path = tmp_path / f"a.{suffix}"
    expected = over_white(COLOURS, ALPHA)
    rgba = Image.fromarray(np.dstack([COLOURS, ALPHA]))
    np.testing.assert_allclose(saved(path, rgba, **options), expected, atol=0.51)
    # where alpha is 0 nothing is left of the colour, and where it is 255 all of it
    hard = np.where(ALPHA > 127, 255, 0).astype(np.uint8)
    rgba = Image.fromarray(np.dstack([COLOURS, hard]))
    assert np.array_equal(saved(path, rgba, **options), np.where(hard[..., None] > 0, COLOURS, 255))


def test_transparent_grey_values_show_white(tmp_path: Path) -> None:
    image = Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(ALPHA)])
    for name in ("a.png", "a.tif"):
        np.testing.assert_allclose(saved(tmp_path / name, image), over_white(three(GREY), ALPHA), atol=0.51)


def test_alpha_that_is_multiplied_in_is_taken_for_that(tmp_path: Path) -> None:
    multiplied = (COLOURS * (ALPHA[..., None] / 255)).round().astype(np.uint8)
    Image.fromarray(np.dstack([multiplied, ALPHA])).save(tmp_path / "a.tif")
    content = (tmp_path / "a.tif").read_bytes()
    extra, associated = (struct.pack("<HHII", 338, 3, 1, value) for value in (2, 1))
    assert content.count(extra) == 1
    (tmp_path / "a.tif").write_bytes(content.replace(extra, associated))
    np.testing.assert_allclose(read(tmp_path / "a.tif"), multiplied + (255.0 - ALPHA[..., None]), atol=1.01)


@pytest.mark.parametrize("transparency", [3, bytes([0, 255, 128, 0])])
@pytest.mark.parametrize("suffix", ["png", "gif"])
def test_transparent_colours_of_a_palette_show_white(tmp_path: Path, suffix: str, transparency: int | bytes) -> None:
    if suffix == "gif" and isinstance(transparency, bytes):
        pytest.skip("GIF has one transparent colour")
    indices, palette = COLOURS[..., 0] % 4, RNG.integers(0, 256, (4, 3), dtype=np.uint8)
    image = Image.fromarray(indices).convert("L")
    image = Image.frombytes("P", image.size, image.tobytes())
    image.putpalette(palette.tobytes())
    path = tmp_path / "a.png"  # a GIF is read whatever its name
    image.save(path, format=suffix, transparency=transparency)
    alpha = np.full(4, 255, dtype=np.uint8)
    alpha[:] = list(transparency) if isinstance(transparency, bytes) else [255, 255, 255, 0]
    np.testing.assert_allclose(read(path), over_white(palette[indices], alpha[indices]), atol=0.51)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_the_one_transparent_value_of_a_grey_png_shows_white(tmp_path: Path, bits: int) -> None:
    values = (DEEP >> (16 - bits)).astype(np.uint16)
    most = (1 << bits) - 1
    for transparent in (0, 1, most):
        png(tmp_path / "a.png", values, bits, 0, struct.pack(">H", transparent))
        pixels = values >> 8 if bits == 16 else values * (255 // most)
        assert np.array_equal(read(tmp_path / "a.png"), three(np.where(values == transparent, 255, pixels)))


def test_the_one_transparent_colour_of_a_png_shows_white(tmp_path: Path) -> None:
    colours = COLOURS // 128 * 100
    colour = colours[3, 5]
    png(tmp_path / "a.png", colours, 8, 2, struct.pack(">3H", *colour))
    there = (colours == colour).all(axis=2)
    assert 1 < there.sum() < SIDE**2
    assert np.array_equal(read(tmp_path / "a.png"), np.where(there[..., None], 255, colours))
    png(tmp_path / "a.png", DEEP[..., None].repeat(3, axis=2), 16, 2, struct.pack(">3H", 0, 0, 0))
    unread(tmp_path / "a.png")


def test_an_image_that_is_transparent_everywhere_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="transparent everywhere"):
        found = saved(tmp_path / "a.png", Image.fromarray(np.dstack([COLOURS, 0 * ALPHA])))
    assert (found == 255).all()


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_images_are_turned_upright(tmp_path: Path, suffix: str, orientation: int) -> None:
    pixels = np.zeros((16, 32, 3), dtype=np.uint8)
    pixels[:8, :16], pixels[:8, 16:], pixels[8:, :16] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = saved(tmp_path / f"a.{suffix}", Image.fromarray(pixels), exif=exif)
    expected = TURNS[orientation](pixels)
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected)[2:-2, 2:-2].mean() < 12  # lossy at the borders of colours
    if suffix in ("png", "tif"):
        assert np.array_equal(found, expected)
        deep = saved(tmp_path / f"b.{suffix}", Image.fromarray(DEEP), exif=exif)
        assert np.array_equal(deep, TURNS[orientation](three((DEEP >> 8).astype(np.uint8))))
        strip = saved(tmp_path / f"b.{suffix}", Image.fromarray(GREY[:5]), exif=exif)
        assert np.array_equal(strip, TURNS[orientation](three(GREY[:5])))
    if suffix == "png":
        found = saved(tmp_path / "c.png", Image.fromarray(np.dstack([COLOURS, ALPHA])), exif=exif)
        np.testing.assert_allclose(found, TURNS[orientation](over_white(COLOURS, ALPHA)), atol=0.51)


def test_exif_data_that_are_broken_leave_the_image_as_it_is(tmp_path: Path) -> None:
    for broken in (b"Exif\0\0", b"Exif\0\0MM", b"Exif\0\0XX*\0\0\0\0\x08", b"Exif\0\0II*\0\xff\xff\xff\xff", b"junk"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert np.array_equal(saved(tmp_path / "a.png", Image.fromarray(COLOURS), exif=broken), COLOURS)


def test_four_inks_and_luminance_are_converted_by_their_formulas(tmp_path: Path) -> None:
    inks = np.dstack([COLOURS, ALPHA // 2])
    expected = (255 - inks[..., :3].astype(float)) * (255 - inks[..., 3:]) / 255
    cmyk = Image.frombytes("CMYK", (SIDE, SIDE), inks.tobytes())
    np.testing.assert_allclose(saved(tmp_path / "a.tif", cmyk), expected, atol=1.5)
    flat = Image.new("CMYK", (SIDE, SIDE), (200, 100, 0, 50))  # Adobe's JPEGs have them inverted
    np.testing.assert_allclose(saved(tmp_path / "a.jpg", flat)[0, 0], [44, 125, 205], atol=4)
    y, cb, cr = COLOURS.astype(float).transpose(2, 0, 1) - np.array([0, 128, 128])[:, None, None]
    rgb = np.stack([y + 1.402 * cr, y - 0.344136 * cb - 0.714136 * cr, y + 1.772 * cb], axis=-1).clip(0, 255)
    if PILLOW > 10:  # which does not read the files of this mode that it writes
        ycbcr = Image.frombytes("YCbCr", (SIDE, SIDE), COLOURS.tobytes())
        np.testing.assert_allclose(saved(tmp_path / "b.tif", ycbcr), rgb, atol=1.5)


def test_lab_is_converted_by_its_definition(tmp_path: Path) -> None:
    lightness, a, b = 60.0, 30.0, -20.0
    found = saved(tmp_path / "a.tif", Image.new("LAB", (4, 4), (round(lightness * 2.55), 128 + 30, 128 - 20)))
    fy = (lightness + 16) / 116
    xyz = np.array([0.9642, 1.0, 0.8249]) * np.array([fy + a / 500, fy, fy - b / 200]) ** 3  # D50
    to_linear = [3.1338561, -1.6168667, -0.4906146, -0.9787684, 1.9161415, 0.0334540, 0.0719453, -0.2289914, 1.4052427]
    linear = np.array(to_linear).reshape(3, 3) @ xyz
    expected = 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    np.testing.assert_allclose(found[0, 0], expected, atol=2)


def test_profiles_of_colours_are_not_applied(tmp_path: Path) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes()
    assert np.array_equal(saved(tmp_path / "a.png", Image.fromarray(COLOURS), icc_profile=profile), COLOURS)


@pytest.mark.parametrize(
    ("values", "bits", "sample_format", "what"),
    [
        (DEEP.astype(np.int32), 32, 2, "32 bits with a sign"),
        (DEEP.astype(np.uint32), 32, 1, "32 bits"),
        (DEEP.astype(np.float32), 32, 3, "floats of 32 bits"),
        (DEEP.astype(np.float64), 64, 3, "floats of 64 bits"),  # which Pillow does not read
        ((DEEP >> 1).astype(np.int16), 16, 2, "16 bits with a sign"),
        (GREY.astype(np.int8), 8, 2, "8 bits with a sign"),
    ],
)
def test_values_without_a_known_range_are_refused(
    tmp_path: Path, values: np.ndarray, bits: int, sample_format: int, what: str
) -> None:
    tiff(tmp_path / "scan.tif", values, bits, sample_format=sample_format)
    message = unread(tmp_path / "scan.tif")
    assert f"got {what}, whose range is not known: give window=[level, width]" in message


@pytest.mark.parametrize(("name", "kind"), [("a.png", "PNG"), ("a.webp", "WEBP"), ("a.tif", "TIFF"), ("b.jpg", "GIF")])
def test_several_frames_or_pages_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    frames = [Image.new("RGB", (SIDE, SIDE), colour) for colour in ("red", "lime", "blue")]
    frames[0].save(tmp_path / name, format=kind, save_all=True, append_images=frames[1:])
    assert "3 pages" in unread(tmp_path / name)


@pytest.mark.skipif(PILLOW == 10, reason="Pillow 10 writes the first page's tags for all")
@pytest.mark.parametrize("order", [1, -1])
def test_a_page_is_chosen_over_its_preview(tmp_path: Path, order: int) -> None:
    image, preview = Image.fromarray(COLOURS), Image.fromarray(COLOURS[::2, ::2])
    image.encoderinfo = {"tiffinfo": {254: 0, 274: 6}}
    preview.encoderinfo = {"tiffinfo": {254: 1}}
    pages = [image, preview][::order]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:], **pages[0].encoderinfo)
    assert Image.open(tmp_path / "a.tif").n_frames == 2
    assert np.array_equal(read(tmp_path / "a.tif"), TURNS[6](COLOURS))


def test_of_a_jpeg_with_previews_the_first_image_is_read(tmp_path: Path) -> None:
    first, second = (Image.new("RGB", (SIDE, SIDE), colour) for colour in ("red", "lime"))
    first.save(tmp_path / "a.jpg", format="MPO", save_all=True, append_images=[second])
    assert Image.open(tmp_path / "a.jpg").n_frames == 2
    assert np.abs(read(tmp_path / "a.jpg").astype(int) - [255, 0, 0]).max() < 4


@pytest.mark.parametrize("suffix", [suffix[1:] for suffix in SUFFIXES if suffix != ".dcm"])
def test_files_that_end_early_are_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cut.{suffix}"
    Image.fromarray(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    content = path.read_bytes()
    for share in (0, 0.01, 0.5, 0.95):
        path.write_bytes(content[: int(share * len(content))])
        unread(path)


@pytest.mark.parametrize(
    "content",
    [
        b"P6\n12 x9\n255\n",  # Pillow raises a ValueError at these numbers
        b"P6\n20000 20000\n255\n",  # 400 million pixels, of which it says that they are a bomb
        b"P5\n1 65000\n255\n" + bytes(65000),  # a strip that would be wider than any memory once it is resized
    ],
)
def test_images_that_would_fill_the_memory_or_are_none_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.png").write_bytes(content)
    with refused(str(tmp_path / "a.png"), DatasetLayoutError):
        decode(tmp_path / "a.png", 256, 224)
