"""The scikit-learn estimators: against scipy and the functions they wrap, inside scikit-learn's tools, and refusing."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import scipy.linalg
import sklearn
import torch
from scipy.spatial.distance import cdist, pdist
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import _num_samples

from fedlit.functional import laplace_kernel, r_tca, rf_tca, sample_frequencies, tca
from fedlit.shallow import CORAL, GFK, JDA, RFTCA, RTCA, TCA
from refused import refused

ESTIMATORS = [TCA, RTCA, RFTCA]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)

BUILT = [TCA(3), RTCA(3), RFTCA(3), CORAL(), JDA(3, labelling="class_mean"), GFK(2)]
every_built = pytest.mark.parametrize("built", BUILT, ids=lambda built: type(built).__name__)

NUM_SOURCE, NUM_TARGET = 30, 20


def two_domains(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two classes along the first axis, two domains apart along the second; rows of both domains mixed."""
    draws = np.random.default_rng(seed)
    domain = draws.permutation(np.repeat([1, -1], [NUM_SOURCE, NUM_TARGET]))
    labels = np.arange(len(domain)) % 2
    samples = draws.normal(size=(len(domain), 4))
    samples[:, 0] += 6 * labels
    samples[:, 1] += 4 * (domain < 0)
    return samples, labels, domain


def contrast(domain: np.ndarray) -> np.ndarray:
    return np.where(domain > 0, 1 / np.sum(domain > 0), -1 / np.sum(domain < 0))


def up_to_signs(components: np.ndarray) -> np.ndarray:
    return components * np.sign(components[np.abs(components).argmax(axis=0), np.arange(components.shape[1])])


@every_estimator
def test_constrained_components_solve_the_papers_problem_with_the_default_scales(estimator):
    """scipy's generalised eigensolver on the pencil of TCA's problem, with sigma and gamma computed here by hand."""
    samples, _, domain = two_domains()
    fitted = estimator(3, scaling="constraint").fit(samples, sample_domain=domain)
    sigma = np.median(pdist(samples))
    ell, centring = contrast(domain), np.eye(len(domain)) - 1 / len(domain)
    gram = np.exp(-cdist(samples, samples, "sqeuclidean") / (2 * sigma**2))
    if estimator is RFTCA:
        phase = samples @ fitted.frequencies_.astype(float).T
        features = np.hstack([np.cos(phase), np.sin(phase)]) / np.sqrt(500)
        gram = features @ features.T
    penalised = gram @ gram if estimator is TCA else gram
    draws = np.random.default_rng(0)
    by_chance = [(shuffled := draws.permutation(ell)) @ penalised @ shuffled for _ in range(5000)]
    gamma = fitted.gamma_
    reached = gram @ ell
    if estimator is TCA:
        right = np.outer(reached, reached) + gamma * np.eye(len(ell))
        values, weights = scipy.linalg.eigh(gram @ centring @ gram, right)
        expected = gram @ weights[:, ::-1][:, :3]
    else:
        # on the range of K: w = K^(-1/2) z turns gamma K + K l l^T K into gamma I + K^(1/2) l l^T K^(1/2)
        spectrum, basis = np.linalg.eigh(gram)
        root = basis * np.sqrt(spectrum.clip(0)) @ basis.T
        right = gamma * np.eye(len(ell)) + np.outer(root @ ell, root @ ell)
        values, weights = scipy.linalg.eigh(root @ centring @ root, right)
        expected = root @ weights[:, ::-1][:, :3]
    # scipy normalises w^T right w to 1, the constraint is w^T K H K w = 1, and their ratio is the eigenvalue
    expected = expected / np.sqrt(values[::-1][:3])
    assert fitted.bandwidth_ == pytest.approx(sigma)
    assert gamma == pytest.approx(np.mean(by_chance), abs=4 * np.std(by_chance) / np.sqrt(5000))
    np.testing.assert_allclose(fitted.eigenvalues_, values[::-1][:3], rtol=1e-6)
    found = fitted.transform(samples)
    np.testing.assert_allclose(up_to_signs(found), up_to_signs(expected), atol=1e-6)
    centred = found - found.mean(axis=0)
    np.testing.assert_allclose(centred.T @ centred, np.eye(3), atol=1e-7)


