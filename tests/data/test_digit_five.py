"""DigitFive, from small files that the tests write themselves, and once from MNIST and USPS."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from fedlit.data import DatasetLayoutError, DatasetNotFoundError, DigitFive
from fedlit.data.digit_five import rendered_digits, resize
from fedlit.data.digits import photo_patches
from fedlit.federation.errors import RosterError
from refused import refused

NAMES = ["mnist", "usps", "optdigits", "blended", "rendered"]
SIZES = {"mnist": 303, "usps": 450, "optdigits": 1797, "blended": 297, "rendered": 2000}


def fake(**changes: np.ndarray | None):
    """600 images for MNIST, 30 to 90 of each digit, and 450 for USPS; random, so that no two are alike."""
    rng = np.random.default_rng(0)
    counts = [30, 31, 45, 51, 60, 61, 71, 80, 81, 90]
    arrays = {
        "mnist_x": rng.integers(0, 256, (600, 28, 28), dtype=np.uint8),
        "mnist_y": rng.permutation(np.repeat(np.arange(10), counts)),
        "usps_x": rng.integers(0, 256, (450, 16, 16), dtype=np.uint8),
        "usps_y": (np.arange(450) % 10).astype(np.uint8),
        "usps_n_train": np.array(300),
    }
    return {key: value for key, value in (arrays | changes).items() if value is not None}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("digit_five") / "digits.npz"
    np.savez(file, **fake())
    return str(file)


@pytest.fixture(scope="module")
def module(path):
    return DigitFive(path)


def test_five_domains_of_ten_digits_have_one_shape_and_lie_in_the_unit_interval(module):
    assert module.domain_names() == NAMES
    assert module.classes == [str(digit) for digit in range(10)]
    assert (module.target, module.input_shape) == ("mnist", (1, 16, 16))
    for name in NAMES:
        domain = module.load(name)
        assert domain.x.shape == (SIZES[name], 1, 16, 16), name
        assert (domain.x.dtype, domain.y.dtype) == (torch.float32, torch.int64)
        assert 0 <= domain.x.min() < domain.x.max() - 0.5 <= 0.5, name  # averaging narrows random pixels


def test_images_that_have_the_size_already_are_the_bytes_of_the_file(path):
    usps = DigitFive(path).load("usps")
    np.testing.assert_array_equal(usps.x[:, 0].numpy(), (fake()["usps_x"] / 255).astype(np.float32))
    np.testing.assert_array_equal(usps.y.numpy(), fake()["usps_y"])
    module = DigitFive(path, image_size=28)
    chosen = module.mnist_positions("mnist").numpy()
    mnist = module.load("mnist")
    np.testing.assert_array_equal(mnist.x[:, 0].numpy(), (fake()["mnist_x"][chosen] / 255).astype(np.float32))
    np.testing.assert_array_equal(mnist.y.numpy(), fake()["mnist_y"][chosen])
    small = DigitFive(path, image_size=8).load("optdigits")
    np.testing.assert_array_equal(small.x[:, 0].numpy(), (load_digits().images / 16).astype(np.float32))
    np.testing.assert_array_equal(small.y.numpy(), load_digits().target)


@pytest.mark.parametrize(("before", "after"), [(28, 16), (16, 32), (8, 16), (28, 8)])
def test_resizing_is_what_pillow_does(before, after):
    x = torch.rand(3, 1, before, before, generator=torch.Generator().manual_seed(0))
    for ours, image in zip(resize(x, after), x, strict=True):
        theirs = Image.fromarray(image[0].numpy()).resize((after, after), Image.Resampling.BILINEAR)
        np.testing.assert_allclose(ours[0].numpy(), np.asarray(theirs), atol=1e-5)


def test_mnist_and_blended_hold_different_digits_and_together_all(module):
    halves = [module.mnist_positions(name) for name in ("mnist", "blended")]
    assert sorted(torch.cat(halves).tolist()) == list(range(600))
    y = torch.from_numpy(fake()["mnist_y"])
    counts = [torch.bincount(y[half], minlength=10) for half in halves]
    assert ((counts[0] - counts[1]).abs() <= 1).all()
    for name, half in zip(("mnist", "blended"), halves, strict=True):
        assert torch.equal(half, half.sort().values)
        assert torch.equal(module.load(name).y, y[half])


@pytest.mark.parametrize(("size", "zoom"), [(16, 2), (28, 1), (8, 4), (64, 1)])
def test_blended_is_the_absolute_difference_of_patch_and_digit(path, size, zoom):
    module = DigitFive(path, image_size=size, photo_strength=0.6)
    chosen = fake()["mnist_x"][module.mnist_positions("blended").numpy()]
    written = resize(torch.from_numpy(chosen / 255).float()[:, None], size).numpy()
    patches = photo_patches(len(written), zoom, size).numpy()
    np.testing.assert_allclose(module.load("blended").x.numpy(), np.abs(0.6 * patches - written), atol=1e-6)
    plain = DigitFive(path, image_size=size, photo_strength=0.0).load("blended").x
    np.testing.assert_allclose(plain.numpy(), written, atol=1e-7)


def test_rendered_digits_are_balanced_and_as_often_dark_as_light():
    x, y = rendered_digits(16)
    assert torch.bincount(y).tolist() == [200] * 10
    border = torch.cat([x[:, 0, [0, -1]].flatten(1), x[:, 0, :, [0, -1]].flatten(1)], dim=1).median(dim=1).values
    low, high = x.amin(dim=(1, 2, 3)), x.amax(dim=(1, 2, 3))
    on_dark, on_light = (border - low).abs() < 1e-3, (border - high).abs() < 1e-3
    assert (on_dark ^ on_light).float().mean() > 0.99  # the border shows the background, one of the two greys
    assert on_dark.float().mean().item() == pytest.approx(0.5, abs=0.05)  # 4.5 standard deviations of 2,000 coins
    assert (high - low).min() > 0.2  # the greys differ by at least 0.4, and thin strokes are averaged with it


def test_data_depend_neither_on_the_seed_nor_on_who_takes_part_nor_on_the_target(module, path):
    other = DigitFive(path, seed=7, target="rendered")
    pair = DigitFive(path, clients=["mnist", "blended"], seed=1)
    torch.manual_seed(123)
    for name in NAMES:
        for again in (other.load(name), pair.load(name)):
            assert torch.equal(again.x, module.load(name).x)
            assert torch.equal(again.y, module.load(name).y)


def test_max_samples_keeps_class_shares_and_is_the_same_in_every_run(module, path):
    limited = DigitFive(path, max_samples=300, seed=3)
    for name in NAMES:
        few, many = limited.load(name), module.load(name)
        size = min(300, SIZES[name])
        assert len(few.x) == len(few.y) == size
        share = torch.bincount(many.y, minlength=10) * (size / len(many.y))
        assert ((torch.bincount(few.y, minlength=10) - share).abs() < 1).all(), name
        distances = torch.cdist(few.x.flatten(1), many.x.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
        assert (distances.min(dim=1).values == 0).all(), name  # a selection, of images as they were
        assert len(torch.unique(few.x.flatten(1), dim=0)) == size
        assert torch.equal(DigitFive(path, max_samples=300, target="usps").load(name).x, few.x)
    assert torch.equal(limited.load("blended").x, module.load("blended").x)  # 297 are fewer than 300


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("image_size", size) for size in (7, 65)),
        *(("photo_strength", x) for x in (1.5, float("nan"))),
        ("max_samples", 9),
    ],
)
def test_numbers_out_of_range_are_refused(path, argument, value):
    with refused(argument):
        DigitFive(path, **{argument: value})


def test_a_missing_file_or_target_is_named(path, tmp_path):
    with pytest.raises(RosterError, match="'svhn'"):
        DigitFive(path, target="svhn")
    with pytest.raises(DatasetNotFoundError, match=r"gone.*torchvision.datasets.MNIST and USPS"):
        DigitFive(str(tmp_path / "gone.npz"))


@pytest.mark.parametrize(
    "changes",
    [
        *({"mnist_x": x} for x in (np.zeros((600, 784), dtype=np.uint8), np.zeros((600, 28, 28)))),
        {"usps_x": np.zeros((450, 28, 28), dtype=np.uint8)},
        *({"mnist_y": y} for y in (np.zeros(599, dtype=int), np.arange(600) % 10 / 2)),
        *({"usps_y": y} for y in (np.arange(450) % 10 + 1, np.arange(450) % 9)),
    ],
)
def test_a_file_with_something_else_is_refused(tmp_path, changes):
    np.savez(tmp_path / "digits.npz", **fake(**changes))
    with refused(next(iter(changes)), DatasetLayoutError):
        DigitFive(str(tmp_path / "digits.npz"))


def test_a_file_without_all_arrays_is_refused(tmp_path):
    np.savez(tmp_path / "digits.npz", **fake(usps_y=None))
    with refused(str(tmp_path / "digits.npz"), DatasetLayoutError):
        DigitFive(str(tmp_path / "digits.npz"))


@pytest.mark.slow
def test_the_shifts_are_real_but_each_written_domain_can_be_learnt(shared_data):
    module = DigitFive(str(shared_data / "digits_mnist10k_usps.npz"), max_samples=600, flatten=True, val_fraction=0.0)
    samples = {name: (module.load(name).x.flatten(1).numpy(), module.load(name).y.numpy()) for name in NAMES}
    for name in ("mnist", "usps", "optdigits"):
        (x, y), split = samples[name], module.split(name)
        model = LogisticRegression(max_iter=300, C=0.1).fit(x[split.train], y[split.train])
        home = model.score(x[split.test], y[split.test])
        assert home > 0.8, name
        for other in {*NAMES} - {name}:
            assert model.score(*samples[other]) < home - 0.2, (name, other)
