"""Linear classifiers: in closed form from moments that clients can add up, and of samples with soft labels."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlit.checks import check, check_positive
from fedlit.functional.checks import check_finite, check_shape

MIN_PRIOR = 1e-12
"""Shares below are divided by this."""
NEVER = -1e9
"""Logit of a class that no sample has: finite, and far below all others."""


def linear_discriminant(
    second_moment: Tensor, class_moments: Tensor, priors: Tensor, shrinkage: float = 0.1
) -> tuple[Tensor, Tensor]:
    r"""Linear discriminant analysis from moments: Gaussian classes of a common covariance.

    With class means :math:`\mu_c` and the covariance within classes, shrunk towards a multiple of the identity,
    :math:`\Sigma = (1 - s)\,\Sigma_w + s\,\mathrm{tr}(\Sigma_w)/m\; I`,

    .. math:: \mathrm{logit}_c(f) = \mu_c^\top\Sigma^{-1}f - \tfrac12\mu_c^\top\Sigma^{-1}\mu_c + \log\pi_c

    See Hastie, Tibshirani and Friedman, The Elements of Statistical Learning, equation 4.10; shrinkage as of Ledoit and
    Wolf, Journal of Multivariate Analysis 2004, with a fixed weight.

    Args:
        second_moment: Mean of :math:`f f^\top` over samples, shape (m, m); they must vary within classes.
        class_moments: Mean over samples of :math:`f` times the indicator of each class, shape (m, C).
        priors: Share pi of each class, shape (C,), sums to 1; a class of share 0 is never predicted.
        shrinkage: s in (0, 1]; 0 is refused, as the covariance of few samples has no inverse.

    Returns:
        Weights of shape (C, m) and biases of shape (C,), float64.
    """
    check_shape("class_moments", class_moments, "m", "C")
    width, num_classes = class_moments.shape
    check_shape("second_moment", second_moment, width, width)
    check_shape("priors", priors, num_classes)
    check(0 < shrinkage <= 1, "shrinkage (s)", "in (0, 1]", shrinkage, "it is the weight of the identity")
    for name, tensor in (("second_moment", second_moment), ("class_moments", class_moments), ("priors", priors)):
        check_finite(name, tensor, "have the features diverged?")
    moments, shares = class_moments.double(), priors.double()
    means = moments / shares.clamp(min=MIN_PRIOR)
    within = second_moment.double() - means @ moments.T
    within = (within + within.T) / 2
    level = float(within.trace()) / width
    rule, way_out = "of samples that vary within classes", "without a covariance classes cannot be separated"
    check(level > 0, "second_moment", rule, level, way_out)
    covariance = (1 - shrinkage) * within + shrinkage * level * torch.eye(width).to(within)
    weights = torch.linalg.solve(covariance, means).T
    biases = shares.clamp(min=MIN_PRIOR).log() - 0.5 * (weights * means.T).sum(dim=1)
    unseen = shares <= 0
    return weights.masked_fill(unseen[:, None], 0.0), biases.masked_fill(unseen, NEVER)


def softmax_regression(x: Tensor, y: Tensor, penalty: float = 1e-3, num_iterations: int = 200) -> tuple[Tensor, Tensor]:
    r"""Linear classifier of samples with class probabilities: multinomial logistic regression by L-BFGS.

    .. math:: \min_{W, b} \frac{1}{n} \sum_{i,c} -y_{ic} \log \mathrm{softmax}(W x_i + b)_c
              + \frac{\lambda}{2} \|W\|_F^2

    Args:
        x: Samples, shape (n, d).
        y: Class probabilities, shape (n, C).
        penalty: lambda, positive; scikit-learn's inverse strength times n is 1 / lambda.
        num_iterations: Maximal number of iterations.

    Returns:
        Weights of shape (C, d) and biases of shape (C,), float64.
    """
    check_shape("x", x, "n > 0", "d")
    check_shape("y", y, len(x), "C")
    check_finite("x", x)
    check_finite("y", y)
    check_positive("penalty (lambda)", penalty)
    with torch.inference_mode(False), torch.enable_grad():
        # clones, since tensors of a surrounding inference mode take no part in gradients
        samples, shares = (each.detach().double().clone() for each in (x, y))
        weight = torch.zeros(y.shape[1], x.shape[1], dtype=torch.float64, device=x.device, requires_grad=True)
        bias = torch.zeros(y.shape[1], dtype=torch.float64, device=x.device, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [weight, bias], max_iter=num_iterations, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
        )

        def objective() -> Tensor:
            optimizer.zero_grad()
            log_p = torch.log_softmax(samples @ weight.T + bias, dim=1)
            loss = -(shares * log_p).sum(dim=1).mean() + penalty / 2 * weight.square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(objective)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()
