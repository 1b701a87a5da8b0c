"""FashionMNIST, ColoredMNIST and CIFAR10, from files that the tests write themselves."""

from __future__ import annotations

import gzip
import hashlib
import math
import pickle
import struct

import numpy as np
import pytest
import torch

from fedlit.data import CIFAR10, ColoredMNIST, DatasetLayoutError, DatasetNotFoundError, FashionMNIST, mnist_likes
from fedlit.data.shifts import source_labels
from fedlit.federation.errors import RosterError
from fedlit.papers.stand_ins import write_cifar10
from refused import refused

NUM = 3000


def fake():
    rng = np.random.default_rng(0)
    images = rng.integers(1, 256, (NUM, 28, 28)).astype(np.uint8)
    images[:, 0, 0], images[:, 0, 2] = np.arange(NUM) // 250 + 1, np.arange(NUM) % 250 + 1  # tells which image it is
    return images, (np.arange(NUM) % 10).astype(np.uint8)


def write_idx(folder, packed=False, arrays=None):
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = fake() if arrays is None else arrays
    first = len(labels) * 5 // 6
    for part, chosen in (("train", slice(0, first)), ("t10k", slice(first, None))):
        for name, array in (("images-idx3", images[chosen]), ("labels-idx1", labels[chosen])):
            content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()
            path = folder / f"{part}-{name}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content, 1) if packed else content)
    return folder


def numbers(x):
    """Which images these are, from the marks in the first row."""
    marks = (x[:, :, 0, [0, 2]] * (255 if x.dtype.is_floating_point else 1)).sum(dim=1).round().long()
    return (marks[:, 0] - 1) * 250 + marks[:, 1] - 1


@pytest.mark.parametrize("inside", [".", "raw", "FashionMNIST/raw"])
@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_found_and_read_raw_or_gzipped(tmp_path, inside, packed):
    write_idx(tmp_path / inside, packed)
    module = FashionMNIST(str(tmp_path), num_sources=2, noise_level=0.0)
    images, labels = fake()
    seen = []
    for name in module.domain_names():
        domain = module.load(name)
        which = numbers(domain.x).numpy()
        np.testing.assert_array_equal(domain.x[:, 0].numpy(), images[which])
        np.testing.assert_array_equal(domain.y.numpy(), labels[which])
        assert torch.bincount(domain.y).tolist() == [100] * 10
        seen += which.tolist()
    assert sorted(seen) == list(range(NUM))
    x, _ = module.dataset("target", "test").batch(torch.arange(4))
    assert x.dtype == torch.float32
    assert x.max() <= 1
    assert module.input_shape == (1, 28, 28)


def test_missing_files_say_what_to_do(tmp_path):
    module = FashionMNIST(str(tmp_path))
    with pytest.raises(DatasetNotFoundError, match="apt-get install dataset-fashion-mnist"):
        module.train_dataloader()
    write_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DatasetNotFoundError, match="no idx files of FashionMNIST"):
        module.train_dataloader()


def test_download_goes_through_torchvision(tmp_path, monkeypatch):
    from torchvision import datasets

    def pretend(root, download):
        assert download
        write_idx(tmp_path / "new" / "MNIST" / "raw")

    monkeypatch.setattr(datasets, "MNIST", pretend)
    assert len(ColoredMNIST(str(tmp_path / "new"), download=True).train_dataloader().datasets) == 3

    def refuse(root, download):
        raise RuntimeError("no connection")

    monkeypatch.setattr(datasets, "MNIST", refuse)
    with pytest.raises(DatasetNotFoundError, match=r"MNIST could not be downloaded .*no connection"):
        ColoredMNIST(str(tmp_path / "other"), download=True).train_dataloader()


TWO = struct.pack(">i", 2)
BROKEN = [  # which argument is refused: the file, or the folder whose files do not belong together
    ("train-images-idx3-ubyte", "train-images-idx3-ubyte", lambda content: content[:-1]),
    ("train-images-idx3-ubyte", "train-images-idx3-ubyte", lambda _: b""),
    ("train-labels-idx1-ubyte", "train-labels-idx1-ubyte", lambda content: b"\0\0\x0d" + content[3:]),
    ("", "t10k-images-idx3-ubyte", lambda _: bytes([0, 0, 8, 3]) + struct.pack(">3i", 2, 3, 4) + bytes(24)),
    ("", "t10k-labels-idx1-ubyte", lambda _: bytes([0, 0, 8, 1]) + TWO + bytes(2)),
    ("", "train-labels-idx1-ubyte", lambda content: content[:-1] + b"\x0a"),
    ("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte.gz", lambda _: b"no gzip"),
]


