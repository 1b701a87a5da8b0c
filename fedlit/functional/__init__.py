"""Pure maths on tensors: what the methods compute, without Lightning and without clients."""

from fedlit.functional.aggregation import fedavg, fedda, fedgp, fedgp_cosine
from fedlit.functional.alignment import alignment_loss
from fedlit.functional.auto_weights import AutoBeta, BatchStatistics, auto_beta, auto_weights
from fedlit.functional.discriminant import linear_discriminant, softmax_regression
from fedlit.functional.kernels import Kernel, cauchy_kernel, gaussian_kernel, laplace_kernel
from fedlit.functional.mmd import mmd_squared, rff_mmd_squared
from fedlit.functional.random_features import random_fourier_features, sample_frequencies
from fedlit.functional.scores import information_score
from fedlit.functional.taylor_mmd import (
    exact_between_domains_mean,
    exact_within_domain_mean,
    gradient_map,
    mean_squared_distance,
    moments_to_send,
    num_taylor_moments,
    pair_with_kernel,
    repelling_distance,
    taylor_coefficients,
    taylor_mmd_squared,
    taylor_moments,
    within_domain_mean,
)
from fedlit.functional.transfer_components import (
    RandomFeatureSums,
    Scaling,
    TransferComponents,
    r_tca,
    random_feature_sums,
    rf_tca,
    rf_tca_from_sums,
    tca,
)
from fedlit.functional.updates import Granularity, inner_products, projection_coefficients, scale_layers
from fedlit.functional.voting import hard_vote
from fedlit.functional.wasserstein import (
    Barycenter,
    balanced_weights,
    barycentric_mapping,
    joint_cost,
    joint_ot_loss,
    nearest_class_mean,
    project_simplex,
    transport_plan,
    wasserstein_barycenter,
)

__all__ = [
    "AutoBeta",
    "Barycenter",
    "BatchStatistics",
    "Granularity",
    "Kernel",
    "RandomFeatureSums",
    "Scaling",
    "TransferComponents",
    "alignment_loss",
    "auto_beta",
    "auto_weights",
    "balanced_weights",
    "barycentric_mapping",
    "cauchy_kernel",
    "exact_between_domains_mean",
    "exact_within_domain_mean",
    "fedavg",
    "fedda",
    "fedgp",
    "fedgp_cosine",
    "gaussian_kernel",
    "gradient_map",
    "hard_vote",
    "information_score",
    "inner_products",
    "joint_cost",
    "joint_ot_loss",
    "laplace_kernel",
    "linear_discriminant",
    "mean_squared_distance",
    "mmd_squared",
    "moments_to_send",
    "nearest_class_mean",
    "num_taylor_moments",
    "pair_with_kernel",
    "project_simplex",
    "projection_coefficients",
    "r_tca",
    "random_feature_sums",
    "random_fourier_features",
    "repelling_distance",
    "rf_tca",
    "rf_tca_from_sums",
    "rff_mmd_squared",
    "sample_frequencies",
    "scale_layers",
    "softmax_regression",
    "taylor_coefficients",
    "taylor_mmd_squared",
    "taylor_moments",
    "tca",
    "transport_plan",
    "wasserstein_barycenter",
    "within_domain_mean",
]