@pytest.mark.parametrize("function", [tca, r_tca, rf_tca])
def test_given_parameters_reach_the_function_that_computes(function):
    samples, _, domain = two_domains()
    xs, xt = torch.tensor(samples[domain > 0]), torch.tensor(samples[domain < 0])
    if function is rf_tca:
        frequencies = sample_frequencies(40, 4, 2.5, "laplace", seed=3)
        expected = rf_tca(xs, xt, 5, 0.3, frequencies, "constraint")
        estimator = RFTCA(
            5, gamma=0.3, kernel="laplace", bandwidth=2.5, scaling="constraint", n_frequencies=40, random_state=3
        )
    else:
        expected = function(xs, xt, 5, 0.3, partial(laplace_kernel, bandwidth=2.5), "constraint")
        estimator = {tca: TCA, r_tca: RTCA}[function](
            5, gamma=0.3, kernel="laplace", bandwidth=2.5, scaling="constraint"
        )
    components = estimator.fit_transform(samples, sample_domain=domain)
    np.testing.assert_allclose(components[domain > 0], expected.source, atol=1e-9)
    np.testing.assert_allclose(components[domain < 0], expected.target, atol=1e-9)
    np.testing.assert_allclose(estimator.aligner_, expected.aligner)
    np.testing.assert_allclose(estimator.eigenvalues_, expected.eigenvalues)


@pytest.mark.parametrize("estimator", [RTCA, RFTCA])
def test_adaptation_lets_a_source_classifier_work_on_the_target(estimator):
    """Classes lie along (1, 1) and the domains' shift along (6, -1): the nearest source class misleads."""
    draws = np.random.default_rng(1)
    domain, labels = np.repeat([1, -1], 100), np.arange(200) % 2
    samples = draws.normal(size=(200, 2)) + np.outer(labels, [2.5, 2.5])
    samples[domain < 0] += [6.0, -1.0]
    source = domain > 0

    def accuracy(features: np.ndarray) -> float:
        return KNeighborsClassifier().fit(features[source], labels[source]).score(features[~source], labels[~source])

    adapted = estimator(1).fit_transform(samples, sample_domain=domain)
    assert accuracy(samples) < 0.6
    assert accuracy(adapted) > 0.85


@every_estimator
def test_the_default_median_is_over_manhattan_distances_for_the_laplace_kernel(estimator):
    samples, _, domain = two_domains()
    fitted = estimator(2, kernel="laplace").fit(samples, sample_domain=domain)
    assert fitted.bandwidth_ == pytest.approx(np.median(pdist(samples, "cityblock")))


def test_the_median_of_many_samples_is_found_from_a_part_of_them():
    draws = np.random.default_rng(0)
    samples, domain = draws.normal(size=(3000, 3)), np.tile([1, -1, -1], 1000)
    fitted = RFTCA(2, n_frequencies=10).fit(samples, sample_domain=domain)
    again = RFTCA(2, n_frequencies=10).fit(samples, sample_domain=domain)
    assert fitted.bandwidth_ == again.bandwidth_
    assert fitted.bandwidth_ == pytest.approx(np.median(pdist(samples)), rel=0.05)
    assert fitted.bandwidth_ != np.median(pdist(samples))


def test_more_frequencies_bring_rftca_to_rtca():
    """The error of the kernel falls as N^(-1/2): 100 times more frequencies, a tenth of the gap between projectors."""
    samples, _, domain = two_domains()

    def projector(fitted: TCA | RFTCA) -> np.ndarray:
        components = fitted.set_params(scaling="constraint").fit_transform(samples, sample_domain=domain)
        centred = components - components.mean(axis=0)
        return centred @ centred.T

    exact = projector(RTCA(3))
    errors = [
        np.mean([np.linalg.norm(projector(RFTCA(3, n_frequencies=n, random_state=s)) - exact) for s in range(5)])
        for n in (200, 20000)
    ]
    assert 5 < errors[0] / errors[1] < 20


@every_built
def test_float32_gives_float32_and_integers_float64(built):
    samples, labels, domain = two_domains()
    double = built.fit_transform(samples, labels, sample_domain=domain)
    single = built.fit_transform(samples.astype(np.float32), labels, sample_domain=domain)
    assert double.dtype == np.float64
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, double, atol=1e-3)
    counts = (10 * samples).astype(np.int64)
    assert clone(built).fit_transform(counts, labels, sample_domain=domain).dtype == np.float64


