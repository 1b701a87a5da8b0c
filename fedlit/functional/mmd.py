"""Maximum mean discrepancy between two samples."""

from __future__ import annotations

from torch import Tensor

from fedlit.checks import check_at_least
from fedlit.functional.checks import check_pair, check_same_shape, check_shape
from fedlit.functional.kernels import gaussian_kernel


def mmd_squared(x: Tensor, y: Tensor, bandwidth: float, unbiased: bool = True) -> Tensor:
    r"""Squared maximum mean discrepancy with a Gaussian kernel, a scalar that gradients pass through.

    .. math:: \frac{1}{n(n-1)}\sum_{i\ne j}k(x_i,x_j) + \frac{1}{k(k-1)}\sum_{i\ne j}k(y_i,y_j)
              - \frac{2}{nk}\sum_{i,j}k(x_i,y_j)

    The biased estimate has :math:`1/n^2 \sum_{i,j}` and :math:`1/k^2 \sum_{i,j}` in the first two terms. The unbiased
    one can be slightly negative.

    Args:
        x: Samples of the first domain, shape (n, p).
        y: Samples of the second domain, shape (k, p).
        bandwidth: Kernel width sigma, a positive length in the units of ``x``.
        unbiased: Leave out each sample's kernel with itself, so that the mean is zero between equal distributions.

    Example:
        >>> x = torch.tensor([[0.0], [1.0]])
        >>> mmd_squared(x, x, bandwidth=1.0, unbiased=False)
        tensor(0.)

    References:
        Gretton et al., A kernel two-sample test, JMLR 2012, equations 3 (unbiased) and 5 (biased).
    """
    check_pair(x, y)
    for name, samples in (("x", x), ("y", y)):
        check_at_least(name, len(samples), 2 if unbiased else 1, "samples", "for one, take unbiased=False")
    # the difference of sums of n^2 terms near 1 loses digits that float32 does not have
    a, b = x.double(), y.double()
    within = [gaussian_kernel(samples, samples, bandwidth) for samples in (a, b)]
    if unbiased:
        means = [(k.sum() - k.diagonal().sum()) / (len(k) * (len(k) - 1)) for k in within]
    else:
        means = [k.mean() for k in within]
    return (means[0] + means[1] - 2 * gaussian_kernel(a, b, bandwidth).mean()).to(x.dtype)


def rff_mmd_squared(mean_source: Tensor, mean_target: Tensor, aligner: Tensor | None = None) -> Tensor:
    r"""Squared distance between the domains' mean random Fourier features after alignment, a scalar.

    .. math:: \left\|W^\top (\mu_S - \mu_T)\right\|^2

    Without an aligner, or with any W such that :math:`W W^\top = I`, it is the biased squared maximum mean discrepancy
    of the kernel that the features have as inner product.

    Args:
        mean_source: Mean feature of the source, shape (2N,).
        mean_target: Mean feature of the target, shape (2N,).
        aligner: Matrix W, shape (2N, m), or ``None`` for the identity.

    Example:
        >>> rff_mmd_squared(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]))
        tensor(5.)

    References:
        Feng et al. (FedRF-TCA, 2023), equation 11. There the target's message is minus its mean, and the published
        code adds several sources' messages without dividing by their number; give the mean over sources here.
    """
    check_shape("mean_source", mean_source, "2N")
    check_same_shape("mean_target", mean_target, "mean_source", mean_source)
    gap = mean_source - mean_target
    if aligner is not None:
        check_shape("aligner (W)", aligner, len(gap), "m")
        gap = gap @ aligner
    return (gap * gap).sum()
