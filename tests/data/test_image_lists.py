"""List files of images, and DomainBed's protocol, on small trees in the layouts of the papers' data sets."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from fedlit.data import DatasetLayoutError, DatasetNotFoundError, ImageDomains
from fedlit.federation.streams import torch_streams
from fedlit.papers.stand_ins import STAND_INS
from refused import refused

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
DOMAINNET = {"lists": "{domain}_train.txt", "test_lists": "{domain}_test.txt"}


def lines(path: Path) -> list[tuple[str, int]]:
    return [(line.split()[0], int(line.split()[1])) for line in path.read_text().splitlines()]


@pytest.fixture
def domainnet(tmp_path):
    STAND_INS["DomainNet"](tmp_path)
    return tmp_path


@pytest.mark.parametrize("start", [None, "."])
def test_published_lists_of_training_and_testing_are_the_split(domainnet, start, monkeypatch):
    monkeypatch.chdir(domainnet)
    domainnet = domainnet if start is None else Path(start)
    module = ImageDomains(str(domainnet), **DOMAINNET, image_size=20, val_fraction=0.25, target="sketch")
    assert module.domain_names() == ["clipart", "infograph", "painting", "quickdraw", "real", "sketch"]
    assert module.classes == ["bird", "dog", "mug"]
    for name in ("clipart", "sketch"):
        paths, y, split = module.load(name).x, module.labels(name), module.split(name)
        listed = [dict(lines(domainnet / f"{name}_{part}.txt")) for part in ("train", "test")]
        names = [path.relative_to(domainnet).as_posix() for path in paths]
        assert {names[i] for i in split.test} == {*listed[1]}
        assert {names[i] for i in [*split.train, *split.val]} == {*listed[0]}
        held = torch.bincount(y[split.val]).tolist()  # a quarter of 8 of each class, or of all whatever they are
        assert held == [2, 2, 2] if name == "clipart" else sum(held) == 6
        assert [(listed[0] | listed[1])[each] for each in names] == y.tolist()
        assert module.ids(name, "test") == [names[i] for i in split.test]
    x, y = module.dataset("real", "test").batch(torch.arange(12))
    first = (
        Image.open(domainnet / module.ids("real", "test")[0]).convert("RGB").resize((24, 24), Image.Resampling.BILINEAR)
    )
    pixels = np.asarray(first.crop((2, 2, 22, 22))) / 255
    np.testing.assert_allclose(x[0].numpy(), ((pixels - MEAN) / STD).transpose(2, 0, 1), atol=1e-5)


def test_flat_lists_name_classes_by_number_and_lists_beside_images_start_there(tmp_path):
    STAND_INS["ImageCLEF-DA"](tmp_path / "clef")
    module = ImageDomains(str(tmp_path / "clef"), lists="list/{domain}List.txt", target="p")
    assert (module.domain_names(), module.classes) == (["b", "c", "i", "p"], ["0", "1", "2"])
    assert module.labels("b").tolist() == [label for _, label in lines(tmp_path / "clef/list/bList.txt")]
    STAND_INS["VisDA-C"](tmp_path / "visda")
    for given in ({"clients": ["train", "validation"]}, {}):
        module = ImageDomains(str(tmp_path / "visda"), lists="{domain}/image_list.txt", target="validation", **given)
        assert module.classes == [f"class_{number:02d}" for number in range(12)]
    folders = sorted(path.parent.name for path in module.load("test").x)
    assert folders[::12] == [f"trunk{number:02d}" for number in range(12)]


def test_labels_of_two_digits_are_in_the_order_of_numbers(tmp_path):
    for domain in ("a", "b"):
        (tmp_path / domain).mkdir()
        for label in range(11):
            for number in range(4):
                Image.new("RGB", (8, 8)).save(tmp_path / domain / f"{label}-{number}.png")
        text = "".join(f"{domain}/{label}-{n}.png\t{label}\n\n" for label in range(11) for n in range(4))
        (tmp_path / f"{domain}.txt").write_text(text)
    assert ImageDomains(str(tmp_path), lists="{domain}.txt").classes == [str(label) for label in range(11)]


def test_lists_from_windows_are_read_as_the_others(domainnet):
    whole = ImageDomains(str(domainnet), **DOMAINNET, image_size=20).load("real")
    for path in domainnet.glob("*.txt"):
        text = "".join(f" {line} \r\n\r\n" for line in path.read_text().splitlines())
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())  # the mark of its editor
    read = ImageDomains(str(domainnet), **DOMAINNET, image_size=20).load("real")
    assert (read.x, read.y.tolist()) == (whole.x, whole.y.tolist())


def test_images_that_a_list_names_and_are_missing_are_counted_and_the_first_named(domainnet):
    for path in sorted((domainnet / "real" / "dog").iterdir()):
        path.unlink()
    module = ImageDomains(str(domainnet), **DOMAINNET, image_size=20)
    with pytest.raises(DatasetLayoutError, match=r"12 of 36 that are missing.*dog_0000.jpg") as caught:
        module.split("real")
    assert caught.value.argument == "lists"
    assert len(module.labels("clipart")) == 36


def _append(file: str, line: str):
    return lambda root: (root / file).open("a").write(line)


REAL = "real/dog/dog_0009.jpg 0\nreal/bird/bird_0009.jpg 1\n"


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("clipart_train.txt", _append("clipart_train.txt", "clipart/bird/bird_0000.jpg\n")),
        ("clipart_train.txt", _append("clipart_train.txt", "clipart/bird/bird_0000.jpg -1\n")),
        ("clipart_train.txt", _append("clipart_train.txt", "../bird_0000.jpg 1\n")),
        ("clipart_train.txt", _append("clipart_train.txt", "./clipart/bird/bird_0000.jpg 0\n")),
        ("real_test.txt", lambda root: (root / "real_test.txt").write_text("\n")),
        ("test_lists", lambda root: (root / "real_test.txt").unlink()),
        ("test_lists", _append("real_test.txt", "real/bird/bird_0000.jpg 0\n")),
        ("lists", lambda root: (root / "real_test.txt").write_text(REAL)),
        ("classes", _append("real_train.txt", "real/cat/cat_0000.jpg 3\n")),
    ],
)
def test_lists_with_other_lines_or_that_do_not_fit_together_are_refused(domainnet, argument, change):
    change(domainnet)
    with refused(str(domainnet / argument) if argument.endswith(".txt") else argument, DatasetLayoutError):
        ImageDomains(str(domainnet), **DOMAINNET)


def test_an_image_elsewhere_hides_no_classes_that_are_numbered_in_another_way(domainnet):
    file = domainnet / "sketch_train.txt"
    swapped = [f"{path} {1 - label if label < 2 else label}" for path, label in lines(file)]
    (domainnet / "sketch" / "dog" / "more").mkdir()
    (domainnet / "sketch" / "dog" / "more" / "a.jpg").write_bytes(b"")
    file.write_text("\n".join([*swapped, "sketch/dog/more/a.jpg 0"]) + "\n")
    with refused("lists", DatasetLayoutError):
        ImageDomains(str(domainnet), **DOMAINNET)


def test_lists_that_are_not_there_or_not_named_are_refused(domainnet):
    with pytest.raises(DatasetNotFoundError, match=r"no list files lists='\{domain\}.csv'"):
        ImageDomains(str(domainnet), lists="{domain}.csv")
    for argument, given in (
        ("lists", {"lists": "train.txt"}),
        ("test_lists", {"test_lists": "{domain}.txt"}),
        ("lists", {"lists": "*{domain}_train.txt"}),
        ("protocol", {"protocol": "domainbed", "augment": True}),
        ("protocol", {"protocol": "domainbed", "normalise": "client"}),
    ):
        with refused(argument):
            ImageDomains(str(domainnet), **given)


def test_another_number_of_images_than_the_published_one_is_refused(tmp_path):
    STAND_INS["Adaptiope"](tmp_path)
    module = ImageDomains(
        str(tmp_path), image_size=20, published={"synthetic": 36, "real_life": 12300, "product_images": 36}
    )
    assert len(module.labels("synthetic")) == 36
    with pytest.raises(DatasetLayoutError, match="must be 12300, got 36") as caught:
        module.split("real_life")
    assert caught.value.argument == "published"


def test_published_numbers_of_domains_that_are_none_are_refused(tmp_path):
    STAND_INS["Adaptiope"](tmp_path)
    with refused("published") as caught:
        ImageDomains(str(tmp_path), published={"synthetc": 36})
    assert "synthetic" in str(caught.value)
    with refused("published", TypeError):
        ImageDomains(str(tmp_path), published={"synthetic": "36"})
    (tmp_path / "__MACOSX" / "synthetic").mkdir(parents=True)  # as archives have it that were made there
    assert ImageDomains(str(tmp_path), published={"synthetic": 36}).domain_names() == [
        "product_images",
        "real_life",
        "synthetic",
    ]


def test_files_that_are_lists_of_no_client_are_left_alone(domainnet):
    (domainnet / "readme_train.txt").write_text("What this is, in words.\n")
    (domainnet / "quickdraw_test.txt").unlink()
    with refused(str(domainnet / "readme_train.txt"), DatasetLayoutError):
        ImageDomains(str(domainnet), **DOMAINNET)
    module = ImageDomains(str(domainnet), **DOMAINNET, clients=["clipart", "real"], image_size=20)
    assert len(module.labels("real")) == 36
    with refused("test_lists", DatasetLayoutError):
        ImageDomains(str(domainnet), **DOMAINNET, clients=["quickdraw", "real"])


@pytest.fixture
def bed(tmp_path):
    """PACS, in images of several shapes."""
    STAND_INS["PACS"](tmp_path)
    for number, path in enumerate(sorted(tmp_path.rglob("*.jpg"))):
        Image.open(path).resize([(32, 32), (50, 40), (30, 61)][number % 3]).save(path)
    return tmp_path


def test_domainbed_stretches_images_and_augments_those_of_sources_as_torchvision(bed):
    given = {"protocol": "domainbed", "image_size": 24, "target": "photo", "seed": 3}
    module = ImageDomains(str(bed), **given)
    assert module.cached
    prepared = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    plain = transforms.Compose([transforms.Resize((24, 24)), *prepared])
    recipe = transforms.Compose([
        transforms.RandomResizedCrop(24, scale=(0.7, 1.0)), transforms.RandomHorizontalFlip(),
        transforms.ColorJitter(0.3, 0.3, 0.3, 0.3), transforms.RandomGrayscale(), *prepared,
    ])  # fmt: skip
    for name, stage in (("cartoon", "train"), ("cartoon", "test"), ("photo", "train"), ("photo", "test")):
        paths, dataset = module.load(name).x, module.dataset(name, stage)
        augments = (name, stage) == ("cartoon", "train")
        assert dataset.augments == augments
        for place, position in enumerate(getattr(module.split(name), stage).tolist()):
            image = Image.open(paths[position]).convert("RGB")
            with torch_streams():
                torch.manual_seed(place)
                expected = (recipe if augments else plain)(image)
                torch.manual_seed(place)
                torch.testing.assert_close(dataset[place][0], expected, atol=1e-5, rtol=0)
    pixels = (module.pixels("photo", torch.arange(3)) * 255).round().to(torch.uint8)
    torch.testing.assert_close(module.raw_inputs().network(pixels), module.all_samples("photo").transform(pixels))


@pytest.mark.slow
def test_domainbeds_augmentation_does_not_depend_on_the_number_of_workers(bed):
    given = {"protocol": "domainbed", "image_size": 24, "target": "photo", "seed": 3}
    runs = [[*ImageDomains(str(bed), **given, num_workers=n).train_dataloader()] for n in (0, 2)]
    for one, other in zip(*runs, strict=True):
        assert all(torch.equal(one[name][0], other[name][0]) for name in one)


def test_domainbed_splits_are_those_of_its_code(bed):
    module = ImageDomains(str(bed), protocol="domainbed", image_size=24, val_fraction=0.0, target="photo", seed=2)
    for environment, name in enumerate(["art_painting", "cartoon", "photo", "sketch"]):
        keys = list(range(36))  # of misc.split_dataset(env, int(0.2 n), misc.seed_hash(trial_seed, env_i))
        seed = int(hashlib.md5(str((2, environment)).encode("utf-8")).hexdigest(), 16) % (2**31)
        np.random.RandomState(seed).shuffle(keys)
        split = module.split(name)
        assert split.test.tolist() == sorted(keys[:7])
        assert split.train.tolist() == sorted(keys[7:])
    some = ImageDomains(str(bed), protocol="domainbed", image_size=24, val_fraction=0.1, target="photo", seed=2)
    assert [len(part) for part in (some.split("sketch").train, some.split("sketch").val)] == [26, 3]


def test_clients_of_two_protocols_are_refused(bed):
    one, other = (ImageDomains(str(bed), image_size=24, protocol=each) for each in (None, "domainbed"))
    with refused("reading", DatasetLayoutError):
        one.check_facts({"cartoon": one.facts("cartoon"), "photo": other.facts("photo")})