@every_built
def test_fitting_leaves_samples_alone_and_takes_read_only_ones(built):
    samples, labels, domain = two_domains()
    samples.flags.writeable = False
    before = samples.copy()
    clone(built).fit(samples, labels, sample_domain=domain).transform(samples)
    clone(built).fit_transform(samples, labels, sample_domain=domain)
    np.testing.assert_array_equal(samples, before)


def names_of(built) -> list[str]:
    """CORAL has the features that it is given, GFK two for each axis."""
    if isinstance(built, CORAL):
        return list("abcd")
    return [f"{type(built).__name__.lower()}{i}" for i in range(4 if isinstance(built, GFK) else 3)]


@every_built
def test_pandas_frames_in_and_out(built):
    pandas = pytest.importorskip("pandas")
    samples, labels, domain = two_domains()
    frame = pandas.DataFrame(samples, columns=list("abcd"), index=np.arange(len(samples)) + 100)
    fitted = clone(built).set_output(transform="pandas")
    out = fitted.fit_transform(frame, labels, sample_domain=pandas.Series(domain, index=frame.index))
    assert list(out.columns) == names_of(built)
    assert (out.index == frame.index).all()
    assert list(fitted.feature_names_in_) == list("abcd")
    plain = clone(built).fit_transform(samples, labels, sample_domain=domain)
    np.testing.assert_allclose(out.to_numpy(), plain, atol=1e-9)


@every_built
def test_it_works_in_a_pipeline_with_metadata_routing(built):
    samples, labels, domain = two_domains()
    with sklearn.config_context(enable_metadata_routing=True):
        adapter = clone(built).set_fit_request(sample_domain=True)
        if isinstance(built, CORAL):  # moves the rows of one domain alone
            adapter.set_transform_request(sample_domain=True)
        pipeline = make_pipeline(StandardScaler(), adapter, KNeighborsClassifier())
        pipeline.fit(samples, labels, sample_domain=domain)
    assert pipeline.score(samples, labels) > 0.9
    scaled = pipeline[0].transform(samples)
    expected = clone(built).fit(scaled, labels, sample_domain=domain).transform(scaled)
    np.testing.assert_allclose(pipeline[:-1].transform(samples), expected, atol=1e-9)


GRIDS = {
    **{name: {"gamma": [0.1, 10.0], "n_components": [1, 2]} for name in ("RTCA", "JDA")},
    "CORAL": {"reg": [0.1, "auto"], "center": [False, True]},
}


@pytest.mark.parametrize("built", [RTCA(3), CORAL(), JDA(3, labelling="class_mean")])
def test_a_grid_search_cuts_the_domains_with_the_samples(built):
    samples, labels, domain = two_domains()
    pipeline = make_pipeline(clone(built), KNeighborsClassifier())
    name = type(built).__name__.lower()
    grid = {f"{name}__{key}": values for key, values in GRIDS[type(built).__name__].items()}
    search = GridSearchCV(pipeline, grid, cv=StratifiedKFold(3))
    search.fit(samples, labels, **{f"{name}__sample_domain": domain})
    assert search.best_score_ > 0.9
    # one fold by hand: it was fitted to that fold's domains
    train, test = next(StratifiedKFold(3).split(samples, labels))
    by_hand = clone(pipeline).set_params(**search.cv_results_["params"][0])
    by_hand.fit(samples[train], labels[train], **{f"{name}__sample_domain": domain[train]})
    assert by_hand.score(samples[test], labels[test]) == search.cv_results_["split0_test_score"][0]


class Alternating:
    """Scikit-learn's own checks call fit(X, y): let domains alternate where none are given."""

    def fit(self, X, y=None, sample_domain=None):
        given = np.where(np.arange(_num_samples(X)) % 2, -1, 1) if sample_domain is None else sample_domain
        return super().fit(X, y, sample_domain=given)


class AlternatingCORAL(Alternating, CORAL):
    """CORAL depends on a sample's domain: the checks' samples are then the target's in all calls."""

    def fit_transform(self, X, y=None, sample_domain=None):
        return self.fit(X, y, sample_domain).transform(X)


# one component, as the smallest data of the checks have few samples; pickling looks for the classes in the module
CLASSES = {f"Alternating{each.__name__}": each for each in (TCA, RTCA, JDA, GFK)}
globals().update({name: type(name, (Alternating, each), {}) for name, each in CLASSES.items()})
ALTERNATING = [globals()[name](1) for name in CLASSES]


class AlternatingRFTCA(Alternating, RFTCA):
    pass


