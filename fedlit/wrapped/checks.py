"""Checks of a LightningModule of the user's that clients are to train."""

from __future__ import annotations

import inspect

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from fedlit.module import FederatedModule

_REFUSED = {
    **dict.fromkeys(
        ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
        "change samples in the dataset, or in training_step",
    ),
    **dict.fromkeys(
        (
            *("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward"),
            *("on_before_optimizer_step", "on_before_zero_grad", "backward", "optimizer_step", "optimizer_zero_grad"),
            *("lr_scheduler_step", "configure_gradient_clipping"),
        ),
        "do it in training_step, with automatic_optimization = False if it is about single steps",
    ),
    **dict.fromkeys(("setup", "configure_model", "configure_sharded_model"), "build the network in __init__"),
    **dict.fromkeys(("on_fit_start", "on_fit_end"), "do it in on_train_start or on_train_end"),
    **dict.fromkeys(("on_save_checkpoint", "on_load_checkpoint"), "keep the state in buffers of the module"),
    "configure_callbacks": "give the callbacks to the Trainer",
}
"""Hooks of the module that would not be called, and what to do about it."""


def check_module(module: object) -> None:
    """Refuse what cannot be trained by each client by itself.

    Raises:
        TypeError: If it is no LightningModule, or one that trains a federation already.
        ValueError: If it overrides a hook that would not be called.
    """
    name = type(module).__name__
    if isinstance(module, FederatedModule):
        raise TypeError(f"{name} is a federated method, and needs no wrapper: give it to the Trainer as it is")
    if isinstance(getattr(module, "_orig_mod", None), pl.LightningModule):
        raise TypeError(
            "module is compiled as a whole, and clients train copies: give the LightningModule itself, and compile "
            "networks in it (self.net = torch.compile(self.net))"
        )
    if not isinstance(module, pl.LightningModule):
        raise TypeError(
            f"module must be a LightningModule of the package lightning (lightning.pytorch), got {name}: a network "
            "without a training_step is the extractor of a method, such as fedlit.methods.FedAvg"
        )
    for needed in ("training_step", "configure_optimizers"):
        if not is_overridden(needed, module):
            raise ValueError(f"{name} has no {needed}, which every client is to train with: write it")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ValueError(
            f"{name}.training_step takes dataloader_iter, and clients have batches: take (batch, batch_idx)"
        )
    for hook, advice in _REFUSED.items():
        if hasattr(pl.LightningModule, hook) and is_overridden(hook, module):
            raise ValueError(f"{name} overrides {hook}, which clients' copies would not be called by: {advice}")
