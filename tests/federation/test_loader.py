"""FederatedLoader: samples of each client, their order, and a resume."""

from __future__ import annotations

import itertools
import multiprocessing
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fedlit.federation import Facts, FederatedLoader, LabelGuardError, Pace, RosterError, RoundPlan, reveal_for_oracle
from refused import refused

SIZES = {"a": 7, "b": 12, "t": 5}


def numbered(size: int, start: int = 0) -> TensorDataset:
    """Samples that know their own index."""
    index = torch.arange(start, start + size)
    return TensorDataset(index[:, None].float().expand(-1, 2).clone(), index % 3)


class OneByOneSamples(Dataset[Any]):
    """A map-style dataset; with noise, each reading of a sample draws from torch."""

    def __init__(self, size: int, noise: bool = False) -> None:
        self.tensors = numbered(size).tensors
        self.noise = noise

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = self.tensors[0][index]
        return (inputs + torch.rand(2) if self.noise else inputs), self.tensors[1][index]


noisy = partial(OneByOneSamples, noise=True)


class Batched:
    """A `BatchedDataset` that augments, of which some samples are labelled."""

    def __init__(self, size: int) -> None:
        self.tensors = numbered(size).tensors
        self.labelled_indices = torch.arange(0, size, 3)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.tensors[0][indices] + 0.5 * torch.rand(len(indices), 2), self.tensors[1][indices]


def planned(
    names: Collection[str] = tuple(SIZES),
    make: Callable[[int], Any] = numbered,
    *,
    position: tuple[int, int] = (0, 0),
    learners: Callable[[int], Collection[str]] = lambda round_idx: SIZES,
    loader: dict[str, Any] | None = None,
    local_steps: int | None = None,
    **plan: Any,
) -> FederatedLoader:
    made = FederatedLoader(
        {name: make(SIZES[name]) for name in names}, **{"batch_size": 3, "seed": 0, **(loader or {})}
    )
    paces = plan.pop("paces", (Pace(local_steps=local_steps),))
    sizes = plan.pop("sizes", SIZES)
    made.plan(RoundPlan(sizes=sizes, learners=learners, position=lambda: position, paces=paces, **plan))
    return made


def indices(batch: Any) -> list[int]:
    return [int(value) for value in batch[0][:, 0]]


def assert_equal_batches(ones: Iterable[dict[str, Any]], others: Iterable[dict[str, Any]]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(x, y) for name in one for x, y in zip(one[name], other[name], strict=True))


def seen(loader: FederatedLoader) -> list[dict[str, list[int]]]:
    return [{name: indices(batch) for name, batch in step.items()} for step in loader]


def flat(steps: list[dict[str, list[int]]], client: str) -> list[int]:
    return [index for step in steps for index in step.get(client, [])]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 5), st.integers(0, 100))
