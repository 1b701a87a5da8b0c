"""JDA of a federation in closed form, against JDA of the pooled data; what it shares with RF-TCA is tested there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedlit.federation import SERVER, RosterError
from fedlit.functional import JointAligner, jda, jda_from_sums, random_fourier_features, sample_frequencies
from fedlit.methods import FedJDA, FedRFTCAClosedForm
from fedlit.privacy import CKKS
from helpers import loader, same, trainer, weights

N, M, CLASSES = 6, 4, 3


class Raw(nn.Identity):
    """Features computed beforehand."""

    out_features = 5


def domains() -> dict[str, TensorDataset]:
    """Two sources of unequal size and a target, whose classes are moved each its own way, in float64."""
    draws = torch.Generator().manual_seed(0)
    means = torch.randn(CLASSES, 5, generator=draws, dtype=torch.float64)
    data = {}
    for name, size in (("a", 40), ("b", 23), ("t", 31)):
        labels = torch.arange(size) % CLASSES
        moved = means + 0.6 * torch.randn(CLASSES, 5, generator=draws, dtype=torch.float64)
        noise = torch.randn(size, 5, generator=draws, dtype=torch.float64)
        data[name] = TensorDataset(moved[labels] + 0.6 * noise, labels)
    return data


def fit(
    data: dict[str, TensorDataset], method: type[FedRFTCAClosedForm] = FedJDA, privacy: Any = None, **kwargs: Any
) -> FedRFTCAClosedForm:
    torch.manual_seed(0)
    given = {"num_frequencies": N, "num_components": M, "unit_norm": False, "bandwidth": 2.0, "gamma": 0.3}
    module = method(list(data), "t", kwargs.pop("num_classes", CLASSES), Raw(), **(given | kwargs))
    strategy = {"privacy": privacy} if privacy is not None else {}
    trainer(5, strategy=strategy, precision="64-true").fit(module, loader(data, 8))
    return module


def pooled(data: dict[str, TensorDataset]) -> tuple[Tensor, Tensor, Tensor]:
    """Random features and labels of all sources, and the target's features."""
    omega = sample_frequencies(N, 5, 2.0, seed=0).double()
    x, y = (torch.cat([data[name].tensors[i] for name in ("a", "b")]) for i in range(2))
    return random_fourier_features(x, omega), y, random_fourier_features(data["t"].tensors[0], omega)


@pytest.mark.parametrize("scaling", ["unit", "constraint"])
def test_every_iteration_is_that_of_the_pooled_data(scaling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = domains()
    solved: list[JointAligner] = []

    def spy(*arguments: Any, **choices: Any) -> JointAligner:
        solved.append(jda_from_sums(*arguments, **choices))
        return solved[-1]

    monkeypatch.setattr("fedlit.methods.fedrf_tca_closed_form.jda_from_sums", spy)
    source, labels, target = pooled(data)
    made = set()
    for iterations in (1, 2, 3, 10):
        fit(data, num_iterations=iterations, scaling=scaling)
        expected = jda(
            source, labels, target, M, 0.3, num_iterations=iterations, labelling="class_mean", scaling=scaling
        )
        torch.testing.assert_close(solved[-1].aligner, expected.aligner, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(solved[-1].eigenvalues, expected.eigenvalues)
        # batches come in another order than the samples
        torch.testing.assert_close(solved[-1].pseudo_labels.bincount(), expected.pseudo_labels.bincount())
        assert solved[-1].num_iterations == expected.num_iterations
        made.add(expected.num_iterations)
    assert len(made) > 2


def test_the_first_iteration_is_rf_tca() -> None:
    data = domains()
    ours = fit(data, num_iterations=1, scaling="constraint")
    theirs = fit(data, FedRFTCAClosedForm, gamma=0.3 * (1 / 63 + 1 / 31))
    for name, tensor in weights(theirs, "t").items():
        torch.testing.assert_close(weights(ours, "t")[name], tensor, rtol=1e-5, atol=1e-5)
    joint = fit(data, scaling="constraint")
    assert not torch.allclose(weights(joint, "t")["aligner.weight"], weights(ours, "t")["aligner.weight"], atol=1e-2)


@pytest.mark.parametrize("method", [FedJDA, FedRFTCAClosedForm])
def test_everyone_predicts_by_linear_discriminant_analysis_of_the_aligned_sources(method: Any) -> None:
    data = domains()
    module = fit(data, method, shrinkage=0.2)
    assert module.federation.round_idx == 1
    assert same(weights(module, "a"), weights(module, "t"))
    source, labels, target = pooled(data)
    aligner = module.replicas["t"].aligner
    with torch.no_grad():
        fs, ft = (aligner(rows).numpy() for rows in (source, target))
        logits = module(data["t"].tensors[0]).numpy()
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.2).fit(fs, labels.numpy())
    expected = oracle.decision_function(ft)
    np.testing.assert_allclose(logits - logits[:, :1], expected - expected[:, :1], rtol=1e-4, atol=1e-4)


def test_it_sends_what_rf_tca_sends() -> None:
    data = domains()
    ours, theirs = fit(data), fit(data, FedRFTCAClosedForm)
    used = [module.federation.ledger.bytes_by_channel() for module in (ours, theirs)]
    assert used[0] == used[1]
    assert {"moments", "model"} <= set(used[0])
    assert len([e for e in ours.federation.ledger if e.channel == "moments" and e.receiver == SERVER]) == 2


def test_encrypted_sums_do_not_bring_a_class_into_being_that_no_source_has() -> None:
    pytest.importorskip("tenseal")
    data = domains()
    module = fit(data, privacy=CKKS(), num_classes=CLASSES + 1)
    plain = fit(data)
    x = data["t"].tensors[0]
    with torch.no_grad():
        torch.testing.assert_close(
            weights(module, "t")["aligner.weight"], weights(plain, "t")["aligner.weight"], rtol=1e-2, atol=1e-2
        )
        agree = (module(x)[:, :CLASSES].argmax(dim=1) == plain(x).argmax(dim=1)).double().mean()
    assert float(agree) > 0.9


def test_data_that_have_no_solution_say_so() -> None:
    data = {name: TensorDataset(d.tensors[0][:1].repeat(9, 1), d.tensors[1][:9]) for name, d in domains().items()}
    with pytest.raises(RosterError, match="cannot be solved"):
        fit(data)
