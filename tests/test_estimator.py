"""The scikit-learn face: scikit-learn's own contract, its cosine neighbors as oracle, and adaptation through arrays."""

from __future__ import annotations

import json
import pickle
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.datasets import load_digits, load_wine
from sklearn.decomposition import PCA
from sklearn.exceptions import NotFittedError
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import adanpc
from adanpc.core import AdaNPC, Admission, MemoryBank, everyone, nobody
from adanpc.errors import AdaNPCError, LabelError
from adanpc.estimator import AdaNPCClassifier, AdaNPCTransformer
from adanpc.store.file import ESTIMATOR, write

Array = NDArray[Any]

SETTINGS: list[dict[str, Any]] = [
    {},
    {"storage": "int8", "capacity": 30, "evict": "fifo", "centering": "source"},
    {"storage": "float16", "capacity": 30, "evict": "balanced", "rule": "uniform"},
    {
        "capacity": 30,
        "evict": "reservoir",
        "centering": "stream",
        "admission": Admission(min_margin=0.5),
        "random_state": 3,
    },
]


@pytest.fixture(scope="module")
def digits() -> tuple[Array, Array, Array, Array]:
    """400 labeled rows and a stream of 300."""
    features, labels = load_digits(return_X_y=True)
    return features[:400], labels[:400], features[400:700], labels[400:700]


Paper = partial(AdaNPCClassifier, preset="paper")  # most of these tests are about its rule


def digest(classifier: AdaNPCClassifier) -> str:
    return classifier.model_.digest()