@pytest.mark.parametrize(("argument", "name", "content"), BROKEN, ids=range(len(BROKEN)))
def test_files_that_are_broken_are_refused(tmp_path, argument, name, content):
    folder = write_idx(tmp_path, packed=name.endswith("gz"))
    (folder / name).write_bytes(content((folder / name).read_bytes()))
    with refused(str(folder / argument), DatasetLayoutError):
        FashionMNIST(str(tmp_path)).train_dataloader()


def test_labels_of_the_other_part_are_refused(tmp_path):
    folder = write_idx(tmp_path)
    names = [folder / f"{part}-labels-idx1-ubyte" for part in ("train", "t10k")]
    contents = [name.read_bytes() for name in names]
    for name, content in zip(names, contents[::-1], strict=True):
        name.write_bytes(content)
    with refused(str(folder), DatasetLayoutError):
        FashionMNIST(str(tmp_path)).train_dataloader()


@pytest.fixture(scope="module")
def idx(tmp_path_factory):
    return str(write_idx(tmp_path_factory.mktemp("idx")))


def test_noise_has_its_level_at_each_client_and_is_the_same_in_each_run(idx):
    plain = FashionMNIST(idx, num_sources=2, noise_level=0.0)
    noised, again = (FashionMNIST(idx, num_sources=2, noise_level=0.6, source_noise=[0.0, 0.2], seed=s) for s in (0, 9))
    for name, level in (("source_1", 0.0), ("source_2", 0.2), ("target", 0.6)):
        before, after, other = (each.transform(False)(each.load(name).x) for each in (plain, noised, again))
        assert (after - before).std(correction=0).item() == pytest.approx(level, rel=0.01)
        assert torch.equal(other, after)


def test_redrawn_noise_is_new_in_each_pass_over_the_same_images_and_not_in_tests(idx):
    given = {"num_sources": 2, "target_labels": 1.0, "batch_size": 1000, "seed": 0}
    fixed = FashionMNIST(idx, noise_level=0.5, **given)
    redrawn = FashionMNIST(idx, noise_level=0.5, redraw_noise=True, **given)
    clean = FashionMNIST(idx, noise_level=0.0, **given).dataset("target", "train").batch(torch.arange(700))[0]
    dataset = redrawn.dataset("target", "train")
    first, second = (dataset.batch(torch.arange(700))[0] - clean for _ in range(2))
    assert first.std().item() == pytest.approx(0.5, rel=0.01)
    assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 0.01
    assert torch.equal(dataset.y, fixed.dataset("target", "train").y)
    for name, stage in (("target", "test"), ("target", "val"), ("source_1", "train")):
        assert torch.equal(redrawn.dataset(name, stage)[3][0], fixed.dataset(name, stage)[3][0])
    batches = [next(iter(redrawn.train_dataloader()))["target"][0] for _ in range(2)]
    assert torch.equal(*batches)  # the loader's own stream of this batch, whatever was drawn before


@pytest.mark.parametrize("eta", [0.45, 0.1, 0.0])
def test_label_shift_deals_out_eta_and_the_rest(idx, eta):
    module = FashionMNIST(idx, num_sources=3, noise_level=0.0, label_shift=eta)
    counts = {name: torch.bincount(module.load(name).y, minlength=10) for name in module.domain_names()}
    target = torch.tensor([1 - eta] * 3 + [eta] * 7) * 300
    assert ((counts["target"] - target).abs() <= 0.5).all()
    assert sum(counts.values()).tolist() == [300] * 10
    sources = torch.stack([counts[f"source_{i}"] for i in (1, 2, 3)])
    assert (sources.amax(dim=0) - sources.amin(dim=0) <= 1).all()
    assert len(module.clients) == 4


