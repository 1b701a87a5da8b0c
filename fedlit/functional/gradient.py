"""A loss for a client that receives its gradient from somebody else."""

from __future__ import annotations

from torch import Tensor

from fedlit.functional.checks import check_same_shape


def loss_from_gradient(inputs: Tensor, gradient: Tensor, value: Tensor | float = 0.0) -> Tensor:
    r"""A scalar, float64, whose gradient with respect to ``inputs`` was received from the client that computes it.

    .. math:: L = \langle x, g \rangle - \langle x, g \rangle_{\text{constant}} + v, \qquad
              \partial L / \partial x = g

    By the chain rule, backpropagation through it is that of the sender's loss.

    Args:
        inputs: x, such as features, with their graph; any shape.
        gradient: g, of the same shape; another is a ValueError.
        value: v of the sender's loss, for logging.

    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> loss_from_gradient(x, torch.full((2, 3), 0.5), 4.0).backward()
    >>> x.grad
    tensor([[0.5000, 0.5000, 0.5000],
            [0.5000, 0.5000, 0.5000]])
    """
    check_same_shape("gradient", gradient, "inputs", inputs)
    linear = (inputs * gradient.detach().to(inputs)).sum().double()
    return linear - linear.detach() + value