@pytest.mark.parametrize(
    "estimator",
    [*ALTERNATING, AlternatingRFTCA(1, n_frequencies=20), AlternatingCORAL()],
    ids=lambda estimator: type(estimator).__name__,
)
def test_scikit_learns_own_checks_pass(estimator):
    results = check_estimator(estimator, on_fail=None, on_skip=None)
    failed = {result["check_name"]: repr(result["exception"]) for result in results if result["status"] == "failed"}
    assert not failed
    assert sum(result["status"] == "passed" for result in results) > 30


NAN = float("nan")
BAD_PARAMETERS = [
    *(
        (argument, estimator(**{"n_components": 2, argument: value}))
        for estimator in ESTIMATORS
        for argument, value in (
            ("n_components", 0),
            ("n_components", 50),
            ("gamma", 0.0),
            ("gamma", NAN),
            ("bandwidth", -1.0),
            ("kernel", "linear"),
            ("scaling", "none"),
        )
    ),
    ("n_frequencies", RFTCA(2, n_frequencies=0)),
    ("n_components", RFTCA(5, n_frequencies=2)),
    ("random_state", RFTCA(2, random_state=None)),
    ("reg", CORAL(reg=-1.0)),
    ("reg", CORAL(reg="scott")),
    ("n_components", GFK(0)),
    ("n_components", GFK(3)),
    ("n_components", GFK("best")),
    ("n_components", JDA(5)),
    ("n_components", JDA(50, kernel="gaussian")),
    ("gamma", JDA(2, gamma=0.0)),
    ("kernel", JDA(2, kernel="linear")),
    ("bandwidth", JDA(2, kernel="gaussian", bandwidth=-1.0)),
    ("scaling", JDA(2, scaling="none")),
    ("labelling", JDA(2, labelling="vote")),
    ("max_iter", JDA(2, max_iter=0)),
]


@pytest.mark.parametrize(("argument", "built"), BAD_PARAMETERS)
def test_bad_parameters_are_refused_in_fit_and_not_before(argument, built):
    samples, labels, domain = two_domains()
    with refused(argument, TypeError if argument == "random_state" else ValueError):
        built.fit(samples, labels, sample_domain=domain)


@every_built
def test_bad_domains_are_refused(built):
    samples, labels, _ = two_domains()
    ones, flags = np.ones(50, dtype=int), np.repeat([True, False], 25)
    for domain in (None, np.repeat([1, 0, -1], [30, 5, 15]), ones, -ones):
        with refused("sample_domain"):
            clone(built).fit(samples, labels, sample_domain=domain)
    for domain in (np.where(flags, 0.5, -0.5), flags, ones[:, None]):
        with refused("sample_domain", TypeError):
            clone(built).fit(samples, labels, sample_domain=domain)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        clone(built).fit(samples, labels, sample_domain=np.repeat([1, -1], 10))


@pytest.mark.parametrize(
    ("argument", "built", "num_source"),
    [
        ("sample_domain", CORAL(), 1),
        ("sample_domain", CORAL(), 49),
        ("source_covariance", CORAL(reg=0.0), 3),
        ("n_components", GFK(2), 2),
        ("n_features", GFK(1), 1),
    ],
)
def test_domains_of_too_few_samples_are_refused(argument, built, num_source):
    samples, labels, _ = two_domains()
    with refused(argument):
        built.fit(samples, labels, sample_domain=np.repeat([1, -1], [num_source, 50 - num_source]))


@every_estimator
def test_components_beyond_the_rank_are_refused(estimator):
    """Five distinct samples, ten times each: after centring there are four directions."""
    samples = np.tile(np.random.default_rng(0).normal(size=(5, 3)), (10, 1))
    domain = np.repeat([1, -1], 25)
    assert estimator(4).fit(samples, sample_domain=domain).aligner_.shape[1] == 4
    with refused("num_components"):
        estimator(5).fit(samples, sample_domain=domain)


@every_estimator
def test_samples_that_mostly_coincide_need_a_bandwidth(estimator):
    samples, domain = np.zeros((50, 2)), np.repeat([1, -1], 25)
    samples[:3] = np.eye(3, 2) + 1
    with refused("bandwidth"):
        estimator(1).fit(samples, sample_domain=domain)
    assert estimator(1, bandwidth=1.0).fit(samples, sample_domain=domain).bandwidth_ == 1.0