@pytest.mark.parametrize("eta", [None, 0.15])
def test_max_samples_leaves_as_many_images_of_each_class_the_same_in_every_run(idx, eta):
    given = {"num_sources": 2, "noise_level": 0.0, "label_shift": eta}
    few, again = (FashionMNIST(idx, **given, max_samples=600, seed=seed) for seed in (None, 5))
    whole, counts, seen = FashionMNIST(idx, **given), [], []
    for name in few.domain_names():
        x, y = few.load(name).x, few.load(name).y
        assert torch.equal(x, again.load(name).x)
        counts.append(torch.bincount(y, minlength=10))
        assert ((counts[-1] - torch.bincount(whole.load(name).y, minlength=10) / 5).abs() <= 1).all()
        seen += numbers(x).tolist()
    assert sum(counts).tolist() == [60] * 10
    assert len(set(seen)) == 600


def test_labels_per_source_limits_the_sources(idx):
    module = FashionMNIST(idx, num_sources=4, labels_per_source=3)
    for number in range(4):
        labels = set(module.load(f"source_{number + 1}").y.tolist())
        assert labels == set(source_labels(number, 3, 10))
        assert number in labels
    assert torch.bincount(module.load("target").y).tolist() == [60] * 10


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("target", "source_1"), ("num_sources", 0), ("source_noise", [0.1, 0.2]), ("source_noise", math.inf)),
        *(("noise_level", -0.1), ("label_shift", 0.7), ("max_samples", 99)),
    ],
)
def test_arguments_out_of_range_are_refused(idx, argument, value):
    with refused(argument, RosterError if argument == "target" else ValueError):
        FashionMNIST(idx, **{argument: value})


def test_colours_and_labels_follow_the_recipe_by_hand(idx):
    module = ColoredMNIST(idx)
    images, digits = fake()
    assert module.input_shape == (2, 14, 14)
    assert module.domain_names() == ["plus90", "plus80", "minus90"]
    seen = []
    for name, disagreement in (("plus90", 0.1), ("plus80", 0.2), ("minus90", 0.9)):
        domain = module.load(name)
        which = module.positions(name).numpy()
        seen += which.tolist()
        np.testing.assert_array_equal(domain.x.sum(dim=1).numpy(), images[which][:, ::2, ::2])
        colour = domain.x.flatten(2).any(dim=2).long()
        assert (colour.sum(dim=1) == 1).all()
        colour = colour.argmax(dim=1)
        flipped = domain.y != torch.from_numpy(digits[which] < 5)
        assert flipped.float().mean().item() == pytest.approx(0.25, abs=0.05)
        assert (colour != domain.y).float().mean().item() == pytest.approx(disagreement, abs=0.04)
    assert sorted(seen) == list(range(NUM))


def test_coloured_digits_can_keep_their_size(idx):
    module = ColoredMNIST(idx, image_size=28, label_noise=0.0, target="plus80")
    domain, (images, digits), which = module.load("plus90"), fake(), module.positions("plus90").numpy()
    np.testing.assert_array_equal(domain.x.sum(dim=1).numpy(), images[which])
    np.testing.assert_array_equal(domain.y.numpy(), digits[which] < 5)
    for argument, value in (("image_size", 20), ("label_noise", 0.9)):
        with refused(argument):
            ColoredMNIST(idx, **{argument: value})


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar")
    write_cifar10(folder, 200)
    return folder


def test_cifar10_is_read_from_the_binary_version_as_numpy_reads_it(cifar):
    module = CIFAR10(str(cifar), num_sources=3, noise_level=0.0, published=False)
    files = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    rows = np.concatenate(
        [np.fromfile(cifar / "cifar-10-batches-bin" / name, np.uint8).reshape(-1, 3073) for name in files]
    )
    expected = {row[1:].tobytes(): row[0] for row in rows}
    seen = []
    for name in module.domain_names():
        domain = module.load(name)
        assert domain.x.shape == (300, 3, 32, 32)
        assert [expected[x.numpy().tobytes()] for x in domain.x] == domain.y.tolist()
        seen += [x.numpy().tobytes() for x in domain.x]
    assert len({*seen}) == len({*expected})
    assert module.class_names()[:2] == ["airplane", "automobile"]
    assert module.raw_inputs().sample.shape == (1, 3, 32, 32)


