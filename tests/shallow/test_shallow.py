"""The scikit-learn estimators: against scipy and the functions they wrap, inside scikit-learn's tools, and refusing."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import sklearn
import torch
from scipy.spatial.distance import cdist, pdist
from sklearn import config_context
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from fedlit.functional import geodesic_flow_kernel, jda, laplace_kernel, r_tca, rf_tca, sample_frequencies, tca
from fedlit.shallow import CORAL, GFK, JDA, RFTCA, RTCA, TCA, LeaveOneSourceOut, OnSource
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


@every_estimator
def test_default_scales_are_the_median_distance_and_the_mean_over_permuted_domains(estimator):
    samples, _, domain = two_domains()
    fitted = estimator(3).fit(samples, sample_domain=domain)
    sigma, ell = np.median(pdist(samples)), contrast(domain)
    gram = np.exp(-cdist(samples, samples, "sqeuclidean") / (2 * sigma**2))
    if estimator is RFTCA:
        phase = samples @ fitted.frequencies_.astype(float).T
        features = np.hstack([np.cos(phase), np.sin(phase)]) / np.sqrt(500)
        gram = features @ features.T
    penalised = gram @ gram if estimator is TCA else gram
    draws = np.random.default_rng(0)
    by_chance = [(shuffled := draws.permutation(ell)) @ penalised @ shuffled for _ in range(5000)]
    assert fitted.bandwidth_ == pytest.approx(sigma)
    assert fitted.gamma_ == pytest.approx(np.mean(by_chance), abs=4 * np.std(by_chance) / np.sqrt(5000))


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


def test_the_median_of_many_samples_is_found_from_a_part_of_them():
    draws = np.random.default_rng(0)
    samples, domain = draws.normal(size=(3000, 3)), np.tile([1, -1, -1], 1000)
    fitted = RFTCA(2, n_frequencies=10).fit(samples, sample_domain=domain)
    again = RFTCA(2, n_frequencies=10).fit(samples, sample_domain=domain)
    assert fitted.bandwidth_ == again.bandwidth_
    assert fitted.bandwidth_ == pytest.approx(np.median(pdist(samples)), rel=0.05)
    assert fitted.bandwidth_ != np.median(pdist(samples))
    laplace = RTCA(2, kernel="laplace").fit(samples[:90], sample_domain=domain[:90])
    assert laplace.bandwidth_ == pytest.approx(np.median(pdist(samples[:90], "cityblock")))


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


def test_a_grid_search_cuts_the_domains_with_the_samples():
    samples, labels, domain = two_domains()
    pipeline = make_pipeline(CORAL(), KNeighborsClassifier())
    search = GridSearchCV(pipeline, {"coral__reg": [0.1, "auto"]}, cv=StratifiedKFold(3))
    search.fit(samples, labels, coral__sample_domain=domain)
    # one fold by hand: it was fitted to that fold's domains
    train, test = next(StratifiedKFold(3).split(samples, labels))
    by_hand = clone(pipeline).set_params(**search.cv_results_["params"][0])
    by_hand.fit(samples[train], labels[train], coral__sample_domain=domain[train])
    assert by_hand.score(samples[test], labels[test]) == search.cv_results_["split0_test_score"][0]


@pytest.mark.parametrize(
    "estimator",
    # one component, as the smallest data of the checks have few samples
    [*(each(1) for each in (TCA, RTCA, JDA, GFK)), RFTCA(1, n_frequencies=20), CORAL(), OnSource(LogisticRegression()),
     OnSource(Ridge())],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:there is no sample_domain")
def test_scikit_learns_own_checks_pass(estimator):
    results = check_estimator(estimator, on_fail=None, on_skip=None)
    failed = {result["check_name"]: repr(result["exception"]) for result in results if result["status"] == "failed"}
    assert not failed
    assert sum(result["status"] == "passed" for result in results) > 40


@every_built
@pytest.mark.parametrize("kind", ["integers", "floats", "texts", "pandas"])
def test_samples_whose_label_is_masked_are_the_targets(built, kind):
    samples, labels, domain = two_domains()
    known = {
        "integers": np.where(domain < 0, -1, labels),
        "floats": np.where(domain < 0, np.nan, labels + 0.0),
        "texts": np.array([None if d < 0 else f"class {y}" for d, y in zip(domain, labels, strict=True)], dtype=object),
        "pandas": pytest.importorskip("pandas").Series(labels.astype(float)).mask(domain < 0),
    }[kind]
    expected = clone(built).fit_transform(samples, labels, sample_domain=domain)
    np.testing.assert_array_equal(clone(built).fit_transform(samples, known), expected)
    with refused("y"):
        clone(built).fit(samples, np.full(50, np.nan))


@every_built
def test_labels_of_minus_one_and_one_are_classes_and_nothing_is_adapted_then(built):
    samples, labels, _ = two_domains()
    for y in (2 * labels - 1, labels, None) if not isinstance(built, JDA) else (2 * labels - 1, labels):
        with pytest.warns(UserWarning, match="all samples are taken for both domains"):
            found = clone(built).fit_transform(samples, y)
        if isinstance(built, CORAL):
            np.testing.assert_array_equal(found, samples)
        both = np.repeat([1, -1], 50)
        twice = None if y is None else np.concatenate([y, y])
        doubled = clone(built).fit(np.concatenate([samples, samples]), twice, sample_domain=both)
        np.testing.assert_array_equal(doubled.transform(samples), found)


def test_the_last_step_of_a_pipeline_is_fitted_to_the_source_alone():
    samples, labels, domain = two_domains()
    known, source = np.where(domain < 0, -1, labels), domain > 0
    model = make_pipeline(CORAL(), OnSource(KNeighborsClassifier())).fit(samples, known)
    moved = CORAL().fit_transform(samples, known)
    by_hand = KNeighborsClassifier().fit(moved[source], labels[source])
    np.testing.assert_array_equal(model.predict(samples), by_hand.predict(samples))
    np.testing.assert_array_equal(model.predict_proba(samples), by_hand.predict_proba(samples))
    np.testing.assert_array_equal(model.classes_, [0, 1])
    assert model.score(samples, labels) == by_hand.score(samples, labels)
    assert not hasattr(OnSource(KNeighborsClassifier()), "decision_function")
    given = OnSource(KNeighborsClassifier()).fit(moved, labels, sample_domain=domain)
    np.testing.assert_array_equal(given.predict(samples), by_hand.predict(samples))


def test_samples_without_a_label_are_left_out_whatever_their_domain_and_form():
    pandas = pytest.importorskip("pandas")
    samples, labels, domain = two_domains()
    known = (domain > 0) & (np.arange(50) % 4 > 0)
    by_hand = KNeighborsClassifier().fit(samples[known], labels[known]).predict(samples)
    texts = np.where(labels > 0, "yes", "no")
    forms = {
        "-1": np.where(known, labels, -1),
        "strings of pandas": pandas.Series(texts, dtype="string").mask(~known),
        "a list with NaN": [text if is_known else float("nan") for text, is_known in zip(texts, known, strict=True)],
        "objects": np.array([label if is_known else None for label, is_known in zip(labels, known, strict=True)]),
        "two columns": np.stack([np.where(known, labels, -1)] * 2, axis=1),
    }
    for name, y in forms.items():
        found = OnSource(KNeighborsClassifier()).fit(samples, y, sample_domain=domain).predict(samples)
        found = found[:, 0] if found.ndim == 2 else found
        np.testing.assert_array_equal(found == ("yes" if isinstance(found[0], str) else 1), by_hand == 1, err_msg=name)
    with refused("y"):
        OnSource(KNeighborsClassifier()).fit(samples, np.stack([np.where(known, labels, -1), labels], axis=1))
    with refused("y"):
        JDA(2).fit(samples, np.where(known, labels, -1), sample_domain=domain)
    with pytest.warns(UserWarning, match="there is no sample_domain"):
        OnSource(KNeighborsClassifier()).fit(samples, labels)


def test_a_grid_search_leaves_out_each_source_in_turn_and_trains_with_the_target():
    samples, labels, domain = two_domains()
    groups = np.where(domain < 0, -1, 1 + np.arange(50) % 3)
    known = np.where(domain < 0, -1, labels)
    splits = list(LeaveOneSourceOut().split(samples, known, groups))
    assert LeaveOneSourceOut().get_n_splits(samples, known, groups) == len(splits) == 3
    for number, (train, test) in enumerate(splits, 1):
        assert {*groups[test]} == {number}
        assert {*groups[train]} == {-1, 1, 2, 3} - {number}
    with config_context(enable_metadata_routing=True):
        pipeline = make_pipeline(
            CORAL().set_fit_request(sample_domain=True).set_transform_request(sample_domain=True),
            OnSource(KNeighborsClassifier()).set_fit_request(sample_domain=True),
        )
        search = GridSearchCV(pipeline, {"coral__reg": [0.1, "auto"]}, cv=LeaveOneSourceOut())
        search.fit(samples, labels, groups=groups, sample_domain=groups)
    masked = GridSearchCV(
        make_pipeline(CORAL(), OnSource(KNeighborsClassifier())), {"coral__reg": [0.1, "auto"]}, cv=LeaveOneSourceOut()
    ).fit(samples, known, groups=groups)
    train, test = splits[1]
    by_hand = clone(masked.estimator).set_params(coral__reg="auto").fit(samples[train], known[train])
    assert by_hand.score(samples[test], labels[test]) == masked.cv_results_["split1_test_score"][1]
    for each in range(3):
        ours, theirs = (found.cv_results_[f"split{each}_test_score"] for found in (masked, search))
        np.testing.assert_array_equal(ours, theirs)
    for bad in (None, np.where(domain < 0, -1, 1), np.zeros(50, dtype=int)):
        with pytest.raises(ValueError, match="groups"):
            list(LeaveOneSourceOut().split(samples, known, bad))


def test_masked_labels_are_left_out_of_scores():
    """Which cross_val_score would count as a class that is never predicted."""
    samples, labels, domain = two_domains()
    known = np.where(domain < 0, -1, labels)
    pipeline = make_pipeline(CORAL(), OnSource(KNeighborsClassifier()))
    with pytest.warns(UserWarning, match=r"\d+ of 10 samples have a masked label .* cv=LeaveOneSourceOut\(\) with gr"):
        found = cross_val_score(pipeline, samples, known, error_score="raise")
    by_hand = []
    for train, test in StratifiedKFold().split(samples, known):
        fitted, test = clone(pipeline).fit(samples[train], known[train]), test[known[test] >= 0]
        by_hand.append(accuracy_score(labels[test], fitted.predict(samples[test])))
    np.testing.assert_array_equal(found, by_hand)
    assert found.mean() > 0.9  # two in five labels are masked
    search = GridSearchCV(pipeline, {"coral__reg": [0.1]}, cv=LeaveOneSourceOut(), return_train_score=True)
    with pytest.warns(UserWarning, match="masked label"):
        search.fit(samples, known, groups=np.where(domain < 0, -1, 1 + np.arange(50) % 2))
    assert min(search.cv_results_["split0_train_score"]) > 0.9


@pytest.mark.parametrize(
    ("estimator", "labels", "mask"),
    [
        (KNeighborsClassifier(), lambda y: y, -1),
        (KNeighborsClassifier(), lambda y: y * 1.0, np.nan),
        (KNeighborsClassifier(), lambda y: np.array(["no", "yes"], dtype=object)[y], None),
        (KNeighborsRegressor(), lambda y: y * 1.0, np.nan),
    ],
)
def test_scores_are_of_samples_with_a_label(estimator, labels, mask):
    samples, classes, domain = two_domains()
    y = labels(classes)
    weights = np.random.default_rng(0).random(50)
    without = np.arange(50) % 3 == 0
    some = y.copy()
    some[without] = mask
    fitted = OnSource(estimator).fit(samples, y, sample_domain=domain)
    with pytest.warns(UserWarning, match="17 of 50 samples have a masked label"):
        found = fitted.score(samples, some, sample_weight=weights)
    expected = fitted.estimator_.score(samples[~without], y[~without], sample_weight=weights[~without])
    assert found == expected
    some[:] = mask
    with pytest.raises(ValueError, match=r"y must be of some samples with a label, got masked .*LeaveOneSource"):
        fitted.score(samples, some)


def test_minus_one_of_a_source_is_no_class_and_may_be_a_number():
    samples, labels, domain = two_domains()
    classes = np.where(np.arange(50) % 5 == 0, -1, labels)
    with pytest.warns(UserWarning, match=r"\d+ samples of the source have the label -1 and are left out"):
        fitted = OnSource(KNeighborsClassifier()).fit(samples, classes, sample_domain=domain)
    assert fitted.classes_.tolist() == [0, 1]
    numbers = OnSource(Ridge()).fit(samples, classes, sample_domain=domain)
    expected = Ridge().fit(samples[domain > 0], classes[domain > 0])
    np.testing.assert_array_equal(numbers.estimator_.coef_, expected.coef_)
    assert numbers.score(samples, classes) == expected.score(samples, classes)


def test_a_label_of_minus_one_is_masked_where_it_is_no_class():
    """Also beside a single class, as in a small fold."""
    samples, labels, domain = two_domains()
    signs = 2 * labels - 1
    for y in (labels, signs):
        fitted = OnSource(KNeighborsClassifier()).fit(samples, y, sample_domain=domain)
        if y is signs:
            assert fitted.score(samples, signs) == fitted.estimator_.score(samples, signs)
            continue
        with pytest.warns(UserWarning, match="25 of 50 samples have a masked label"):
            found = fitted.score(samples, signs)
        assert found == fitted.estimator_.score(samples[labels == 1], labels[labels == 1])


BAD_PARAMETERS = [
    *(("n_components", estimator(50)) for estimator in ESTIMATORS),
    ("gamma", RTCA(2, gamma=0.0)),
    ("bandwidth", TCA(2, bandwidth=-1.0)),
    ("kernel", RFTCA(2, kernel="linear")),
    ("scaling", RTCA(2, scaling="none")),
    ("n_frequencies", RFTCA(2, n_frequencies=0)),
    ("n_components", RFTCA(5, n_frequencies=2)),
    ("random_state", RFTCA(2, random_state=None)),
    ("reg", CORAL(reg="scott")),
    ("n_components", GFK(3)),
    ("n_components", GFK("best")),
    ("n_components", JDA(50, kernel="gaussian")),
    ("gamma", JDA(2, gamma=0.0)),
    ("kernel", JDA(2, kernel="linear")),
    ("labelling", JDA(2, labelling="vote")),
    ("max_iter", JDA(2, max_iter=0)),
]


@pytest.mark.parametrize(("argument", "built"), BAD_PARAMETERS)
def test_bad_parameters_are_refused_in_fit_and_not_before(argument, built):
    samples, labels, domain = two_domains()
    with refused(argument, TypeError if argument == "random_state" else ValueError):
        built.fit(samples, labels, sample_domain=domain)


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


@every_built
def test_bad_domains_are_refused(built):
    samples, labels, _ = two_domains()
    ones, flags = np.ones(50, dtype=int), np.repeat([True, False], 25)
    for domain in (np.repeat([1, 0, -1], [30, 5, 15]), ones, -ones):
        with refused("sample_domain"):
            clone(built).fit(samples, labels, sample_domain=domain)
    for domain in (np.where(flags, 0.5, -0.5), flags, ones[:, None]):
        with refused("sample_domain", TypeError):
            clone(built).fit(samples, labels, sample_domain=domain)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        clone(built).fit(samples, labels, sample_domain=np.repeat([1, -1], 10))


def test_samples_that_mostly_coincide_need_a_bandwidth():
    samples, domain = np.zeros((50, 2)), np.repeat([1, -1], 25)
    samples[:3] = np.eye(3, 2) + 1
    with refused("bandwidth"):
        TCA(1).fit(samples, sample_domain=domain)
    assert TCA(1, bandwidth=1.0).fit(samples, sample_domain=domain).bandwidth_ == 1.0


def mixed_domains(size: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of both domains mixed; each has a covariance and a mean of its own."""
    draws = np.random.default_rng(0)
    domain = draws.permutation(np.repeat([1, -1], [2 * size // 3, size - 2 * size // 3]))
    labels = np.arange(size) % 3
    samples = draws.normal(size=(size, 6))
    samples[np.arange(size), labels] += 8
    mixing = np.eye(6) + 0.4 * draws.normal(size=(6, 6))
    return np.where(domain[:, None] > 0, samples, samples @ mixing + 1), labels, domain


@pytest.mark.parametrize("center", [False, True])
def test_coral_gives_the_source_the_targets_covariance_and_leaves_the_target(center):
    samples, _, domain = mixed_domains()
    source = domain > 0
    fitted = CORAL(reg=0.0, center=center)
    moved = fitted.fit_transform(samples, sample_domain=domain)
    np.testing.assert_array_equal(moved[~source], samples[~source])
    np.testing.assert_allclose(np.cov(moved[source].T), np.cov(samples[~source].T))
    mean = samples[~source].mean(axis=0) if center else samples[source].mean(axis=0) @ fitted.aligner_
    np.testing.assert_allclose(moved[source].mean(axis=0), mean)
    np.testing.assert_allclose(moved[source], samples[source] @ fitted.aligner_ + fitted.offset_)
    # samples without a domain are taken for the target's
    np.testing.assert_array_equal(fitted.transform(samples), samples)
    alone = fitted.transform(samples[source], sample_domain=domain[source])
    np.testing.assert_allclose(alone, moved[source])


def test_gfk_is_the_kernel_of_the_domains_principal_subspaces():
    samples, _, domain = mixed_domains()
    fitted = GFK(2)
    features = fitted.fit_transform(samples, sample_domain=domain)
    bases = (torch.tensor(PCA(2).fit(samples[mask]).components_.T) for mask in (domain > 0, domain < 0))
    kernel = geodesic_flow_kernel(*bases).numpy()
    assert features.shape == (60, 4)
    assert fitted.n_components_ == 2
    np.testing.assert_allclose(features @ features.T, samples @ kernel @ samples.T, atol=1e-9)
    # nothing disagrees between two domains that are alike: the dimension is the most that there can be
    alike = GFK("auto").fit(np.vstack([samples, samples]), sample_domain=np.repeat([1, -1], 60))
    assert alike.n_components_ == 3


def test_jda_reaches_its_function_with_labels_of_any_kind_and_none_of_the_targets():
    samples, labels, domain = mixed_domains()
    xs, xt = (torch.tensor(samples[mask]) for mask in (domain > 0, domain < 0))
    kernel = partial(laplace_kernel, bandwidth=9.0)
    expected = jda(
        xs, torch.tensor(labels[domain > 0]), xt, 3, 0.2, kernel,
        num_iterations=4, labelling="class_mean", scaling="constraint",
    )  # fmt: skip
    names = np.array(["ant", "bee", "cat"], dtype=object)[labels]
    names[domain < 0] = None  # not read
    estimator = JDA(
        3, gamma=0.2, kernel="laplace", bandwidth=9.0, scaling="constraint", labelling="class_mean", max_iter=4
    )
    components = estimator.fit_transform(samples, names, sample_domain=domain)
    np.testing.assert_allclose(components[domain > 0], expected.source, atol=1e-9)
    np.testing.assert_allclose(components[domain < 0], expected.target, atol=1e-9)
    np.testing.assert_allclose(estimator.aligner_, expected.aligner)
    np.testing.assert_allclose(estimator.eigenvalues_, expected.eigenvalues)
    assert estimator.n_iter_ == expected.num_iterations
    assert list(estimator.pseudo_labels_) == [["ant", "bee", "cat"][i] for i in expected.pseudo_labels]
    assert estimator.bandwidth_ == 9.0
    plain = JDA(3).fit(samples, labels, sample_domain=domain)  # without a kernel
    np.testing.assert_allclose(plain.transform(samples), samples @ plain.aligner_)
    assert not hasattr(plain, "bandwidth_")
    with pytest.raises(ValueError, match="requires y to be passed"):
        JDA(2).fit(samples, None, sample_domain=domain)
    with pytest.raises(ValueError, match="Unknown label type: continuous"):
        JDA(2).fit(samples, labels + 0.5, sample_domain=domain)
