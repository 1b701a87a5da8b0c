"""A client that reports so many samples that it owns the mean, or of whom the server reports it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from fedlit.federation import Client, Federation, RosterError
from fedlit.federation.client import MOST_SAMPLES, Facts
from fedlit.federation.loader import FederatedLoader
from fedlit.methods import FedAvg, FedCORAL, Oracle
from fedlit.models import MLP
from fedlit.privacy import PairwiseMasking
from helpers import loader, trainer, unequal
from refused import refused
from thread_transport import on_ranks

NAMES = ["c0", "c1", "c2", "c3"]


def run(data: dict[str, TensorDataset], method: Any = FedAvg, rounds: int = 1, **strategy: Any) -> Any:
    torch.manual_seed(0)
    arguments = {name: strategy.pop(name) for name in ("weighting", "average") if name in strategy}
    module = method([*data], [*data][-1], 3, MLP(data["c0"].tensors[0].shape[1], [4]), **arguments)
    trainer(rounds, strategy=strategy).fit(module, loader(data))
    return module


def reported(monkeypatch: pytest.MonkeyPatch, number: int, client: str = "c0") -> None:
    """A client that has few samples, and reports so many."""
    facts = FederatedLoader.facts

    def inflated(self: FederatedLoader, labelled_only: Any = ()) -> dict[str, Facts]:
        told = facts(self, labelled_only)
        return told | {client: told[client]._replace(num_samples=number)}

    monkeypatch.setattr(FederatedLoader, "facts", inflated)


@pytest.mark.parametrize("privacy", [None, PairwiseMasking(colluders=0)])
def test_a_client_that_reports_that_it_owns_the_mean_is_named_before_it_does(
    privacy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = unequal(20, 20, 20, 20)
    with monkeypatch.context() as patch:
        reported(patch, 10**9)
        with refused("max_share", RosterError) as caught:
            run(data, privacy=privacy)
        assert "'c0' has 100.0% of the weights" in str(caught.value)
        run(data, privacy=privacy, weighting="uniform", local_steps=1)
        # the attack, which an operator can allow: the mean is the vector of c0
        owner = run(data, max_share=1.0, local_steps=1)
    alone = run({name: data[name] for name in ("c0", "c3")}, local_steps=1)
    ours, theirs = (dict(each.replicas["c3"].state_dict()) for each in (owner, alone))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


@pytest.mark.parametrize(
    ("sizes", "max_share", "heavy"),
    [
        ((180, 10, 10, 20), 0.9, False),  # a share of 0.9 is allowed
        ((181, 10, 10, 20), 0.9, True),
        ((181, 10, 10, 20), 0.95, False),
        ((42, 20, 20, 20), 0.5, True),
        ((181, 10, 10), 0.9, False),  # two sources
        ((10, 10, 10, 400), 0.9, False),  # the target takes no part
    ],
)
def test_the_share_is_of_three_sources_or_more(sizes: Any, max_share: float, heavy: bool) -> None:
    data = unequal(*sizes)
    if not heavy:
        run(data, max_share=max_share)
        return
    with refused("max_share", RosterError) as caught:
        run(data, max_share=max_share)
    assert f"{sizes[0]} of {sum(sizes[:3])} training samples" in str(caught.value)
    run(data, max_share=max_share, weighting="sqrt")


def test_a_target_that_owns_a_mean_is_named_before_it_is_in_one() -> None:
    data = unequal(10, 10, 10, 400)
    with refused("max_share", RosterError) as caught:
        run(data, FedCORAL)
    assert "'c3' has 93.0% of the weights in means over 4 clients" in str(caught.value)
    run(data, FedCORAL, average="classifier")


def test_without_sums_there_are_no_weights() -> None:
    data = unequal(181, 10, 10, 20)
    module = Oracle([*NAMES[:3], Client("c3", "target", labelled=True)], "c3", 3, MLP(5, [4]))
    trainer(1).fit(module, loader(data))


def test_the_share_is_a_share() -> None:
    for value in (0.0, 1.5, float("nan")):
        with refused("max_share"):
            trainer(1, strategy={"max_share": value})


def introduced(transport: Any) -> None:
    federation = Federation(NAMES, "c3", transport=transport, placement=[[], *([name] for name in NAMES)], seed=0)
    sizes = {"c1": MOST_SAMPLES + 1}
    mine = {client.name: Facts(sizes.get(client.name, 7), (2,)) for client in federation.local_clients}
    with refused("num_samples", RosterError) as caught:
        federation.introduce(mine)
    assert "'c1'" in str(caught.value)


def test_more_samples_than_any_data_set_has_are_refused_by_every_process_with_the_clients_name() -> None:
    on_ranks(introduced, 5)
    assert Client("a", num_samples=MOST_SAMPLES).num_samples == 2**40


def test_a_client_with_ten_times_the_samples_of_the_run_before_is_named() -> None:
    torch.manual_seed(0)
    few, more = unequal(6, 20, 20, 20), unequal(66, 20, 20, 20)
    module = FedAvg(NAMES, "c3", 3, MLP(few["c0"].tensors[0].shape[1], [4]))
    trainer(1).fit(module, loader(few))
    with pytest.warns(UserWarning, match="'c0' has 66 training samples, and had 6"):
        trainer(1).fit(module, loader(more))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*training samples, and had")
        trainer(1).fit(module, loader(unequal(7, 20, 20, 20) | {"c0": unequal(60, 1)["c0"]}))


def test_a_resume_with_other_numbers_of_samples_is_refused(tmp_path: Path) -> None:
    def module() -> FedAvg:
        torch.manual_seed(0)
        return FedAvg(NAMES, "c3", 3, MLP(5, [4]))

    before, path = trainer(1), tmp_path / "one.ckpt"
    before.fit(module(), loader(unequal(6, 20, 20, 20)))
    before.save_checkpoint(path)
    with pytest.raises(RosterError, match=r"'c0': 6,.*'c0': 66"):
        trainer(2).fit(module(), loader(unequal(66, 20, 20, 20)), ckpt_path=path)
