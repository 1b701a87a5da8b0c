"""Pure maths on tensors: what the methods compute, without Lightning and without clients.

Arguments that are not as described (shape, range, finite) raise a `ValueError` that names them; samples that are not of
a floating type raise a `TypeError`.
"""

# isort: off
# fmt: off
from fedlit.functional.aggregation import (
    Granularity, UpdateProducts, fedavg, fedda, fedgp, fedgp_cosine, inner_products, products_with_sources,
    projection_coefficients, scale_layers,
)
from fedlit.functional.auto_weights import (
    AutoBeta, BatchStatistics, auto_beta, auto_weights, fedda_delta_squared, fedgp_delta_squared,
)
from fedlit.functional.analytic import LabelMoments, RidgePath, diagonal_discriminant
from fedlit.functional.barycenter import Barycenter, wasserstein_barycenter
from fedlit.functional.calibration import (
    best_temperature, brier_score, decide, fit_temperature, losses_at, temperature_at, temperature_grid,
)
from fedlit.functional.clustering import (
    centroid_labels, clustering_gains, intra_cluster_distance, k_means, nearest_prototypes, relative_scatter,
)
from fedlit.functional.correlation import Ridge, central_moments, coral_loss, coral_map, second_moments
from fedlit.functional.diagnosis import auroc_interval, predictive_values
from fedlit.functional.discriminant import linear_discriminant, softmax_regression
from fedlit.functional.ensembles import Combination, combine_predictions
from fedlit.functional.geodesic import geodesic_flow_factor, geodesic_flow_kernel, principal_axes, subspace_dimension
from fedlit.functional.joint_distribution import (
    JointAligner, JointComponents, Labelling, jda, jda_from_sums, joint_gaps,
)
from fedlit.functional.kernels import Kernel, cauchy_kernel, gaussian_kernel, laplace_kernel
from fedlit.functional.knowledge import (
    Knowledge, between_class_variance, confident_votes, consensus_focus, hard_vote, knowledge_vote, left_out_focus,
    mixup,
)
from fedlit.functional.losses import (
    alignment_loss, annealing, centroid_weights, domain_adversarial_loss, domain_loss, entropy_weights,
    gradient_penalty, group_discrepancy,
    information_maximisation_loss, loss_from_gradient, minimax_entropy_loss, multilinear_map,
    mutual_information_bound, reversal_weight, uniform_cross_entropy,
)
from fedlit.functional.mixtures import mixture_variance
from fedlit.functional.mmd import (
    bandwidth_ladder, kernel_ladder, mean_pair_distance, mixture_frequencies, mmd_squared, multi_kernel_mmd,
    rff_mmd_squared,
)
from fedlit.functional.random_features import (
    RandomFeatureSums, random_feature_sums, random_fourier_features, sample_frequencies,
)
from fedlit.functional.refinement import (
    adaptive_shares, neighbour_agreement, neighbour_graph, normal_scores, propagate_labels, refine_labels,
    to_class_shares, to_confidence,
)
from fedlit.functional.scores import (
    SourceMoments, calibrated_information, certainty_score, class_mean_match, diversity_score, feature_hash,
    importance_weighted_scores, importance_weights, information_score, nearest_neighbours,
    neighbourhood_information, soft_neighbourhood_density, standardised_directions, trust_score,
)
from fedlit.functional.taylor_mmd import (
    exact_between_domains_mean, exact_within_domain_mean, gradient_map, mean_squared_distance, moments_to_send,
    num_taylor_moments, pair_with_kernel, repelling_distance, taylor_coefficients, taylor_mmd_squared,
    taylor_moments, within_domain_mean,
)
from fedlit.functional.transfer_components import Scaling, TransferComponents, r_tca, rf_tca, rf_tca_from_sums, tca
from fedlit.functional.wasserstein import (
    balanced_weights, barycentric_mapping, joint_cost, joint_ot_loss, nearest_class_mean, project_simplex,
    transport_plan,
)

__all__ = [
    "AutoBeta", "Barycenter", "BatchStatistics", "Combination", "Granularity", "JointAligner", "JointComponents",
    "Kernel", "Knowledge", "LabelMoments", "Labelling", "RandomFeatureSums", "Ridge", "RidgePath", "Scaling",
    "SourceMoments", "TransferComponents", "UpdateProducts", "adaptive_shares", "alignment_loss", "annealing",
    "auroc_interval", "auto_beta", "auto_weights", "balanced_weights", "bandwidth_ladder", "barycentric_mapping",
    "best_temperature", "between_class_variance", "brier_score", "calibrated_information", "cauchy_kernel",
    "central_moments", "centroid_labels", "centroid_weights", "certainty_score", "class_mean_match", "clustering_gains",
    "combine_predictions", "confident_votes", "consensus_focus", "coral_loss", "coral_map", "decide",
    "diagonal_discriminant", "diversity_score", "domain_adversarial_loss", "domain_loss", "entropy_weights",
    "exact_between_domains_mean", "exact_within_domain_mean", "feature_hash", "fedavg", "fedda",
    "fedda_delta_squared", "fedgp", "fedgp_cosine", "fedgp_delta_squared", "fit_temperature", "gaussian_kernel",
    "geodesic_flow_factor", "geodesic_flow_kernel", "gradient_map", "gradient_penalty", "group_discrepancy",
    "hard_vote", "importance_weighted_scores", "importance_weights", "information_maximisation_loss",
    "information_score", "inner_products", "intra_cluster_distance", "jda", "jda_from_sums", "joint_cost", "joint_gaps",
    "joint_ot_loss", "k_means", "kernel_ladder", "knowledge_vote", "laplace_kernel", "left_out_focus",
    "linear_discriminant", "loss_from_gradient", "losses_at", "mean_pair_distance", "mean_squared_distance",
    "minimax_entropy_loss", "mixture_frequencies", "mixture_variance", "mixup", "mmd_squared", "moments_to_send",
    "multi_kernel_mmd", "multilinear_map", "mutual_information_bound", "nearest_class_mean", "nearest_neighbours",
    "nearest_prototypes", "neighbour_agreement", "neighbour_graph", "neighbourhood_information", "normal_scores",
    "num_taylor_moments", "pair_with_kernel", "predictive_values", "principal_axes", "products_with_sources",
    "project_simplex", "projection_coefficients", "propagate_labels", "r_tca", "random_feature_sums",
    "random_fourier_features", "refine_labels", "relative_scatter", "repelling_distance", "reversal_weight",
    "rf_tca", "rf_tca_from_sums", "rff_mmd_squared", "sample_frequencies", "scale_layers", "second_moments",
    "soft_neighbourhood_density", "softmax_regression", "standardised_directions", "subspace_dimension",
    "taylor_coefficients", "taylor_mmd_squared", "taylor_moments", "tca", "temperature_at", "temperature_grid",
    "to_class_shares", "to_confidence", "transport_plan", "trust_score", "uniform_cross_entropy",
    "wasserstein_barycenter", "within_domain_mean",
]
# fmt: on
# isort: on