def test_each_pass_visits_each_sample_exactly_once(size: int, batch_size: int, round_idx: int, seed: int) -> None:
    loader = FederatedLoader({"a": numbered(size)}, batch_size, seed=seed)
    loader.plan(RoundPlan({"a": size}, lambda _: {"a"}, lambda: (round_idx, 0)))
    assert sorted(flat(seen(loader), "a")) == list(range(size))
    assert len(loader) == -(-size // batch_size)


def test_passes_clients_and_seeds_are_permuted_differently() -> None:
    def order(name: str = "b", round_idx: int = 0, seed: int = 0) -> list[int]:
        loader = FederatedLoader({name: numbered(12)}, 12, seed=seed)
        loader.plan(RoundPlan({name: 12}, lambda _: {name}, lambda: (round_idx, 0)))
        return flat(seen(loader), name)

    orders = [order(), order("c"), order(round_idx=1), order(seed=1)]
    assert all(one != other for one, other in itertools.combinations([*orders, list(range(12))], 2))
    assert order() == orders[0]


@pytest.mark.parametrize("local_steps", [None, 4])
def test_the_order_does_not_depend_on_who_else_is_hosted(local_steps: int | None) -> None:
    together = seen(planned(local_steps=local_steps))
    for name in SIZES:
        alone = seen(planned([name], local_steps=local_steps))
        assert len(alone) == len(together)  # every process goes through the same number of batches
        assert [step.get(name) for step in alone] == [step.get(name) for step in together]


@pytest.mark.parametrize("plan", [{}, {"local_steps": 5}, {"accumulate": 3}], ids=str)
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_process_knows_who_has_a_batch_in_a_step(plan: dict[str, Any], drop_last: bool) -> None:
    everything = seen(planned(loader={"drop_last": drop_last}, **plan))
    elsewhere = planned(["a"], loader={"drop_last": drop_last}, **plan)
    for step, batches in enumerate(everything):
        assert {name for name in SIZES if step < elsewhere.batches_of(name)} == set(batches)
        numbers = {name: elsewhere.samples_in(name, 0, step) for name in batches}
        assert numbers == {name: len(batch) for name, batch in batches.items()}
    assert [elsewhere.batches_per_pass(name) for name in SIZES] == ([2, 4, 1] if drop_last else [3, 4, 2])


def test_batch_sizes_by_client() -> None:
    loader = planned(loader={"batch_size": {"a": 7, "b": 6, "t": 1}})
    assert [[len(step.get(name, [])) for name in SIZES] for step in seen(loader)] == [
        [7, 6, 1], [0, 6, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1],
    ]  # fmt: skip


def test_local_steps_go_on_where_the_last_round_stopped() -> None:
    steps = [step for round_idx in range(6) for step in seen(planned(local_steps=2, position=(round_idx, 0)))]
    # 12 batches of "a" at 3 batches a pass: 4 passes in one go
    loader = planned(local_steps=2)
    numbers = [loader.samples_in("a", round_idx, batch_idx) for round_idx in range(6) for batch_idx in range(2)]
    assert numbers == [len(step["a"]) for step in steps]
    drawn = flat(steps, "a")
    assert [sorted(drawn[7 * p : 7 * p + 7]) for p in range(4)] == [list(range(7))] * 4


@pytest.mark.parametrize("make", [numbered, OneByOneSamples, Batched])
@pytest.mark.parametrize("local_steps", [None, 3])
@pytest.mark.parametrize("rounds_per_epoch", [1, 2])
def test_a_resume_yields_the_remaining_batches(
    make: Callable[[int], Any], local_steps: int | None, rounds_per_epoch: int
) -> None:
    arguments = {"make": make, "local_steps": local_steps, "rounds_per_epoch": rounds_per_epoch}
    whole = list(planned(position=(2, 0), **arguments))
    for start in (1, 2):
        assert_equal_batches(planned(position=(2, start), **arguments), whole[start:])


def test_many_rounds_in_an_epoch_are_those_rounds_one_after_the_other() -> None:
    epoch = planned(rounds_per_epoch=3, position=(1, 0))
    assert seen(epoch) == [step for round_idx in (1, 2, 3) for step in seen(planned(position=(round_idx, 0)))]
    assert len(epoch) == 3 * epoch.batches_in() == 12


def test_only_learners_are_read() -> None:
    loader = planned(rounds_per_epoch=2, learners=lambda round_idx: {"a"} if round_idx == 0 else {"b", "elsewhere"})
    assert [sorted(step) for step in seen(loader)] == [["a"]] * 3 + [[]] + [["b"]] * 4


def test_rounds_are_padded_to_whole_optimiser_steps() -> None:
    # 4 batches of the longest client, accumulated by 3: 6 batches in 2 optimiser steps, the last two of them empty
    loader = planned(accumulate=3)
    assert loader.batches_in() == len(loader) == 6
    assert [sorted(step) for step in seen(loader)][3:] == [["b"], [], []]
    assert len(seen(planned(accumulate=3, local_steps=2))) == 6


def test_drop_last_leaves_out_smaller_batches() -> None:
    steps = seen(planned(loader={"drop_last": True}))
    assert {len(batch) for step in steps for batch in step.values()} == {3}
    assert Counter(name for step in steps for name in step) == {"a": 2, "b": 4, "t": 1}
    steps = seen(planned(["t"], loader={"drop_last": True}, local_steps=40))
    assert set(flat(steps, "t")) == set(range(5))  # nobody is left out for ever


def test_labelled_only_reads_labelled_samples() -> None:
    # 0, 3, 6, 9 of the 12 samples of "b" are labelled
    loader = planned(["b"], Batched, labelled_only=["b"], sizes={"b": 4})
    assert sorted(flat(seen(loader), "b")) == [0, 3, 6, 9]
    assert loader.sizes(["b"]) == {"b": 4}
    assert loader.sizes() == {"b": 12}


def test_facts_are_sizes_and_shapes_without_touching_random_numbers() -> None:
    before = torch.get_rng_state()
    datasets = {"a": numbered(7), "b": OneByOneSamples(12, noise=True), "t": Batched(5)}
    assert FederatedLoader(datasets).facts() == {"a": Facts(7, (2,)), "b": Facts(12, (2,)), "t": Facts(5, (2,))}
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("local_steps", [None, 5])
def test_a_tensor_dataset_and_samples_one_by_one_give_equal_batches(local_steps: int | None) -> None:
    arguments = {"local_steps": local_steps, "rounds_per_epoch": 2}
    assert_equal_batches(planned(make=numbered, **arguments), planned(make=OneByOneSamples, **arguments))


def test_workers_change_nothing_not_even_augmentation() -> None:
    def batches(num_workers: int) -> FederatedLoader:
        return planned(["a", "t"], noisy, rounds_per_epoch=2, loader={"num_workers": num_workers})

    assert_equal_batches(batches(0), batches(2))


def test_worker_processes_are_those_of_clients_that_are_present() -> None:
    present = [["a"], ["b"], ["a", "t"]]

    def batches(num_workers: int) -> FederatedLoader:
        made = {"num_workers": num_workers}
        return planned(make=noisy, rounds_per_epoch=3, learners=lambda round_idx: present[round_idx], loader=made)

    def busy(made: FederatedLoader) -> list[str]:
        return sorted(name for name, reader in made._readers.items() if reader.samples is not None)

    loader, steps, found = batches(1), [], []
    before = {each.pid for each in multiprocessing.active_children()}
    for step in loader:
        steps.append(step)
        started = [each for each in multiprocessing.active_children() if each.pid not in before]
        found.append((busy(loader), len(started)))
    assert [(names, len(names)) for names, _ in found] == found
    assert [names for names, _ in dict.fromkeys((tuple(names), count) for names, count in found)] == [
        ("a",), ("b",), ("a", "t")
    ]  # fmt: skip
    assert_equal_batches(steps, batches(0))


@pytest.mark.parametrize("workers", ["2", None, 1.5, -1, True])
def test_numbers_of_workers_that_are_none_are_refused(workers: Any) -> None:
    with pytest.raises(ValueError, match="num_workers must be an integer of at least 0, got"):
        FederatedLoader({"a": numbered(4)}, num_workers=workers)


@pytest.mark.parametrize("make", [numbered, noisy, Batched])
def test_reading_leaves_torchs_generator_alone(make: Callable[[int], Any]) -> None:
    before = torch.get_rng_state()
    list(planned(make=make))
    assert torch.equal(torch.get_rng_state(), before)


def test_augmentation_differs_between_samples_and_passes() -> None:
    def noise(round_idx: int) -> set[float]:
        loader = planned(["b"], noisy, position=(round_idx, 0))
        return {float(value) % 1 for step in loader for value in step["b"][0].flatten()}

    assert len(noise(0) | noise(1)) == 48  # 2 passes over 12 samples of 2 numbers, no two alike


def test_evaluation_goes_through_everybody_in_order() -> None:
    steps = seen(FederatedLoader({name: numbered(size) for name, size in SIZES.items()}, 5, training=False))
    assert {name: flat(steps, name) for name in SIZES} == {name: list(range(size)) for name, size in SIZES.items()}


@pytest.mark.parametrize("plan", [{}, {"local_steps": 3}, {"local_steps": 2, "accumulate": 2}])
def test_positions_of_a_batch_are_those_of_its_samples(plan: dict[str, Any]) -> None:
    for round_idx in (2, 0, 1):
        made = planned(position=(round_idx, 0), **plan)
        for batch_idx, step in enumerate(made):
            for name, (inputs, _) in step.items():
                assert made.positions(name, round_idx, batch_idx).tolist() == inputs[:, 0].tolist()


def test_all_samples_are_gone_through_in_order_with_labels_or_not() -> None:
    made = planned(make=Batched, loader={"guarded": "t"}, labelled_only=["a"])
    every = [batch for batch in made.in_order(["a"], 4, labelled_only=False)]
    inputs = torch.cat([batch["a"][0] for batch in every])
    assert inputs[:, 0].floor().tolist() == list(range(SIZES["a"]))
    again = torch.cat([batch["a"][0] for batch in made.in_order(["a"], 4, labelled_only=False)])
    assert torch.equal(inputs, again)  # augmented the same way
    labelled = torch.cat([batch["a"][0] for batch in made.in_order(["a"], 4)])
    assert labelled[:, 0].floor().tolist() == [0, 3, 6]
    for batch in made.in_order(["t"], labelled_only=False):
        with pytest.raises(LabelGuardError):
            _ = batch["t"][1] == 0


def test_guarded_labels_are_empty_in_training_and_only_revealed_in_evaluation() -> None:
    for step in planned(loader={"guarded": "t"}):
        assert "a" not in step or torch.equal(step["a"][1], step["a"][0][:, 0].long() % 3)
        if "t" in step:
            with pytest.raises(LabelGuardError):
                reveal_for_oracle(step["t"][1])
    (step,) = FederatedLoader({"t": numbered(5)}, 5, training=False, guarded="t")
    with pytest.raises(LabelGuardError):
        len(step["t"][1])
    assert reveal_for_oracle(step["t"][1]).tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("batch_size", lambda: FederatedLoader({"a": numbered(3)}, 0)),
        ("batch_size", lambda: FederatedLoader({"a": numbered(3)}, {"b": 1})),
        ("local_steps", lambda: planned(local_steps=0)),
    ],
)
def test_arguments_out_of_range_are_refused(argument: str, make: Callable[[], Any]) -> None:
    with refused(argument):
        make()