def test_cifar10_gives_each_client_four_classes_as_niid_bench(cifar):
    module = CIFAR10(str(cifar), labels_per_client=4, noise_level=0.4, target_labels=0.1, published=False)
    counts = {name: torch.bincount(module.load(name).y, minlength=10) for name in module.domain_names()}
    assert len(counts) == 10
    for number, each in enumerate(counts.values()):
        assert (each > 0).nonzero().squeeze(1).tolist() == source_labels(number, 4, 10)
        assert each[number] > 0
    assert sum(counts.values()).tolist() == [120] * 10  # no class is without a client, as client i has class i
    for label in range(10):
        shares = [int(each[label]) for each in counts.values() if each[label]]
        assert max(shares) - min(shares) <= 1
    with refused("labels_per_client"):
        CIFAR10(str(cifar), labels_per_client=4, labels_per_source=3)
    with refused("labels_per_client"):
        CIFAR10(str(cifar), labels_per_client=11)


def test_cifar10_takes_torchvisions_folder_and_refuses_another_version(tmp_path, monkeypatch):
    from torchvision import datasets

    with pytest.raises(DatasetNotFoundError, match="cifar-10-batches-py"):
        CIFAR10(str(tmp_path)).train_dataloader()
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    with refused(str(folder / "data_batch_1"), DatasetLayoutError):
        CIFAR10(str(tmp_path)).train_dataloader()
    few = pickle.dumps({"data": np.zeros((500, 3072), np.uint8), "labels": [0] * 500})
    (folder / "data_batch_1").write_bytes(few)
    for published in (True, False):  # a file with another sum is never unpickled
        with refused(str(folder / "data_batch_1"), DatasetLayoutError) as caught:
            CIFAR10(str(tmp_path), published=published).train_dataloader()
        found = f"{hashlib.md5(few).hexdigest()} ({len(few)} bytes)"
        assert f"of MD5 c99cafc152244af753f735de768cd75f, got {found}: get the archive again" in str(caught.value)
    rng, data = np.random.default_rng(0), {}
    for part, number in (("train_list", 500), ("test_list", 100)):
        x, y = rng.integers(0, 256, (number, 3072), dtype=np.uint8), [i % 10 for i in range(number)]
        content = pickle.dumps({"data": x, "labels": y})
        (folder / part).write_bytes(content)
        monkeypatch.setattr(datasets.CIFAR10, part, [[part, hashlib.md5(content).hexdigest()]])
        data |= {row.tobytes(): label for row, label in zip(x, y, strict=True)}
    domain = CIFAR10(str(tmp_path), num_sources=1, noise_level=0.0).load("target")
    assert [data[x.numpy().tobytes()] for x in domain.x] == domain.y.tolist()


def test_cifar10_is_downloaded_through_torchvision(tmp_path, monkeypatch):
    from torchvision import datasets

    def no_network(*args: object, **kwargs: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(datasets.cifar, "download_and_extract_archive", no_network)
    with pytest.raises(DatasetNotFoundError, match=r"CIFAR10 could not be downloaded .*no route"):
        CIFAR10(str(tmp_path), download=True).train_dataloader()


@pytest.mark.parametrize("content", [b"", b"\0" * 3072, b"\x0a" + b"\0" * 3072])
def test_cifar10s_binary_files_of_another_kind_are_refused(tmp_path, content):
    write_cifar10(tmp_path, 20)
    file = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    file.write_bytes(content)
    with refused(str(file), DatasetLayoutError):
        CIFAR10(str(tmp_path), published=False).train_dataloader()


def test_a_binary_file_of_cifar10_with_another_number_of_images_is_refused(tmp_path, monkeypatch):
    write_cifar10(tmp_path, 20)
    folder = tmp_path / "cifar-10-batches-bin"
    with refused(str(folder / "data_batch_1.bin"), DatasetLayoutError) as caught:
        CIFAR10(str(tmp_path)).train_dataloader()
    assert "must be 10000 images, got 20: get the archive again, or set published=False" in str(caught.value)
    assert len(CIFAR10(str(tmp_path), num_sources=1, noise_level=0.0, published=False).load("target").y) == 60
    monkeypatch.setattr(mnist_likes, "_PER_FILE", 20)
    assert len(CIFAR10(str(tmp_path), num_sources=1, noise_level=0.0).load("target").y) == 60
    file = folder / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[: 3073 * 19])  # cut short
    with refused(str(file), DatasetLayoutError):
        CIFAR10(str(tmp_path)).train_dataloader()
