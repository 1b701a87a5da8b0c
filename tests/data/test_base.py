"""What every data module promises: splits, hidden labels, loaders over local clients, and errors that help."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlit.data import (
    DatasetLayoutError,
    DatasetNotFoundError,
    Domain,
    DomainDataModule,
    DomainDataset,
)
from fedlit.data.splits import HoldOut, Split, SplitRules, apportion, balanced_choice, published_split
from fedlit.federation.client import Client
from fedlit.federation.errors import LabelGuardError, RosterError
from fedlit.federation.labels import UNLABELLED, GuardedLabels, reveal_for_oracle
from refused import refused

CLASS_SHARES = {"a": [50, 30, 20], "b": [40, 40, 40], "c": [9, 40, 11], "d": [30, 30, 31]}


class Blobs(DomainDataModule):
    """Four domains whose samples carry their domain and position, so that a test can tell who they are."""

    def __init__(
        self, shares: dict[str, list[int]] | None = None, width: dict[str, int] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.shares = shares or CLASS_SHARES
        self.width = width or {}
        self.loads: list[str] = []
        self.check_roster()

    def domain_names(self) -> list[str]:
        return list(self.shares)

    def class_names(self) -> list[str]:
        return ["red", "green", "blue"]

    def load(self, domain: str) -> Domain:
        self.loads.append(domain)
        y = torch.cat([torch.full((n,), label) for label, n in enumerate(self.shares[domain])])
        place = self.domain_names().index(domain)
        x = torch.stack([torch.full((len(y),), float(place)), torch.arange(len(y)).float()], dim=1)
        return Domain(x.repeat(1, self.width.get(domain, 1)), y)


def truth(module: Blobs, name: str) -> Tensor:
    return torch.cat([torch.full((n,), label) for label, n in enumerate(module.shares[name])])


def test_splits_are_disjoint_covering_and_stratified():
    module = Blobs(val_fraction=0.1, test_fraction=0.25, target_labels=1.0)
    for name, shares in CLASS_SHARES.items():
        split = module.split(name)
        together = torch.cat([split.train, split.val, split.test])
        assert sorted(together.tolist()) == list(range(sum(shares)))
        assert len(split.val) == round(0.1 * sum(shares))
        assert len(split.test) == round(0.25 * sum(shares))
        y = truth(module, name)
        assert set(y[split.train].tolist()) == {0, 1, 2}
        for part, fraction in ((split.val, 0.1), (split.test, 0.25)):
            assert part.tolist() == sorted(part.tolist())
            counts = torch.bincount(y[part], minlength=3)
            assert ((counts - fraction * torch.tensor(shares)).abs() < 1).all()


def test_every_class_keeps_a_training_sample():
    rare = Blobs({"a": [20, 1, 2], "b": [9, 9, 9]}, val_fraction=0.4, test_fraction=0.4)
    assert set(truth(rare, "a")[rare.split("a").train].tolist()) == {0, 1, 2}


def test_a_clients_split_depends_on_neither_the_other_clients_nor_its_role():
    everyone = Blobs(target="d")
    some = Blobs(clients=["c", "a"], target="a", target_labels=2)
    for name in "ac":
        assert all(
            torch.equal(getattr(everyone.split(name), part), getattr(some.split(name), part))
            for part in ("train", "val", "test")
        )
    assert torch.equal(everyone.split("a").test, Blobs(target="a").split("a").test)  # whatever labels it keeps
    assert not torch.equal(Blobs(seed=1).split("a").test, Blobs(seed=2).split("a").test)


@pytest.mark.parametrize("shown", [torch.arange(60) % 3, torch.zeros(60), torch.full((60,), UNLABELLED)])
def test_which_samples_validate_a_target_without_labels_does_not_depend_on_its_labels(shown):
    def split(y: Tensor, target_labels: int, is_target: bool = True, hold_out: HoldOut | None = None) -> Split:
        rules = SplitRules(0.25, 0.2, target_labels, "random", transductive=False)
        return rules.split("a", y.long(), True, is_target, 0, hold_out)

    hidden = torch.arange(60) // 20
    published = published_split(torch.arange(60) < 12)
    assert torch.equal(split(hidden, 0, hold_out=published).val, split(shown, 0, hold_out=published).val)
    for test_fraction in (0.0, 0.2):  # a transductive target is tested on all samples, whatever it is
        transductive = SplitRules(0.25, test_fraction, 0, "random", transductive=True)
        parts = [transductive.split("a", labels, True, True, 0) for labels in (hidden, shown)]
        assert torch.equal(parts[0].val, parts[1].val)
        assert len(parts[0].val) == 15
    for labels, is_target in ((1, True), (0, False)):  # by class otherwise
        assert torch.bincount(hidden[split(hidden, labels, is_target).val]).tolist() == [5, 5, 5]
    assert torch.bincount(hidden[split(hidden, 0).val]).tolist() != [5, 5, 5]
    assert torch.bincount(hidden[split(hidden, 0).test]).tolist() == [4, 4, 4]
    assert len(split(hidden, 0).val) == 15


def test_apportion_deals_by_largest_remainders():
    seats = apportion(torch.tensor([5, 3, 2]), 0.5, torch.tensor([5, 3, 2]))
    assert seats.tolist() == [3, 1, 1]
    assert apportion(torch.tensor([5, 3, 2]), 0.5, torch.tensor([1, 3, 2])).tolist() == [1, 2, 1]


def test_hidden_labels_are_nowhere_in_the_training_dataset():
    module = Blobs(target="c")
    dataset = module.dataset("c", "train")
    assert isinstance(dataset, DomainDataset)
    assert (dataset.y == UNLABELLED).all()
    assert dataset.labelled_indices is not None
    assert len(dataset.labelled_indices) == 0
    tensors = [value for value in vars(dataset).values() if isinstance(value, Tensor)]
    assert {id(t) for t in tensors} == {id(dataset.x), id(dataset.y), id(dataset.labelled_indices)}
    for batch in module.train_dataloader():
        if "c" in batch:
            with pytest.raises(LabelGuardError):
                reveal_for_oracle(batch["c"][1])
    assert (module.dataset("a", "train").y >= 0).all()
    assert module.dataset("a", "train").labelled_indices is None


def test_held_out_labels_are_the_true_ones():
    module = Blobs(target="c")
    for loader, part in ((module.val_dataloader(), "val"), (module.test_dataloader(), "test")):
        (batch,) = list(loader)
        assert list(batch) == ["a", "b", "c", "d"]
        for name, (x, y) in batch.items():
            assert torch.equal(x[:, 1].long(), getattr(module.split(name), part))  # and they come in order
            assert isinstance(y, GuardedLabels) == (name == "c")
            assert torch.equal(reveal_for_oracle(y), truth(module, name)[x[:, 1].long()])


@pytest.mark.parametrize(("wanted", "number"), [(1, 1), (7, 7), (0.1, 4), (1.0, 42), (0.0001, 1)])
def test_target_labels_is_a_number_or_a_share(wanted, number):
    module = Blobs(target="c", target_labels=wanted)  # c has 60 samples, 42 of them for training
    dataset = module.dataset("c", "train")
    assert len(dataset.labelled_indices) == number if number < 42 else dataset.labelled_indices is None
    assert int((dataset.y >= 0).sum()) == number
    shown = dataset.y >= 0
    assert torch.equal(dataset.y[shown], truth(module, "c")[dataset.x[shown][:, 1].long()])
    client = next(client for client in module.clients if client.is_target)
    assert client == Client("c", "target", labelled=True)
    assert module.num_samples("c") == number


def test_balanced_labels_are_an_option():
    module = Blobs(target="c", target_labels=12, target_label_draw="balanced")
    y = module.dataset("c", "train").y
    assert torch.bincount(y[y >= 0]).tolist() == [4, 4, 4]
    y = torch.tensor([0] * 2 + [1] * 50 + [2] * 50)
    chosen = balanced_choice(y, torch.arange(102), 11, torch.Generator().manual_seed(0))
    counts = torch.bincount(y[chosen])
    assert counts[0] == 2
    assert sorted(counts[1:].tolist()) == [4, 5]


def test_more_kept_labels_contain_fewer():
    for draw in ("random", "balanced"):
        few = Blobs(target="c", target_labels=5, target_label_draw=draw).split("c").labelled.tolist()
        more = Blobs(target="c", target_labels=20, target_label_draw=draw).split("c").labelled.tolist()
        assert set(few) < set(more)


@pytest.mark.parametrize("kept", [0, 9])
def test_transductive_target_trains_on_all_its_samples_and_tests_on_those_whose_labels_are_not_kept(kept):
    module = Blobs(target="c", transductive=True, target_labels=kept)
    split = module.split("c")
    assert split.train.tolist() == list(range(60))
    assert len(split.labelled) == kept
    assert set(split.test.tolist()) == set(range(60)) - set(split.labelled.tolist())
    assert not set(split.labelled.tolist()) & set(split.val.tolist())
    assert int((module.dataset("c", "train").y != UNLABELLED).sum()) == kept
    assert torch.equal(module.dataset("c", "test").y, truth(module, "c")[split.test])
    assert module.num_samples("c") == (kept or 60)
    assert torch.equal(module.split("a").train, Blobs(target="c").split("a").train)


def test_clients_are_in_the_order_given_with_their_training_samples():
    module = Blobs(clients=["d", "a", "b"], target="a")
    assert module.clients == [Client("d", "source", True), Client("a", "target", False), Client("b", "source", True)]
    assert [module.num_samples(name) for name in "dab"] == [len(module.split(name).train) for name in "dab"]
    assert (module.target, module.num_classes, module.classes) == ("a", 3, ["red", "green", "blue"])
    assert (module.input_shape, module.in_features) == ((2,), 2)
    assert Blobs(clients=["d", "a"]).target == "a"


def trainer_of(local: list[str], members: list[str]) -> Any:
    federation = SimpleNamespace(
        clients=[Client(name) for name in members], local_clients=[Client(name) for name in local]
    )
    return SimpleNamespace(lightning_module=SimpleNamespace(federation=federation))


def test_loaders_hold_the_local_clients_only():
    module = Blobs(target="b")
    assert list(module.train_dataloader().datasets) == ["a", "b", "c", "d"]
    module.trainer = trainer_of(["b", "d"], list("abcd"))
    assert list(module.train_dataloader().datasets) == ["b", "d"]
    assert list(module.val_dataloader().datasets) == list(module.test_dataloader().datasets) == ["b", "d"]
    assert list(module.predict_dataloader().datasets) == ["b"]
    assert len(module.clients) == 4
    module.trainer = SimpleNamespace(lightning_module=torch.nn.Linear(1, 1))
    assert list(module.train_dataloader().datasets) == ["a", "b", "c", "d"]


def test_a_model_with_other_clients_is_refused():
    module = Blobs(target="b")
    module.trainer = trainer_of(["a"], ["a", "b"])
    with refused("clients", RosterError):
        module.train_dataloader()


def test_batch_sizes_reach_the_loader():
    module = Blobs(target="b", batch_size=8, target_batch_size=3, target_labels=7, eval_batch_size=5, drop_last=True)
    sizes = {(name, len(x)) for batch in module.train_dataloader() for name, (x, _) in batch.items()}
    assert sizes == {("a", 8), ("b", 3), ("c", 8), ("d", 8)}
    assert max(len(x) for batch in module.test_dataloader() for x, _ in batch.values()) == 5


def test_workers_and_pinned_memory_reach_the_loaders():
    module = Blobs(target="b", num_workers=2, pin_memory=True)
    loaders = [module.train_dataloader(), module.val_dataloader(), module.test_dataloader()]
    assert {(each.num_workers, each.pin_memory) for each in loaders} == {(2, True)}


def test_without_a_test_share_there_is_nothing_to_test_but_a_transductive_target():
    assert Blobs(test_fraction=0.0).test_dataloader() == [] == Blobs(test_fraction=0.0).predict_dataloader()
    module = Blobs(test_fraction=0.0, transductive=True, target="b")
    assert list(module.test_dataloader().datasets) == ["b"]


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        *(("clients", {"clients": clients}) for clients in (["a", "x"], ["a"], [], ["a", "b", "a"])),
        ("target", {"clients": ["a", "b"], "target": "c"}),
        ("pool_sources", {"shares": {"sources": [9, 9, 9], "a": [9, 9, 9]}, "pool_sources": True}),
    ],
)
def test_a_roster_that_cannot_work_is_refused_at_once(argument, arguments):
    with refused(argument, RosterError):
        Blobs(**arguments)


OUT_OF_RANGE = [
    *(("batch_size", 0), ("target_batch_size", 0), ("eval_batch_size", 0), ("num_workers", -1)),
    *(("val_fraction", 1.0), ("val_fraction", 0.8), ("test_fraction", -0.1), ("target_label_draw", "stratified")),
    *(("target_labels", value) for value in (-1, 1.5, float("nan"), True)),
]
NO_NUMBERS = [
    *(("batch_size", "32"), ("num_workers", 1.0), ("val_fraction", "0")),
    *(("target_labels", value) for value in ("10", None)),
]


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [(*each, ValueError) for each in OUT_OF_RANGE] + [(*each, TypeError) for each in NO_NUMBERS],
)
def test_an_argument_that_cannot_be_is_refused_at_once(argument, value, error):
    with refused(argument, error):
        Blobs(**{argument: value})


NINE = [9, 9, 9]
UNFIT = [
    ("clients", RosterError, {"shares": {"a": NINE, "b": [0, 0, 0]}}),
    ("test_fraction", RosterError, {"shares": {"a": NINE, "b": [1, 1, 1]}}),
    ("classes", DatasetLayoutError, {"shares": {"a": NINE, "b": [20, 20]}, "target_labels": 1.0}),
    ("shapes", DatasetLayoutError, {"width": {"b": 2}}),
    ("target_labels", ValueError, {"target": "c", "target_labels": 50}),
    ("target_labels", ValueError, {"target": "c", "target_labels": 1.0, "transductive": True}),
]


@pytest.mark.parametrize(("argument", "error", "arguments"), UNFIT)
def test_data_that_do_not_fit_are_refused_when_loaded(argument, error, arguments):
    with refused(argument, error):
        Blobs(val_fraction=0.0, **arguments).train_dataloader()


# Numbers to predict, and pooled sources.


class Numbers(Blobs):
    task = "regression"

    def class_names(self) -> list[str]:
        return ["height"]

    def load(self, domain: str) -> Domain:
        found = super().load(domain)
        return Domain(found.x, found.y.float() + 0.5)


def test_numbers_are_split_hidden_and_kept_as_classes_are():
    data = Numbers(target_labels=7, seed=0)
    for name, n in ((name, sum(shares)) for name, shares in CLASS_SHARES.items()):
        split = data.split(name)
        assert (len(split.val), len(split.test)) == (round(0.1 * n), round(0.2 * n))
    shown = data.dataset("d", "train")
    assert shown.y.isnan().sum() == len(shown) - 7
    assert len(shown.labelled_indices) == 7
    assert shown.y.dtype == torch.float32
    assert not data.dataset("d", "test").y.isnan().any()
    assert data.num_classes == 1
    assert "1 numbers to predict" in str(data)


def test_pooled_sources_have_the_samples_that_they_have_one_by_one():
    apart, together = Blobs(seed=0, target="b"), Blobs(seed=0, target="b", pool_sources=True)
    assert [(client.name, client.is_target) for client in together.clients] == [("sources", False), ("b", True)]
    assert together.num_samples("sources") == sum(apart.num_samples(name) for name in "acd")
    for stage in ("train", "val", "test"):
        parts = [apart.dataset(name, stage) for name in "acd"]
        one = together.dataset("sources", stage)
        order = torch.randperm(len(one), generator=torch.Generator().manual_seed(0))
        x, y = one.batch(order)
        assert torch.equal(x, torch.cat([part.x for part in parts])[order])
        assert torch.equal(y, torch.cat([part.y for part in parts])[order])
        assert torch.equal(one[3][0], one.batch(torch.tensor([3]))[0][0])
        assert len(getattr(together.split("sources"), stage)) == len(one)
        assert torch.equal(together.dataset("b", stage).x, apart.dataset("b", stage).x)
    batch = next(iter(together.train_dataloader()))
    assert sorted(batch) == ["b", "sources"]


# A target whose labels are partly unknown, and data that lie elsewhere.


class PartlyLabelled(Blobs):
    def load(self, domain: str) -> Domain:
        found = super().load(domain)
        if domain == self.target:
            found.y[::3] = UNLABELLED
        return found


def test_a_target_may_lack_labels_and_keeps_those_it_is_asked_for():
    module = PartlyLabelled(target="c", target_labels=1.0)
    split = module.split("c")
    y = module.labels("c")
    known = y >= 0
    assert split.labelled.tolist() == [i for i in split.train.tolist() if known[i]]
    assert sorted([*split.train.tolist(), *split.val.tolist(), *split.test.tolist()]) == list(range(60))
    assert int(known[split.test].sum()) > 0
    assert int((~known)[split.test].sum()) > 0
    assert module.num_samples("c") == len(split.labelled)
    dataset = module.dataset("c", "train")
    assert torch.equal(dataset.y >= 0, known[split.train])
    with refused("target_labels"):
        PartlyLabelled(target="c", target_labels=40).split("c")
    assert len(module.plot().axes) == 2


class Spread(Blobs):
    spread = True

    def domain_names(self) -> list[str]:
        return ["a", "c"]


def test_data_of_others_need_not_be_here():
    module = Spread(clients=["a", "b", "c"], target="c")
    assert [client.name for client in module.clients] == ["a", "b", "c"]
    assert module.input_shape == (2,)
    assert list(module.train_dataloader().datasets) == ["a", "c"]
    assert "b (source, elsewhere)" in str(module)
    module.trainer = trainer_of(["c"], ["a", "b", "c"])
    assert list(module.predict_dataloader().datasets) == ["c"]
    assert module.loads == ["a", "c"]
    module.trainer = trainer_of(["b"], ["a", "b", "c"])
    with pytest.raises(DatasetNotFoundError, match="no data of client 'b' here"):
        module.train_dataloader()
    with refused("clients", RosterError):
        Spread(clients=["x", "y"])
