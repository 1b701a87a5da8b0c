"""TargetDistillation: a network learns given probabilities and sends nothing; checkpoints, and refused files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD

from fedlit.federation import RosterError
from fedlit.methods import TargetDistillation
from fedlit.models import MLP
from helpers import loader, same, shards, trainer, weights

NAMES = ["c0", "c1", "c2"]
NUMBER = 60


def make(path: Path, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return TargetDistillation(
        NAMES, "c2", 2, MLP(5, [16]), teacher=str(path), **({"optimizer": lambda p: SGD(p, lr=0.3)} | kwargs)
    )


def teach(path: Path, **more: Any) -> Tensor:
    """Write probabilities that no label gives: those of the sign of one feature."""
    x = shards(3, NUMBER)["c2"].tensors[0]
    p = torch.stack([-2 * x[:, 1], 2 * x[:, 1]], dim=1).softmax(dim=1)
    torch.save({"probabilities": p, **more}, path)
    return p


def test_the_network_says_what_it_was_taught_and_nothing_is_sent(tmp_path: Path) -> None:
    p = teach(tmp_path / "teacher.pt")
    module, its = make(tmp_path / "teacher.pt"), trainer(20)
    its.fit(module, loader(shards(3, NUMBER)))
    x = shards(3, NUMBER)["c2"].tensors[0]
    predicted = module.replicas["c2"](x).argmax(dim=1)
    same_class = float((predicted == p.argmax(dim=1)).double().mean())
    assert float(its.callback_metrics["target/agreement"]) == pytest.approx(same_class)
    assert same_class > 0.95
    assert [*module.federation.channels] == ["metrics"]


def test_it_begins_with_the_weights_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "teacher.pt"
    teach(file)
    module = make(file)
    trainer(1).fit(module, loader(shards(3, NUMBER)))
    state = {name: torch.full_like(tensor, 0.25) for name, tensor in weights(module, "c2").items()}
    teach(file, start=state)
    again = make(file, optimizer=lambda p: SGD(p, lr=0.0))
    trainer(1).fit(again, loader(shards(3, NUMBER)))
    body = {name: tensor for name, tensor in weights(again, "c2").items() if name.startswith("extractor")}
    assert same(body, {name: state[name] for name in body})


def test_a_network_that_names_one_class_is_fitted_all_the_same(tmp_path: Path) -> None:
    """Its features tell the classes apart, though its last layer does not."""
    file = tmp_path / "teacher.pt"
    teach(file)
    module = make(file)
    trainer(1).fit(module, loader(shards(3, NUMBER)))
    state = weights(module, "c2")
    state |= {"classifier.weight": torch.zeros(2, 16), "classifier.bias": torch.tensor([5.0, -5.0])}
    teach(file, start=state)
    again, its = make(file, optimizer=lambda p: SGD(p, lr=1e-6)), trainer(1)
    its.fit(again, loader(shards(3, NUMBER)))
    assert float(its.callback_metrics["target/agreement"]) > 0.9


def test_agreement_is_told_of_a_network_without_a_linear_last_layer(tmp_path: Path) -> None:
    p = teach(tmp_path / "teacher.pt")

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, features: Tensor) -> Tensor:
            return features[:, :2] * self.scale

    torch.manual_seed(0)
    module = TargetDistillation(
        NAMES, "c2", 2, MLP(5, [16]), Scaled(), teacher=str(tmp_path / "teacher.pt"), optimizer=lambda p: SGD(p, lr=0.1)
    )
    its = trainer(2)
    with pytest.warns(UserWarning, match="leaves the network as the last round made it: no linear layer"):
        its.fit(module, loader(shards(3, NUMBER)))
    predicted = module.replicas["c2"](shards(3, NUMBER)["c2"].tensors[0]).argmax(dim=1)
    assert float(its.callback_metrics["target/agreement"]) == pytest.approx(
        float((predicted == p.argmax(dim=1)).double().mean())
    )


def test_it_goes_on_from_a_checkpoint_without_the_file(tmp_path: Path) -> None:
    file, every = tmp_path / "teacher.pt", ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    teach(file)
    straight = make(file)
    trainer(4, [every], enable_checkpointing=True).fit(straight, loader(shards(3, NUMBER)))
    file.unlink()
    resumed = make(file)
    trainer(4).fit(resumed, loader(shards(3, NUMBER)), ckpt_path=tmp_path / "epoch=1.ckpt", weights_only=True)
    assert same(weights(resumed, "c2"), weights(straight, "c2"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ({"other": 1}, "for the 60 training samples of target 'c2' and 2 classes, got .* with None"),
        ({"probabilities": torch.full((59, 2), 0.5)}, r"with \(59, 2\)"),
        ({"probabilities": torch.full((60, 2), 0.7)}, r"probabilities"),
        ({"probabilities": torch.full((60, 2), 0.5), "start": {"x": torch.zeros(1)}}, "start is of another network"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "teacher.pt"
    if content is not None:
        torch.save(content, file)
    with pytest.raises(RosterError, match=message):
        trainer(1).fit(make(file), loader(shards(3, NUMBER)))


def test_a_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup_rounds must be 0, as no source trains, got 2"):
        make(Path("teacher.pt"), warmup_rounds=2)