def test_clients_with_too_few_samples_are_refused_wherever_they_are() -> None:
    with pytest.raises(RosterError, match="client 'a' has no samples"):
        FederatedLoader({"a": numbered(0)})
    with pytest.raises(RosterError, match="client 't' has 5 samples"):
        planned(["b"], loader={"batch_size": 6, "drop_last": True})


@pytest.mark.parametrize(
    ("names", "local", "loader", "message"),
    [
        (["a"], ["t"], {}, r"its loader has \['a'\]"),
        (["a", "b"], ["a", "t"], {}, r"its loader has \['a', 'b'\]"),
        ([], ["t"], {}, r"its loader has \[\]"),
        (["a"], ["t"], {"training": False}, "or an empty one"),
        (["a", "z"], ["a"], {}, r"has data of \['z'\]"),
        (["a", "b", "t"], ["t"], {}, None),  # everybody's data, of which a process keeps its own
        (["a"], ["a", "t"], {}, None),  # which the introductions refuse
        (["t"], ["b", "t"], {"training": False}, None),  # predictions are the target's alone
        (["t"], ["a"], {"training": False, "least_batches": 1}, None),
        ([], ["a"], {"training": False}, None),
    ],
)
def test_ones_own_data_are_kept_and_those_of_others_in_their_place_refused(
    names: list[str], local: list[str], loader: dict[str, Any], message: str | None
) -> None:
    made = FederatedLoader({name: numbered(4) for name in names}, 3, seed=0, **loader)
    if message:
        with pytest.raises(RosterError, match=message):
            made.keep(local, list(SIZES))
    else:
        made.keep(local, list(SIZES))
        assert set(made.datasets) == set(names) & set(local)
