"""Many clients with tiny equal networks in one vectorised call (torch.func).

Each client's parameters are views into one stacked tensor per name, so that optimisers, exchanges and checkpoints see
ordinary parameters. Worth it where Python and dispatch dominate; not for convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from fedlit.checks import refuse
from fedlit.federation.labels import UNLABELLED
from fedlit.federation.streams import enter_stream, torch_streams
from fedlit.run.local import evaluating
from fedlit.run.tasks import Classification

if TYPE_CHECKING:
    from fedlit.run.run import Run


def _refuse(which: str, way_out: str = "") -> NoReturn:
    refuse("vectorize", f"False with networks that {which}", True, way_out)


class StackedReplicas:
    """Replicas of local clients, trained together.

    Args:
        replicas: Equal networks by client name; their parameters become views of the stacked ones.

    Raises:
        ValueError: If the networks differ, or have buffers (BatchNorm statistics cannot be updated in a vmap).
    """

    def __init__(self, replicas: Mapping[str, nn.Module]) -> None:
        self.names = list(replicas)
        modules = list(replicas.values())
        self.network = modules[0]
        buffers = [name for name, _ in self.network.named_buffers()]
        if buffers:  # a vmap cannot update them
            _refuse(f"have the buffers {buffers[:3]}", "use GroupNorm or no normalisation")
        layout = _layout(self.network)
        for client, module in replicas.items():
            if type(module) is not type(self.network) or _layout(module) != layout:
                _refuse(f"differ between {client!r} and {self.names[0]!r}")
        frozen = [name for module in modules for name, param in module.named_parameters() if not param.requires_grad]
        if frozen:
            _refuse(f"have the frozen weights {frozen[:3]}")
        stacked, _ = stack_module_state(modules)
        self.stacked: dict[str, Tensor] = {name: t.detach().requires_grad_() for name, t in stacked.items()}
        # The parameter objects stay the same: an optimiser made before keeps them.
        self.params: list[list[nn.Parameter]] = []
        for name, whole in self.stacked.items():
            own = [module.get_parameter(name) for module in modules]
            for param, part in zip(own, whole.detach().unbind(0), strict=True):
                param.data = part
            self.params.append(own)
        self._forward = vmap(self._call, randomness="different")
        self._has_padded = False
        self._asked = [False] * len(self.names)  # clients in the last `losses`
        self._active = [False] * len(self.names)  # clients with a gradient since `zero_grad`

    def _call(self, params: dict[str, Tensor], inputs: Tensor) -> Tensor:
        logits: Tensor = functional_call(self.network, params, (inputs,))
        return logits

    def losses(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
        """Return the mean cross-entropy of each client in ``batch``; unlabelled samples pad shorter batches."""
        if not batch:
            self._asked = [False] * len(self.names)
            return {}
        longest = max(len(samples[1]) for samples in batch.values())
        inputs, labels = [], []
        some = next(iter(batch.values()))
        nothing = some[0][:0], some[1][:0]
        for name in self.names:
            x, y = batch.get(name, nothing)[:2]
            missing = longest - len(y)
            if missing and len(y) and not self._has_padded:
                self._has_padded = True
                _check_padding(self.network, x, missing)
            inputs.append(torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x)
            labels.append(F.pad(y, (0, missing), value=UNLABELLED) if missing else y)
        self._asked = [name in batch for name in self.names]
        logits = self._forward(self.stacked, torch.stack(inputs))
        targets = torch.stack(labels)
        flat = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=UNLABELLED, reduction="none")
        means = flat.view_as(targets).sum(dim=1) / (targets != UNLABELLED).sum(dim=1).clamp(min=1)
        return {
            name: mean for name, mean, active in zip(self.names, means.unbind(0), self._asked, strict=True) if active
        }

    def losses_in_stream(self, run: Run, batch: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
        """Return `losses`, computed inside a random stream that all clients share."""
        federation = run.federation
        with torch_streams(run.device):
            moment = (federation.round_idx, federation.batch_idx)
            enter_stream(federation.seed, "train together", *moment, device=run.device)
            return self.losses(batch)

    def scatter_gradients(self) -> None:
        """Hand each active client's parameters their part of the stacked gradient; call it after each backward.

        With accumulated gradients, a client in any of the batches is active.
        """
        self._active = [before or now for before, now in zip(self._active, self._asked, strict=True)]
        for own, whole in zip(self.params, self.stacked.values(), strict=True):
            if whole.grad is None:
                continue
            for param, part, active in zip(own, whole.grad.unbind(0), self._active, strict=True):
                if active:
                    param.grad = part

    def zero_grad(self) -> None:
        """Clear the stacked gradient."""
        self._active = [False] * len(self.names)
        for whole in self.stacked.values():
            whole.grad = None


@torch.no_grad()
def _check_padding(network: nn.Module, x: Tensor, missing: int) -> None:
    """Refuse a network whose outputs for a batch depend on samples that are put behind it."""
    norms = [name for name, module in network.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    padded = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
    with evaluating(network), torch_streams(x.device):
        outputs, again, alone = network(padded), network(padded), network(x)
    is_random = not torch.equal(outputs, again)
    differs = (outputs[: len(x)] - alone).abs().max() > 1e-3 * (1 + alone.abs().max())
    if norms or (bool(differs) and not is_random):
        _refuse(
            "compute a sample's output from its whole batch, as shorter batches are padded",
            "leave vectorize out, or use GroupNorm in place of BatchNorm",
        )


def _layout(module: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, param.shape) for name, param in module.named_parameters()]


def stack(run: Run, own_loss: bool) -> StackedReplicas:
    """Stack a run's local replicas.

    Raises:
        ValueError: If its clients cannot be trained together.
    """
    if own_loss:
        refuse("vectorize", f"False with the loss of {run.name}, in place of which it has cross-entropy", True)
    if not isinstance(run.task, Classification):
        refuse("vectorize", "False in regression, as it has the loss of a classification", True)
    if not run.module.automatic_optimization:
        refuse("vectorize", "False without automatic optimisation, as it hands gradients to the clients itself", True)
    return StackedReplicas({client.name: run.replicas[client] for client in run.federation.local_clients})
