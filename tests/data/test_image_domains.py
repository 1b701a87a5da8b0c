"""ImageDomains: folders of images, decoded once or on the fly."""

from __future__ import annotations

import os
import shutil
from types import MappingProxyType

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

from fedlit import FederatedStrategy
from fedlit.data import DatasetLayoutError, DatasetNotFoundError, DomainDataset, ImageDomains
from fedlit.data.image_samples import ImageFiles, ImageTransform
from fedlit.federation import RosterError
from fedlit.federation.reading import BatchedDataset
from fedlit.federation.streams import enter_stream, torch_streams
from fedlit.methods import FedDANN, SourceOnly
from fedlit.models import Bottleneck, SmallCNN
from refused import refused

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
SUFFIXES = ["jpg", "png", "bmp", "webp", "JPEG"]


@pytest.fixture
def root(tmp_path):
    rng = np.random.default_rng(0)
    for domain in ("art", "photo", "sketch"):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / "office" / domain / name
            folder.mkdir(parents=True)
            for i in range(10):
                size = [(50, 40), (40, 57), (33, 33)][i % 3]
                blocks = Image.fromarray(rng.integers(0, 256, (5, 4, 3), dtype=np.uint8))
                image = blocks.resize(size, Image.Resampling.BICUBIC)
                if i == 4:
                    image = image.convert("L") if label else image.convert("RGBA")
                image = image.convert("RGB") if i % 5 == 4 else image
                image.save(folder / f"{i:02d}.{SUFFIXES[i % 5]}")
    return tmp_path / "office"


def by_hand(path, image_size, resized, resample=Image.Resampling.BILINEAR, mean=MEAN, std=STD):
    """Resize the shorter side, cut the middle, normalise: with PIL and NumPy alone."""
    image = Image.open(path).convert("RGB")
    width, height = image.size
    new = (resized, int(resized * height / width)) if width <= height else (int(resized * width / height), resized)
    image = image.resize(new, resample)
    left, top = (round((length - image_size) / 2) for length in image.size)
    pixels = np.asarray(image.crop((left, top, left + image_size, top + image_size)))
    return ((pixels / 255 - np.array(mean)) / np.array(std)).transpose(2, 0, 1)


