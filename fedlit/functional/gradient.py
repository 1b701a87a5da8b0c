"""A loss for a client that receives its gradient from somebody else."""

from __future__ import annotations

from torch import Tensor


def loss_from_gradient(inputs: Tensor, gradient: Tensor, value: Tensor | float = 0.0) -> Tensor:
    r"""A scalar whose gradient with respect to ``inputs`` was received: what lies above them is known to others only.

    .. math:: L = \langle x, g \rangle - \langle x, g \rangle_{\text{constant}} + v, \qquad
              \partial L / \partial x = g

    Backpropagation through it is that of the sender's own loss, as by the chain rule the rest of the network asks for
    no more than g.

    Args:
        inputs: x, such as features, with their graph; any shape.
        gradient: g, of the same shape.
        value: v of the sender's loss, for logging.

    Returns:
        A scalar, float64.

    Raises:
        ValueError: If the shapes differ.

    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> loss_from_gradient(x, torch.full((2, 3), 0.5), 4.0).backward()
    >>> x.grad
    tensor([[0.5000, 0.5000, 0.5000],
            [0.5000, 0.5000, 0.5000]])
    """
    if inputs.shape != gradient.shape:
        raise ValueError(
            f"gradient must have the shape of inputs, {tuple(inputs.shape)}, got {tuple(gradient.shape)}: it has "
            "one entry for each of theirs"
        )
    linear = (inputs * gradient.detach().to(inputs)).sum().double()
    return linear - linear.detach() + value