@pytest.mark.parametrize(
    "setting",
    [{}, {"preset": "safe"}, {"storage": "int8", "centering": "source"}, {"centering": "stream"}],
    ids=str,
)
def test_every_check_of_scikit_learn_passes(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")  # else check_array_api_input is skipped
    results = check_estimator(Paper(**setting), on_skip=None, on_fail=None)
    names = {result["check_name"] for result in results}
    assert {"check_classifiers_train", "check_array_api_input", "check_estimators_pickle"} <= names
    assert [(result["check_name"], result["exception"]) for result in results if result["status"] != "passed"] == []


class TestOracle:
    def test_neighbors_and_probabilities_are_those_of_cosine_knn(self, digits: tuple[Array, ...]) -> None:
        features, labels, queries, _ = digits
        k = 7
        ours = Paper(k, rule="uniform").fit(features, labels)
        theirs = KNeighborsClassifier(k, metric="cosine").fit(features, labels)
        distance, ids = ours.kneighbors(queries, k + 1)
        expected, expected_ids = theirs.kneighbors(queries, k + 1)
        np.testing.assert_allclose(distance, expected, atol=1e-6)
        clear = expected[:, k] - expected[:, k - 1] > 1e-6
        assert clear.mean() > 0.95
        np.testing.assert_array_equal(np.sort(ids[clear, :k]), np.sort(expected_ids[clear, :k]))
        np.testing.assert_allclose(ours.predict_proba(queries)[clear], theirs.predict_proba(queries)[clear], atol=1e-6)
        np.testing.assert_array_equal(ours.predict(queries)[clear], theirs.predict(queries)[clear])

    def test_share_is_a_softmax_over_the_neighbors(self, digits: tuple[Array, ...]) -> None:
        features, labels, queries, _ = digits
        classifier = Paper(5, temperature=0.05).fit(features, labels)
        distance, ids = classifier.kneighbors(queries)
        expected = np.zeros((len(queries), 10))
        for query in range(len(queries)):
            shares = np.exp((1 - distance[query]) / 0.05)
            for share, row in zip(shares / shares.sum(), ids[query], strict=True):
                expected[query, labels[row]] += share
        np.testing.assert_allclose(classifier.predict_proba(queries), expected, atol=1e-6)

    def test_probabilities_sum_to_one_as_log_loss_demands(self, digits: tuple[Array, ...]) -> None:
        features, labels, queries, truth = digits
        probs = Paper(30).fit(features, labels).predict_proba(queries)
        assert 0 < log_loss(truth, probs) < 1  # warns, hence fails, if they do not

    def test_ids_alone(self, digits: tuple[Array, ...]) -> None:
        features, labels, queries, _ = digits
        classifier = Paper(4).fit(features, labels)
        ids = np.asarray(classifier.kneighbors(queries, return_distance=False))
        assert ids.shape == (300, 4)
        np.testing.assert_array_equal(ids, classifier.kneighbors(queries)[1])

    @pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
    def test_a_row_is_nearest_to_itself(self, digits: tuple[Array, ...], storage: str) -> None:
        features, labels, _, _ = digits
        classifier = Paper(1, storage=storage).fit(features, labels)
        distance, ids = classifier.kneighbors(features)
        np.testing.assert_array_equal(ids[:, 0], np.arange(len(features)))
        assert distance.min() >= 0
        assert distance.max() < 1e-3


class TestRowsOfZeros:
    rows = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    labels = np.array(["right", "nothing", "up", "nothing"])

    def test_they_are_similar_to_each_other_alone(self) -> None:
        classifier = Paper(2).fit(self.rows, self.labels)
        distance, ids = classifier.kneighbors([[0.0, 0.0], [3.0, 0.0]], 4)
        np.testing.assert_array_equal(ids, [[1, 3, 0, 2], [0, 1, 2, 3]])
        np.testing.assert_array_equal(distance, [[0, 0, 1, 1], [0, 1, 1, 1]])
        assert classifier.predict([[0.0, 0.0]]) == ["nothing"]

    def test_other_similarities_stay_as_they_were(self, digits: tuple[Array, ...]) -> None:
        features, labels, queries, _ = digits
        with_zeros = np.vstack([features, np.zeros((5, 64))])
        plain = Paper(8).fit(features, labels).kneighbors(queries)
        zeros = Paper(8).fit(with_zeros, [*labels, 0, 0, 0, 0, 0]).kneighbors(queries)
        for ours, theirs in zip(zeros, plain, strict=True):
            np.testing.assert_array_equal(ours, theirs)

    @pytest.mark.parametrize("centering", ["source", "stream"])
    def test_with_centering_they_keep_a_direction_of_their_own(self, centering: str) -> None:
        rows = self.rows + np.array([5.0, 1.0])
        rows[1] = 0
        classifier = Paper(2, centering=centering).fit(rows, self.labels)
        distance, ids = classifier.kneighbors([[0.0, 0.0]], 4)
        assert ids[0, 0] == 1
        assert distance[0, 0] < 0.05
        assert distance[0, 1] > 1

    def test_they_join_too(self) -> None:
        classifier = Paper(1).fit(self.rows, self.labels)
        np.testing.assert_array_equal(classifier.adapt_predict(np.zeros((3, 2))), ["nothing"] * 3)
        assert len(classifier.model_.bank) == 7


class TestAdapting:
    def test_it_follows_a_drift_that_predict_cannot(self) -> None:
        start = np.deg2rad([0.0, 5.0, 180.0, 185.0])
        labels = np.array(["a", "a", "b", "b"])
        drift = np.deg2rad([turn + side for turn in range(0, 150, 5) for side in (0.0, 180.0)])
        truth = np.array(["a", "b"] * 30)
        classifier = Paper(2).fit(circle(start), labels)
        assert accuracy_score(truth, classifier.predict(circle(drift))) < 0.75
        assert accuracy_score(truth, classifier.adapt_predict(circle(drift))) == 1
        assert accuracy_score(truth, classifier.predict(circle(drift))) == 1

    @pytest.mark.parametrize("setting", SETTINGS, ids=str)
    def test_one_by_one_equals_one_batch(self, digits: tuple[Array, ...], setting: dict[str, Any]) -> None:
        features, labels, stream, _ = digits
        batch = Paper(**setting).fit(features, labels)
        single = clone(batch).fit(features, labels)
        answers = batch.adapt_predict(stream)
        np.testing.assert_array_equal(answers, np.concatenate([single.adapt_predict(row[None]) for row in stream]))
        assert digest(batch) == digest(single)
        assert batch.model_.bank.next_id > 450  # many joined: more than the capacity, where there is one
        assert len(batch.model_.bank) == (430 if "capacity" in setting else batch.model_.bank.next_id)
        np.testing.assert_array_equal(batch.predict_proba(stream), single.predict_proba(stream))

    def test_pure_methods_change_nothing(self, digits: tuple[Array, ...]) -> None:
        features, labels, stream, _ = digits
        classifier = Paper(centering="stream", admission=everyone).fit(features, labels)
        fitted = digest(classifier)
        classifier.predict(stream)
        classifier.predict_proba(stream)
        classifier.kneighbors(stream)
        assert digest(classifier) == fitted
        assert digest(pickle.loads(pickle.dumps(classifier))) == fitted
        classifier.adapt_predict(stream)
        assert digest(classifier) != fitted

    @pytest.mark.parametrize(("admission", "joined"), [(everyone, 300), (nobody, 0)])
    def test_admission_decides_who_joins(self, digits: tuple[Array, ...], admission: Admission, joined: int) -> None:
        features, labels, stream, _ = digits
        classifier = Paper(admission=admission).fit(features, labels)
        classifier.adapt_predict(stream)
        assert len(classifier.model_.bank) == 400 + joined

    def test_the_default_admission_asks_for_confidence(self, digits: tuple[Array, ...]) -> None:
        features, labels, stream, _ = digits
        stated = Paper(admission=Admission(min_confidence=0.9)).fit(features, labels)
        default = Paper().fit(features, labels)
        np.testing.assert_array_equal(stated.adapt_predict(stream), default.adapt_predict(stream))
        assert digest(stated) == digest(default)
        assert 400 < len(default.model_.bank) < 700

    @pytest.mark.parametrize("setting", SETTINGS, ids=str)
    def test_a_pickle_in_mid_stream_goes_on(self, digits: tuple[Array, ...], setting: dict[str, Any]) -> None:
        features, labels, stream, _ = digits
        classifier = Paper(**setting).fit(features, labels)
        classifier.adapt_predict(stream[:150])
        copy = pickle.loads(pickle.dumps(classifier))
        np.testing.assert_array_equal(copy.predict_proba(stream), classifier.predict_proba(stream))
        middle = digest(classifier)
        answers = copy.adapt_predict(stream[150:])
        assert digest(classifier) == middle  # the copy is one
        np.testing.assert_array_equal(answers, classifier.adapt_predict(stream[150:]))
        assert digest(copy) == digest(classifier) != middle


class TestPartialFit:
    def test_pieces_equal_fit_at_once(self, digits: tuple[Array, ...]) -> None:
        features, labels, queries, _ = digits
        whole, pieces = Paper().fit(features, labels), Paper()
        for start in (0, 150, 151):
            part = slice(start, {0: 150, 150: 151, 151: 400}[start])
            pieces.partial_fit(features[part], labels[part], classes=np.arange(10)[::-1] if start == 0 else None)
        np.testing.assert_array_equal(pieces.classes_, whole.classes_)
        assert digest(pieces) == digest(whole)
        np.testing.assert_array_equal(pieces.predict_proba(queries), whole.predict_proba(queries))

    def test_appends_while_fit_starts_anew(self, digits: tuple[Array, ...]) -> None:
        features, labels, queries, truth = digits
        classifier = Paper().fit(features, labels)
        fresh = digest(classifier)
        classifier.partial_fit(queries, truth).adapt_predict(features)
        assert len(classifier.model_.bank) > 700
        assert digest(classifier.fit(features, labels)) == fresh

    def test_a_class_may_have_no_row_yet(self) -> None:
        classifier = Paper(1).partial_fit([[1.0, 0.0]], ["b"], classes=["c", "a", "b"])
        np.testing.assert_array_equal(classifier.predict_proba([[0.0, 1.0]]), [[0, 1, 0]])
        classifier.partial_fit([[0.0, 1.0]], ["c"])
        assert classifier.predict([[0.1, 1.0]]) == ["c"]

    def test_refuses_what_it_cannot_name(self) -> None:
        with pytest.raises(LabelError, match="classes is missing: name all classes in the first call"):
            Paper().partial_fit([[1.0, 0.0]], ["a"])
        classifier = Paper().fit([[1.0, 0.0], [0.0, 1.0]], ["a", "b"])
        before = digest(classifier)
        with pytest.raises(LabelError, match=r"label 'q' is not among the classes \['a' 'b'\]"):
            classifier.partial_fit([[1.0, 0.0], [1.0, 1.0]], ["a", "q"])
        with pytest.raises(LabelError, match=r"classes were \['a' 'b'\] before, got \['a' 'q'\]; call fit"):
            classifier.partial_fit([[1.0, 0.0]], ["a"], classes=["a", "q"])
        with pytest.raises(ValueError, match="X has 3 features, but AdaNPCClassifier is expecting 2"):
            classifier.partial_fit([[1.0, 0.0, 0.0]], ["a"])
        assert digest(classifier) == before

    def test_a_refused_first_call_leaves_it_unfitted(self) -> None:
        classifier = Paper()
        with pytest.raises(LabelError):
            classifier.partial_fit([[1.0, 0.0]], ["q"], classes=["a", "b"])
        with pytest.raises(NotFittedError):
            classifier.predict([[1.0, 0.0]])
        assert classifier.partial_fit([[1.0, 0.0, 0.0]], ["a"], classes=["a", "b"]).n_features_in_ == 3


class TestInScikitLearn:
    def test_pipeline(self, digits: tuple[Array, ...]) -> None:
        features, labels, queries, truth = digits
        steps = StandardScaler(), PCA(16, random_state=0)
        pipeline = make_pipeline(*steps, Paper(5, rule="uniform")).fit(features, labels)
        knn = make_pipeline(*steps, KNeighborsClassifier(5, metric="cosine")).fit(features, labels)
        assert pipeline.score(queries, truth) == pytest.approx(knn.score(queries, truth), abs=0.01)
        by_hand = Paper(5, rule="uniform").fit(pipeline[:-1].transform(features), labels)
        np.testing.assert_array_equal(
            pipeline.predict_proba(queries), by_hand.predict_proba(pipeline[:-1].transform(queries))
        )

    def test_columns_of_different_units_want_a_scaler(self) -> None:
        features, labels = load_wine(return_X_y=True)
        raw = cross_val_score(Paper(), features, labels, cv=5).mean()
        scaled = cross_val_score(make_pipeline(StandardScaler(), Paper()), features, labels, cv=5).mean()
        assert scaled > 0.9 > raw

    def test_grid_search(self, digits: tuple[Array, ...]) -> None:
        features, labels, _, _ = digits
        grid = {"n_neighbors": np.array([1, 40]), "rule": ["share", "uniform"], "temperature": [0.01, 1.0]}
        search = GridSearchCV(Paper(), grid, cv=3, error_score="raise").fit(features, labels)
        scores = search.cv_results_["mean_test_score"]
        best = cross_val_score(Paper(**search.best_params_), features, labels, cv=3).mean()
        assert search.best_score_ == pytest.approx(best)
        assert len(scores) == 8
        few, many = scores[:4], scores[4:]  # n_neighbors varies slowest, then rule, then temperature
        assert len(set(few)) == 1  # a single neighbor has the whole vote
        assert (
            many[0] != many[1] != many[2] == many[3]
        )  # each argument reaches the vote, and uniform has no temperature
        assert isinstance(search.best_estimator_.model_.settings.k, int)

    def test_grid_search_over_admission_with_a_score_that_adapts(self, digits: tuple[Array, ...]) -> None:
        features, labels, _, _ = digits

        def online(classifier: AdaNPCClassifier, queries: Array, truth: Array) -> float:
            score: float = accuracy_score(truth, classifier.adapt_predict(queries))
            return score

        grid = {"admission": [nobody, everyone, Admission(min_confidence=0.8)]}
        search = GridSearchCV(Paper(3), grid, cv=3, scoring=online, error_score="raise")
        scores = search.fit(features, labels).cv_results_["mean_test_score"]
        assert scores[0] == pytest.approx(cross_val_score(Paper(3), features, labels, cv=3).mean())
        assert len(set(scores)) > 1

    def test_arguments_reach_the_bank(self) -> None:
        classifier = Paper(storage="int8", capacity=np.int64(7), evict="balanced")  # type: ignore[arg-type]
        bank = classifier.fit([[1.0, 0.0], [0.0, 1.0]], ["a", "b"]).model_.bank
        expected = {"dim": 3, "classes": ["a", "b"], "storage": "int8", "capacity": 7, "evict": "balanced"}
        assert bank.config() == {**expected, "soft": False, "seed": 0}
        assert len(bank.digest()) == 64  # NumPy's numbers are no JSON

    def test_clone_keeps_arguments_and_forgets_rows(self) -> None:
        classifier = Paper(3, admission=Admission(max_entropy=0.1), capacity=5)
        copy = clone(classifier.fit([[1.0, 0.0]], ["a"]))
        assert copy.get_params() == classifier.get_params()
        with pytest.raises(NotFittedError):
            copy.predict([[1.0, 0.0]])

    def test_data_frames(self) -> None:
        frame = pd.DataFrame({"x": [1.0, 0.0], "y": [0.0, 1.0]})
        classifier = Paper(1).fit(frame, pd.Series(["a", "b"]))
        np.testing.assert_array_equal(classifier.feature_names_in_, ["x", "y"])
        np.testing.assert_array_equal(classifier.adapt_predict(frame), ["a", "b"])
        with pytest.raises(ValueError, match="feature names should match"):
            classifier.adapt_predict(frame[["y", "x"]])

    def test_dtypes_agree_and_inputs_stay_untouched(self, digits: tuple[Array, ...]) -> None:
        features, labels, stream, _ = digits
        banks = set()
        for dtype in (np.float64, np.float32, np.int16):
            rows, queries = features.astype(dtype), stream.astype(dtype)
            rows.flags.writeable = queries.flags.writeable = False
            classifier = Paper().fit(rows, labels)
            classifier.adapt_predict(queries)
            banks.add(digest(classifier))
        assert len(banks) == 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ({"n_neighbors": 0}, "n_neighbors must be at least 1, got 0"),
            ({"n_neighbors": 2.5}, "n_neighbors must be a whole number, got 2.5"),
            ({"n_neighbors": "3"}, "n_neighbors must be a whole number, got '3'"),
            ({"n_neighbors": True}, "n_neighbors must be a whole number, got True"),
            ({"rule": "median"}, "rule must be one of share, .*, got 'median'"),
            ({"temperature": 0}, "temperature must be a finite number greater than 0, got 0"),
            ({"temperature": "hot"}, "temperature must be a finite number greater than 0, got 'hot'"),
            ({"admission": 0.9}, r"admission must be an Admission such as Admission\(min_confidence=0.9\), got 0.9"),
            ({"storage": "int4"}, "storage must be one of float32, .*, got 'int4'"),
            ({"capacity": 0}, "capacity must be at least 1, got 0"),
            ({"capacity": inf}, "capacity must be a whole number, got inf"),
            ({"evict": "worst"}, "evict must be one of fifo, .*, got 'worst'"),
            ({"centering": "median"}, "centering must be one of none, .*, got 'median'"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_bad_arguments_are_named_at_fit(self, setting: dict[str, Any], message: str) -> None:
        classifier = Paper(**setting)
        with pytest.raises(AdaNPCError, match=message):
            classifier.fit([[1.0, 0.0], [0.0, 1.0]], ["a", "b"])
        with pytest.raises(NotFittedError):
            classifier.predict([[1.0, 0.0]])

    def test_kneighbors_of_more_rows_than_there_are(self) -> None:
        classifier = Paper(1).fit([[1.0, 0.0], [0.0, 1.0]], ["a", "b"])
        with pytest.raises(AdaNPCError, match="n_neighbors must be at most 2, the rows held, got 3"):
            classifier.kneighbors([[1.0, 0.0]], 3)
        with pytest.raises(AdaNPCError, match="n_neighbors must be at least 1, got 0"):
            classifier.kneighbors([[1.0, 0.0]], 0)

    @pytest.mark.parametrize("method", ["predict", "predict_proba", "adapt_predict", "kneighbors"])
    def test_unusable_queries(self, method: str) -> None:
        ask = getattr(Paper(1), method)
        with pytest.raises(NotFittedError):
            ask([[1.0, 0.0]])
        ask = getattr(Paper(1).fit([[1.0, 0.0], [0.0, 1.0]], ["a", "b"]), method)
        for flaw, error in (
            ([[np.nan, 1.0]], ValueError),
            ([[1.0]], ValueError),
            (csr_array([[np.inf, 0.0]]), ValueError),
        ):
            with pytest.raises(error):
                ask(flaw)


def circle(angles: Array) -> Array:
    """Points (n, 2) of the unit circle."""
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


TEXTS = ["red apple", "green apple", "ripe apple tree", "fast car", "red car engine", "car on a road", "old road"]
KINDS = np.array(["fruit", "fruit", "fruit", "car", "car", "car", "car"])


class TestSparse:
    def test_sparse_rows_are_answered_as_dense_ones(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("adanpc.estimator.CHUNK_BYTES", 100)  # several parts
        rows = TfidfVectorizer().fit_transform(TEXTS)
        for setting in SETTINGS:
            sparse = Paper(3, **setting).fit(rows, KINDS)
            dense = Paper(3, **setting).fit(rows.toarray(), KINDS)
            assert digest(sparse) == digest(dense)
            np.testing.assert_array_equal(sparse.predict_proba(rows), dense.predict_proba(rows.toarray()))
            np.testing.assert_array_equal(sparse.kneighbors(rows, 2), dense.kneighbors(rows.toarray(), 2))
            np.testing.assert_array_equal(sparse.adapt_predict(rows), dense.adapt_predict(rows.toarray()))
            assert digest(sparse) == digest(dense)

    def test_queries_are_made_dense_part_by_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = csr_array(np.eye(50, dtype=np.float32))
        classifier = Paper(1).fit(rows, np.arange(50) % 2)
        monkeypatch.setattr("adanpc.estimator.CHUNK_BYTES", 10 * 4 * 51)
        parts = [len(part) for part in classifier._queries(rows)]
        assert parts == [10] * 5


class TestPipeline:
    def test_a_pipeline_adapts(self) -> None:
        pipeline = make_pipeline(TfidfVectorizer(), Paper(1, admission=everyone)).fit(TEXTS, KINDS)
        answers = adanpc.adapt_predict(pipeline, ["green apple juice", "a fast engine"])
        assert answers.tolist() == ["fruit", "car"]
        assert len(pipeline[-1].model_.bank) == len(TEXTS) + 2
        np.testing.assert_array_equal(pipeline.predict(TEXTS), KINDS)

    def test_an_estimator_alone_or_in_a_pipeline_of_its_own(self) -> None:
        for made in (Paper(1), make_pipeline(Paper(1))):
            made.fit([[1.0, 0.0], [0.0, 1.0]], ["a", "b"])
            assert adanpc.adapt_predict(made, [[0.9, 0.1]]).tolist() == ["a"]

    def test_another_end_is_refused(self) -> None:
        for made in (make_pipeline(PCA(1)), PCA(1)):
            with pytest.raises(AdaNPCError, match="ends in an AdaNPCClassifier, got PCA"):
                adanpc.adapt_predict(made, [[1.0]])

    def test_a_search_names_its_best_estimator(self) -> None:
        rows = [[1.0, 0.0], [0.0, 1.0]] * 2
        search = GridSearchCV(Paper(1), {"rule": ["share"]}, cv=2).fit(rows, [0, 1] * 2)
        with pytest.raises(AdaNPCError, match=r"got GridSearchCV: pass search\.best_estimator_"):
            adanpc.adapt_predict(search, rows)


class TestFiles:
    @pytest.mark.parametrize(
        "labels",
        [
            np.array(["dog", "größer", "a"]),
            np.array([7, -3, 5], dtype=np.int32),
            np.array([1.0, 2.0, 4.0]),
            np.array([True, False, True]),
            np.array(["x", "y", "z"], dtype=object),
        ],
        ids=lambda labels: str(labels.dtype),
    )
    @pytest.mark.parametrize("setting", SETTINGS, ids=str)
    def test_it_comes_back_as_it_was(self, tmp_path: Path, labels: Array, setting: dict[str, Any]) -> None:
        torch.manual_seed(0)
        rows = torch.randn(3, 4).numpy()
        stream = torch.randn(20, 4).numpy()
        count: Any = np.int64(2)
        classifier = Paper(count, **setting).fit(rows, labels)
        classifier.adapt_predict(stream[:10])
        classifier.save(tmp_path / "bank")
        loaded = AdaNPCClassifier.load(tmp_path / "bank")
        assert loaded.get_params() == classifier.get_params()
        assert loaded.classes_.dtype == classifier.classes_.dtype
        assert loaded.n_features_in_ == 4
        np.testing.assert_array_equal(loaded.classes_, classifier.classes_)
        np.testing.assert_array_equal(loaded.adapt_predict(stream[10:]), classifier.adapt_predict(stream[10:]))
        assert digest(loaded) == digest(classifier)
        assert loaded.model_.bank.names == tuple(map(str, classifier.classes_.tolist()))

    def test_columns_of_a_table_come_back(self, tmp_path: Path) -> None:
        table = pd.DataFrame({"width": [1.0, 0.0], "height": [0.0, 1.0]})
        Paper(1).fit(table, ["a", "b"]).save(tmp_path / "bank")
        loaded = AdaNPCClassifier.load(tmp_path / "bank")
        assert loaded.predict(table).tolist() == ["a", "b"]
        with pytest.raises(ValueError, match="feature names"):
            loaded.predict(table[["height", "width"]])

    def test_save_of_the_library_names_the_remedy(self, tmp_path: Path) -> None:
        classifier = Paper(1).fit([[1.0, 0.0]], ["a"])
        with pytest.raises(AdaNPCError, match="got AdaNPCClassifier; use its own method, save"):
            adanpc.save(classifier, tmp_path / "bank")

    def test_load_of_the_library_names_the_remedy(self, tmp_path: Path) -> None:
        Paper(1).fit([[1.0, 0.0]], ["a"]).save(tmp_path / "bank")
        with pytest.raises(AdaNPCError, match=r"it holds an estimator; use AdaNPCClassifier\.load\(path\)"):
            adanpc.load(tmp_path / "bank")

    def test_what_is_not_fitted_is_not_saved(self, tmp_path: Path) -> None:
        with pytest.raises(NotFittedError):
            Paper().save(tmp_path / "bank")

    def test_classes_that_no_file_can_hold(self, tmp_path: Path) -> None:
        days = np.array(["2020-01-01", "2020-01-02"], dtype="datetime64[D]")
        classifier = Paper(1).fit([[1.0, 0.0], [0.0, 1.0]], ["a", "b"])
        classifier.classes_ = days
        with pytest.raises(AdaNPCError, match="its classes must be strings or numbers"):
            classifier.save(tmp_path / "bank")

    def test_a_bank_without_an_estimator_is_refused(self, tmp_path: Path) -> None:
        adanpc.save(adanpc.AdaNPC(adanpc.MemoryBank(2, 2)), tmp_path / "bank")
        with pytest.raises(AdaNPCError, match="it does not hold an estimator; use adanpc.load"):
            AdaNPCClassifier.load(tmp_path / "bank")

    @pytest.mark.parametrize(
        "forged",
        [
            {"classes": ["b", "a"]},
            {"classes": ["a"]},
            {"classes": {"a": 1}},
            {"classes": [["a"], ["b"]]},
            {"kind": "U999999999"},
            {"kind": "M8"},
            {"kind": 3},
            {"columns": ["one"]},
            {"columns": [1, 2]},
            {"arguments": {"n_neighbors": 0, "admission": False}},
            {"arguments": {"unknown": 1, "admission": False}},
            {"arguments": []},
            {"arguments": {}},
        ],
        ids=str,
    )
    def test_nothing_in_a_file_is_believed(self, tmp_path: Path, forged: dict[str, Any]) -> None:
        classifier = Paper(1).fit([[1.0, 0.0], [0.0, 1.0]], ["a", "b"])
        description = {
            "arguments": {"n_neighbors": 1, "admission": False},
            "classes": ["a", "b"],
            "columns": None,
            "kind": "U",
        }
        recipe = {"layer": ESTIMATOR, "weights": "", "preprocessing": json.dumps(description)}
        write(classifier.model_, recipe, tmp_path / "bank")
        assert AdaNPCClassifier.load(tmp_path / "bank").predict([[1.0, 0.0]]) == ["a"]
        write(classifier.model_, {**recipe, "preprocessing": json.dumps({**description, **forged})}, tmp_path / "bank")
        with pytest.raises(AdaNPCError, match="its description of the estimator is not valid"):
            AdaNPCClassifier.load(tmp_path / "bank")

    @pytest.mark.parametrize("text", ["", "[]", "{", "{}", "[" * 100_000])
    def test_a_description_that_is_none(self, tmp_path: Path, text: str) -> None:
        classifier = Paper(1).fit([[1.0, 0.0], [0.0, 1.0]], ["a", "b"])
        write(classifier.model_, {"layer": ESTIMATOR, "weights": "", "preprocessing": text}, tmp_path / "bank")
        with pytest.raises(AdaNPCError, match="its description of the estimator is not valid"):
            AdaNPCClassifier.load(tmp_path / "bank")


def test_one_hot_labels_are_refused_with_the_remedy() -> None:
    with pytest.raises(LabelError, match=r"got shape \(2, 2\): pass y.argmax\(1\) if it is one-hot"):
        Paper(1).fit([[1.0, 0.0], [0.0, 1.0]], np.eye(2))
    with pytest.raises(LabelError, match=r"got shape \(2, 2\): pass y.argmax\(1\) if it is one-hot"):
        Paper(1).fit([[1.0, 0.0], [0.0, 1.0]], [[1, 0], [0, 1]])


class TestSafe:
    """The default preset."""

    def test_it_is_the_default_and_adapts(self, digits: tuple[Array, ...]) -> None:
        features, labels, queries, truth = digits
        darker = 0.5 * queries + 8 * (np.arange(64) % 3 == 0)
        classifier = AdaNPCClassifier().fit(features, labels)
        frozen = (classifier.predict(darker) == truth).mean()
        adapted = (classifier.adapt_predict(darker) == truth).mean()
        assert classifier.model_.preset == "safe"
        assert adapted > frozen + 0.05

    def test_one_by_one_equals_one_batch(self, digits: tuple[Array, ...]) -> None:
        features, labels, queries, _ = digits
        batch = AdaNPCClassifier(capacity=20).fit(features, labels)
        single = AdaNPCClassifier(capacity=20).fit(features, labels)
        answers = batch.adapt_predict(queries[:60])
        assert answers.tolist() == [single.adapt_predict(row[None])[0] for row in queries[:60]]
        assert digest(batch) == digest(single)

    def test_domains_are_centered_by_themselves(self, digits: tuple[Array, ...]) -> None:
        features, labels, _, _ = digits
        brighter = features + 30 * (np.arange(64) < 20)
        both = np.concatenate([features, brighter])
        names = np.array(["dark"] * 400 + ["bright"] * 400)
        told = AdaNPCClassifier().fit(both, np.tile(labels, 2), domains=names)
        untold = AdaNPCClassifier().fit(both, np.tile(labels, 2))
        assert told.model_.bank.table("domain")["domain"].unique().tolist() == [0, 1]
        centers = []
        for classifier in (told, untold):
            bank = classifier.model_.bank
            centers.append(bank.rows(torch.arange(400)).mean(0).norm())
        assert centers[0] < 0.5 * centers[1]
        with pytest.raises(LabelError, match=r"domains must have shape \(800,\), one for each row, got \(400,\)"):
            AdaNPCClassifier().fit(both, np.tile(labels, 2), domains=names[:400])

    @pytest.mark.parametrize("missing", [["dark", None], [1.0, float("nan")], [None, None], [pd.NaT, pd.NaT]])
    def test_a_domain_that_is_missing_is_refused(self, missing: list[Any]) -> None:
        with pytest.raises(LabelError, match="domains must be names or numbers, none of them missing, got "):
            AdaNPCClassifier().fit([[1.0, 0.0], [0.0, 1.0]], [0, 1], domains=missing)

    def test_people_can_be_asked(self, digits: tuple[Array, ...]) -> None:
        features, labels, queries, truth = digits
        names = np.array([f"digit {label}" for label in labels])
        darker = 0.5 * queries + 8 * (np.arange(64) % 3 == 0)
        classifier = AdaNPCClassifier().fit(features, names)
        classifier.adapt_predict(darker)
        asked = classifier.model_.ask(classifier.as_features(darker))
        assert len(asked) == 10
        adapted_right = 0
        frozen_right = 0
        for question in asked:
            label = np.searchsorted(classifier.classes_, f"digit {truth[question.query]}")
            adapted_right += int(question.adapted == label)
            frozen_right += int(question.frozen == label)
            classifier.model_.apply(question.answered(int(label)))
        signs = classifier.model_.signs()
        assert (signs.adapted_right, signs.frozen_right) == (adapted_right, frozen_right)
        assert adapted_right + frozen_right
        with pytest.raises(NotFittedError):
            AdaNPCClassifier().as_features(darker)

    def test_arguments_of_the_other_preset_are_refused(self) -> None:
        rows = [[1.0, 0.0], [0.0, 1.0]]
        with pytest.raises(AdaNPCError, match="n_neighbors=5 has no effect with preset='safe': pass preset='paper'"):
            AdaNPCClassifier(5).fit(rows, [0, 1])
        with pytest.raises(AdaNPCError, match="stream='mixed' has no effect with preset='paper': pass preset='safe'"):
            AdaNPCClassifier(preset="paper", stream="mixed").fit(rows, [0, 1])

    def test_a_row_is_nearest_to_itself(self, digits: tuple[Array, ...]) -> None:
        features, labels, _, _ = digits
        distances, ids = AdaNPCClassifier().fit(features, labels).kneighbors(features[:20], 2)
        assert ids[:, 0].tolist() == list(range(20))
        assert distances[:, 0] == pytest.approx(0, abs=1e-6)

    def test_it_comes_back_from_a_file(self, digits: tuple[Array, ...], tmp_path: Path) -> None:
        features, labels, queries, _ = digits
        classifier = AdaNPCClassifier(stream="mixed").fit(features, labels)
        classifier.adapt_predict(queries[:50])
        classifier.save(tmp_path / "bank")
        loaded = AdaNPCClassifier.load(tmp_path / "bank")
        assert digest(loaded) == digest(classifier)
        assert loaded.get_params() == classifier.get_params()
        assert loaded.adapt_predict(queries[50:]).tolist() == classifier.adapt_predict(queries[50:]).tolist()
        assert digest(loaded) == digest(classifier)


def test_the_transformer_keeps_scikit_learns_contract() -> None:
    results = check_estimator(AdaNPCTransformer(), on_skip=None, on_fail=None)
    failed = [result for result in results if result["status"] == "failed"]
    assert not failed


def test_the_transformer_names_its_columns() -> None:
    X, y = load_wine(return_X_y=True, as_frame=True)
    transformed = AdaNPCTransformer().set_output(transform="pandas").fit_transform(X, y)
    assert transformed.columns.tolist() == [f"adanpctransformer{number}" for number in range(13)]


def test_the_transformer_is_the_transform_of_the_classifier() -> None:
    X, y = load_digits(return_X_y=True)
    domains = np.arange(len(X)) % 2
    transformer = AdaNPCTransformer().fit(X[:1000] + 1, y[:1000], domains=domains[:1000])
    rows = transformer.transform(X[1000:] + 1)
    classifier = AdaNPC(MemoryBank(64, 10, soft=True), preset="safe")
    classifier.learn(
        torch.from_numpy(X[:1000] + 1), torch.from_numpy(y[:1000]), domain=torch.from_numpy(domains[:1000])
    )
    expected = classifier.frozen_queries(torch.from_numpy(X[1000:] + 1))
    assert np.array_equal(rows, expected.numpy())
    cosine = KNeighborsClassifier(metric="cosine")
    plain = cosine.fit(X[:1000], y[:1000]).score(X[1000:], y[1000:])
    assert make_pipeline(AdaNPCTransformer(), cosine).fit(X[:1000], y[:1000]).score(X[1000:], y[1000:]) >= plain - 0.01