OTHER = {"resized_side": 26, "interpolation": "bicubic", "mean": [0.5, 0.4, 0.3], "std": [0.5, 0.25, 1.0]}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [({}, (20, 24)), (OTHER, (20, 26, Image.Resampling.BICUBIC, OTHER["mean"], OTHER["std"]))],
)
def test_images_are_resized_cut_and_normalised_as_by_hand(root, arguments, expected):
    module = ImageDomains(str(root), image_size=20, target="photo", **arguments)
    assert module.resized_side == expected[1]
    assert module.input_shape == (3, 20, 20)
    assert module.classes == ["cat", "dog"]
    assert module.domain_names() == ["art", "photo", "sketch"]
    for name in module.domain_names():
        files = sorted((root / name / "cat").iterdir()) + sorted((root / name / "dog").iterdir())
        positions = module.split(name).test
        x, y = module.dataset(name, "test").batch(torch.arange(len(positions)))
        assert y.tolist() == [position // 10 for position in positions.tolist()]
        for image, position in zip(x, positions.tolist(), strict=True):
            np.testing.assert_allclose(image.numpy(), by_hand(files[position], *expected), atol=1e-5)
        pixels = (module.pixels(name, positions) * 255).round().to(torch.uint8)
        raw = module.raw_inputs()
        torch.testing.assert_close(raw.network(pixels), x)
        assert (raw.sample.dtype, raw.sample.shape[1:]) == (pixels.dtype, pixels.shape[1:])
    assert ImageDomains(str(root), image_size=224).resized_side == 256


class Pretrained(SmallCNN):
    """A network that was trained on images of its own."""

    preprocessing = MappingProxyType(
        {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "interpolation": "bicubic", "image_size": 160}
    )


@pytest.mark.parametrize("wrap", [lambda network: network, lambda network: Bottleneck(network, 4)])
def test_training_a_pretrained_network_on_images_of_another_scale_is_refused(root, wrap):
    def fit(**given: object):
        data = ImageDomains(str(root), image_size=14, target="sketch", seed=0, **given)
        module = SourceOnly(data.clients, data.target, data.num_classes, wrap(Pretrained(3, 2)))
        L.Trainer(max_epochs=1, accelerator="cpu", limit_val_batches=0, **QUIET).fit(module, data)

    with refused("mean", DatasetLayoutError):
        fit()
    with refused("interpolation", DatasetLayoutError):
        fit(mean=[0.5] * 3, std=[0.5] * 3)
    fit(mean=[0.5] * 3, std=[0.5] * 3, interpolation="bicubic")
    fit(mean=[0.4] * 3, std=[0.3] * 3, interpolation="bilinear")  # of weights that were trained in another way


def test_clients_that_read_their_images_in_other_ways_are_refused(root):
    given = {"clients": ["art", "photo"], "image_size": 20}
    one, other = ImageDomains(str(root), **given), ImageDomains(str(root), **given, interpolation="bicubic")
    one.check_facts({name: one.facts(name) for name in ("art", "photo")})
    with refused("reading", DatasetLayoutError):
        one.check_facts({"art": one.facts("art"), "photo": other.facts("photo")})


def test_ids_are_paths_below_the_root(root):
    module = ImageDomains(str(root), image_size=20, target="photo")
    ids = module.ids("photo", "predict")
    assert ids == module.ids("photo", "test")
    assert len(ids) == len(module.split("photo").test) > 0
    for name, (x, y) in zip(ids, module.dataset("photo", "test"), strict=True):
        np.testing.assert_allclose(x.numpy(), by_hand(root / name, 20, module.resized_side), atol=1e-5)
        assert name.split("/")[:2] == ["photo", ["cat", "dog"][int(y)]]


def collect(loader):
    return [{name: (x, y) for name, (x, y) in batch.items()} for batch in loader]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_cached_images_equal_those_decoded_on_the_fly(root, num_workers):
    given = {"image_size": 20, "batch_size": 5, "eval_batch_size": 7, "num_workers": num_workers}
    cached, lazy = ImageDomains(str(root), **given), ImageDomains(str(root), **given, cache_limit_mb=0)
    assert (cached.cached, lazy.cached) == (True, False)
    assert isinstance(cached.dataset("art", "train"), DomainDataset)
    assert isinstance(lazy.dataset("art", "train"), ImageFiles)
    assert not isinstance(lazy.dataset("art", "train"), BatchedDataset)  # else the loader would not use its workers
    for loader in ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"):
        ours, theirs = collect(getattr(cached, loader)()), collect(getattr(lazy, loader)())
        assert len(ours) == len(theirs) > 0
        for a, b in zip(ours, theirs, strict=True):
            assert list(a) == list(b)
            assert all(torch.equal(a[name][0], b[name][0]) for name in a)
            assert all(torch.equal(a[name][1], b[name][1]) for name in a if name != cached.target)


def test_augmented_batches_do_not_depend_on_the_number_of_workers(root):
    given = {"image_size": 20, "augment": True, "cache_limit_mb": 0}
    runs = [collect(ImageDomains(str(root), **given, num_workers=n).train_dataloader()) for n in (0, 2)]
    for a, b in zip(*runs, strict=True):
        assert all(torch.equal(a[name][0], b[name][0]) for name in a)


def test_a_transductive_target_is_decoded_once_to_bytes_without_a_draw(root):
    module = ImageDomains(str(root), image_size=20, transductive=True, target="art")
    state = torch.random.get_rng_state()
    assert module.dataset("art", "train").x.dtype == torch.uint8
    assert torch.equal(torch.random.get_rng_state(), state)
    assert module.dataset("art", "train").x is module.dataset("art", "test").x
    assert (module.dataset("art", "train").y == -1).all()
    assert (module.dataset("art", "test").y >= 0).all()


def test_augmentation_cuts_and_mirrors_the_stored_image(root):
    plain = ImageDomains(str(root), image_size=20)
    module = ImageDomains(str(root), image_size=20, augment=True)
    train, test = module.dataset("art", "train"), module.dataset("art", "test")
    assert train.augments
    assert not test.augments
    assert not plain.dataset("art", "train").augments
    assert train.x.shape[-1] == module.resized_side == 24
    assert torch.equal(test.batch(torch.arange(3))[0], plain.dataset("art", "test").batch(torch.arange(3))[0])
    assert torch.equal(train.x[..., 2:-2, 2:-2], plain.dataset("art", "train").x)  # cut twice, the same as once
    draws = []
    for number in (0, 0, 1):
        with torch_streams():
            enter_stream("test", number)
            draws.append(train.batch(torch.arange(len(train)))[0])
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    stored = ImageTransform(24)(train.x)
    mirrored = 0
    for image, original in zip(draws[0], stored, strict=True):
        windows = {
            (top, left, flip): torch.equal(image, cut.flip(-1) if flip else cut)
            for top in range(5)
            for left in range(5)
            for cut in [original[:, top : top + 20, left : left + 20]]
            for flip in (False, True)
        }
        assert any(windows.values())
        mirrored += any(hit for (_, _, flip), hit in windows.items() if flip)
    assert 0 < mirrored < len(train)


def test_office31_keeps_its_folder_of_images(root):
    for domain in root.iterdir():
        (domain / "images").mkdir()
        for name in ("cat", "dog"):
            (domain / name).rename(domain / "images" / name)
    module = ImageDomains(str(root))
    assert module.classes == ["cat", "dog"]
    assert len(module.load("art").y) == 20


def test_class_folders_that_differ_need_classes(root):
    (root / "art" / "bird").mkdir()
    with refused("classes", DatasetLayoutError):
        ImageDomains(str(root))
    module = ImageDomains(str(root), classes=["dog", "cat"])
    assert module.classes == ["dog", "cat"]
    assert [path.parent.name for path in module.load("art").x] == ["dog"] * 10 + ["cat"] * 10
    with refused("classes", DatasetLayoutError):
        ImageDomains(str(root), classes=["bird", "cat"])


@pytest.mark.parametrize(
    ("one", "what"), [("Cat", "capitals"), ("cat ", "blanks"), ("c\u200bat", "capitals, blanks or")]
)
def test_class_folders_that_are_alike_are_no_two_classes(root, one, what):
    for domain in ("art", "photo", "sketch"):
        shutil.copytree(root / domain / "cat", root / domain / one)
    if len([*(root / "art").iterdir()]) < 3:
        pytest.skip("this file system takes the names for one")
    for classes in (None, ["cat", "dog"]):  # of which the images in the other folder would be left out
        with pytest.raises(DatasetLayoutError, match=f"differ in {what}"):
            ImageDomains(str(root), classes=classes)
    assert ImageDomains(str(root), classes=["cat", one, "dog"]).num_classes == 3
    for domain in ("art", "photo"):
        shutil.rmtree(root / domain / one)
    shutil.rmtree(root / "sketch" / "cat")
    with pytest.raises(DatasetLayoutError, match=f"differ in {what}"):
        ImageDomains(str(root))


def test_domain_folders_that_are_alike_are_no_two_clients(root):
    shutil.copytree(root / "photo", root / "Art")
    if len([*root.iterdir()]) < 4:
        pytest.skip("this file system takes the names for one")
    for clients in (None, ["art", "photo"], ["Art", "photo"]):
        with refused("clients", RosterError):
            ImageDomains(str(root), clients=clients)
    assert ImageDomains(str(root), clients=["photo", "sketch"]).target == "sketch"


@pytest.mark.parametrize("below", ["", "images"])
def test_a_target_without_class_folders_is_unlabelled(root, below):
    target = root / "wild" / below
    target.mkdir(parents=True)
    for number, file in enumerate(sorted((root / "photo").rglob("*.*"))[:7]):
        shutil.copy(file, target / f"{number}{file.suffix}")
    (target / "notes.txt").write_text("x")
    (target / "._0.jpg").write_text("what macOS writes beside files")
    (target / "lost.jpg").symlink_to("nowhere.jpg")
    with pytest.warns(UserWarning, match=r"lost.jpg \(a link to nothing\)', 'notes.txt'"):
        ImageDomains(str(root), image_size=20, target="wild")
    module = ImageDomains(str(root), image_size=20, target="wild", transductive=True)
    assert module.classes == ["cat", "dog"]
    assert module.labels("wild").tolist() == [-1] * 7
    assert [path.stem for path in module.load("wild").x] == list("0123456")
    assert module.train_dataloader().sizes()["wild"] == 7
    x, y = module.dataset("wild", "test").batch(torch.tensor([0, 6]))
    assert y.tolist() == [-1, -1]
    np.testing.assert_allclose(x[1].numpy(), by_hand(module.load("wild").x[6], 20, module.resized_side), atol=1e-5)
    assert len(module.plot(2).axes) > 0
    with refused("wild", DatasetLayoutError):
        ImageDomains(str(root), target="photo")


@pytest.mark.parametrize("below", ["", "images"])
def test_images_beside_class_folders_are_the_targets_without_a_label_and_left_out_of_sources(root, below):
    if below:
        for domain in ("art", "photo", "sketch"):
            (root / domain).rename(root / "images")
            (root / domain).mkdir()
            (root / "images").rename(root / domain / "images")
    for domain in ("photo", "art"):
        for number, file in enumerate(sorted((root / domain).rglob("*.*"))[:7]):
            shutil.copy(file, root / domain / below / f"new{number}{file.suffix}")
    module = ImageDomains(str(root), image_size=20, target="photo", transductive=True, batch_size=8)
    assert module.classes == ["cat", "dog"]
    with pytest.warns(
        UserWarning, match=r"left out 7 images of source 'art' beside its class folders \(\['new0.jpg', .* and 2 more\)"
    ):
        assert module.labels("art").tolist() == [0] * 10 + [1] * 10
    assert module.labels("photo").tolist() == [0] * 10 + [1] * 10 + [-1] * 7
    assert [path.stem for path in module.load("photo").x[20:]] == [f"new{number}" for number in range(7)]
    assert module.train_dataloader().sizes()["photo"] == 27
    trainer = L.Trainer(max_epochs=1, strategy=FederatedStrategy(local_steps=1), accelerator="cpu", **QUIET)
    adapted = FedDANN(module.clients, "photo", 2, SmallCNN(3, width=4))
    trainer.fit(adapted, module)
    assert trainer.predict(adapted, module)[0]["photo"].shape[1] == 2


@pytest.mark.parametrize("where", [b"photo/cat/lat\xe9in.png", b"photo/lat\xe9in/00.png", b"lat\xe9in/cat/00.png"])
def test_names_that_are_not_in_utf_8_are_refused(root, where):
    path = os.path.join(os.fsencode(root), where)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    shutil.copy(root / "photo" / "dog" / "01.png", path)
    with pytest.raises(DatasetLayoutError, match=r"names in .* must be in UTF-8, got .*lat\\+udce9in.*: rename these"):
        ImageDomains(str(root), image_size=20, target="photo").load("photo")


def test_a_site_needs_its_own_folder_alone(root):
    for other in ("photo", "sketch"):
        shutil.rmtree(root / other)
    module = ImageDomains(str(root), clients=["art", "photo", "sketch"], target="photo", image_size=20)
    assert module.classes == ["cat", "dog"]
    assert len(module.dataset("art", "train")) == 14
    assert module.cached
    with pytest.raises(DatasetNotFoundError, match="no data of client 'photo'"):
        module.dataset("photo", "train")


def test_a_site_with_images_of_no_class_needs_the_classes(root):
    for other in ("art", "sketch"):
        shutil.rmtree(root / other)
    for name in ("cat", "dog"):
        for file in (root / "photo" / name).iterdir():
            file.rename(root / "photo" / f"{name}-{file.name}")
        (root / "photo" / name).rmdir()
    given = {"clients": ["art", "photo"], "target": "photo", "image_size": 20}
    with refused("classes", DatasetLayoutError):
        ImageDomains(str(root), **given)
    assert ImageDomains(str(root), **given, classes=["cat", "dog"]).labels("photo").tolist() == [-1] * 20


def test_a_missing_root_says_where_it_looked(tmp_path):
    with pytest.raises(DatasetNotFoundError, match=r"no folder root='.*nowhere'.*root/domain/class"):
        ImageDomains(str(tmp_path / "nowhere"))
    with refused("root", DatasetLayoutError):
        ImageDomains(str(tmp_path))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("image_size", 0), ("resized_side", 223), ("interpolation", "area"), ("cache_limit_mb", -1)),
        *(("classes", ["cat"]), ("mean", [123.7, 116.3, 103.5]), ("mean", [0.5])),
        *(("std", [0.2, value, 0.2]) for value in (0.0, float("nan"))),
    ],
)
def test_arguments_out_of_range_are_refused(root, argument, value):
    with refused(argument):
        ImageDomains(str(root), **{argument: value})


def test_what_is_no_image_is_left_out_or_refused(root):
    cats = root / "art" / "cat"
    for name in ("notes.gif", "Thumbs.db"):
        (cats / name).write_text("x")
    with pytest.warns(UserWarning, match="left out .*notes.gif"):
        assert len(ImageDomains(str(root)).load("art").y) == 20
    (cats / "notes.gif").unlink()
    (cats / "00.jpg").write_bytes(b"not an image")
    with refused("images", DatasetLayoutError):
        ImageDomains(str(root), image_size=20).dataset("art", "train")
    for file in cats.iterdir():
        file.unlink()
    with refused(str(cats), DatasetLayoutError):
        ImageDomains(str(root)).train_dataloader()
    (root / "image_list").mkdir()
    with refused("image_list", DatasetLayoutError):
        ImageDomains(str(root))
    assert ImageDomains(str(root), clients=["art", "photo"]).num_classes == 2


def test_domains_are_described_and_drawn(root):
    module = ImageDomains(str(root), image_size=20)
    assert str(module).endswith("2 classes, input (3, 20, 20)")
    figure = module.plot(num_samples=4)
    assert [axis.get_title() for axis in figure.axes] == ["cat", "dog", "cat", "dog"] * 3
