"""AdaNPCClassifier and AdaNPCTransformer: the method as scikit-learn estimators, for arrays instead of tensors."""
# ruff: noqa: N803 - scikit-learn calls the features X

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from inspect import signature
from reprlib import repr as brief
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.pipeline import Pipeline
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from adanpc import require
from adanpc.core import AdaNPC, Admission, MemoryBank
from adanpc.core.codec import canonical
from adanpc.core.paper import DEFAULT_ADMISSION, PaperSettings
from adanpc.core.transform import fit as fit_transform_of
from adanpc.core.tryout import suitable_parts
from adanpc.errors import AdaNPCError, LabelError
from adanpc.store import BankFileError
from adanpc.store.file import ESTIMATOR, read, write

KINDS = r"[UO]|[<>|][biuf][1248]"  # the NumPy types of classes that a file may hold
CHUNK_BYTES = 1 << 26  # about how many bytes of a sparse matrix are made dense at once
PAPER_ARGUMENTS = ("n_neighbors", "rule", "temperature", "admission", "centering")
TINY = np.finfo(np.float32).tiny


@require.names_its_arguments
class AdaNPCClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A nearest-neighbor classifier by cosine similarity that can learn from its own answers.

    ``predict`` changes nothing, so scores, searches and pipelines see the classifier as it was fitted;
    ``adapt_predict`` learns as it answers. Arguments are checked and take effect at the next ``fit``.

    Only the direction of a row counts. That suits embeddings; columns with different units need a StandardScaler
    in front. A row of zeros has no direction, so it gets one of its own: its similarity is 0 to all other rows, as in
    scikit-learn's cosine distance, and 1 to rows of zeros. No other similarity is affected.

    Features may be sparse, as TF-IDF makes them. The bank is dense nevertheless, and needs 4 bytes for each feature of
    each row (2 with ``storage="float16"``); for a large vocabulary, put a TruncatedSVD in front.

    Args:
        n_neighbors: how many rows vote with ``preset="paper"``; all of them while there are fewer.
        preset: how the classifier learns, ``safe`` or ``paper``; see ``AdaNPC``.
        stream: with ``preset="safe"``, what is known about the order in which classes arrive; see ``SafeSettings``.
        rule, temperature: with ``preset="paper"``, the vote rule; see ``adanpc.core.vote``.
        admission: with ``preset="paper"``, which answers join in ``adapt_predict``; None for
            ``Admission(min_confidence=0.9)``.
        storage, capacity, evict: see ``MemoryBank``.
        centering: with ``preset="paper"``: ``none``, ``source`` or ``stream``; see ``Centering``. The first call of
            ``partial_fit`` sets the source mean. For ``stream``, each call counts as a source domain of its own.
        random_state: decides which rows stay with ``evict="reservoir"``; with None, each ``fit`` draws a new one.

    Attributes:
        classes_: (C,) the labels, sorted.
        n_features_in_: the number of features.
        model_: the ``AdaNPC`` behind it. Its rows have one coordinate more, for the direction of rows of zeros.
    """

    classes_: NDArray[Any]
    n_features_in_: int
    model_: AdaNPC

    def __init__(
        self,
        n_neighbors: int = 10,
        *,
        preset: str = "safe",
        stream: str = "unknown",
        rule: str = "share",
        temperature: float = 0.1,
        admission: Admission | None = None,
        storage: str = "float32",
        capacity: int | None = None,
        evict: str = "fifo",
        centering: str = "none",
        random_state: int | None = None,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.preset = preset
        self.stream = stream
        self.rule = rule
        self.temperature = temperature
        self.admission = admission
        self.storage = storage
        self.capacity = capacity
        self.evict = evict
        self.centering = centering
        self.random_state = random_state

    def fit(self, X: Any, y: ArrayLike, domains: ArrayLike | None = None) -> Self:
        """Fills the bank with the labeled rows of X and nothing else, and returns the estimator.

        Args:
            X: (n, D) the features, dense or sparse.
            y: (n,) their labels.
            domains: (n,) names or numbers of the conditions under which rows were drawn: a camera, a hospital, a
                style. The rows of each domain are centered separately. By default all rows are of one domain.
        """
        self._build(1, 1)  # raises an error for bad arguments before anything changes
        rows, given = self._labeled(X, y, first=True)
        classes = np.unique(given)
        model = self._build(rows.shape[1] + 1, _names(classes))
        labels = torch.from_numpy(np.searchsorted(classes, given))
        domain_of_row = _domains(domains, len(labels))
        model.learn_in_pieces(_DenseParts(rows), labels, domain=domain_of_row)
        return self._take(model, classes)

    def partial_fit(self, X: Any, y: ArrayLike, classes: ArrayLike | None = None) -> Self:
        """Adds the labeled rows X (n, D), and returns the estimator; the first call must name all ``classes``.

        With ``preset="safe"``, the transform is fitted to the rows of the first call and stays as it is. So the first
        call should bring the rows of several classes, if there are any.
        """
        first = not self.__sklearn_is_fitted__()
        if first and classes is None:
            raise LabelError("classes is missing: name all classes in the first call to partial_fit, or call fit first")
        rows, given = self._labeled(X, y, first=first)
        named = self.classes_ if classes is None else np.unique(np.asarray(classes))
        if not first and not np.array_equal(named, self.classes_):
            raise LabelError(f"classes were {self.classes_} before, got {named}; call fit to start over")
        unknown = np.setdiff1d(given, named)
        if len(unknown):
            raise LabelError(
                f"label {unknown.tolist()[0]!r} is not among the classes {named}; name all classes at the start"
            )
        model = self._build(rows.shape[1] + 1, _names(named)) if first else self.model_
        labels = torch.from_numpy(np.searchsorted(named, given))
        model.learn(_dense(rows), labels)
        return self._take(model, named)

    def predict(self, X: Any) -> NDArray[Any]:
        """The label of each row of X (B, D), ties to the first class; changes nothing."""
        labels = [self.model_.predict(part).labels for part in self._queries(X)]
        return self._named(labels)

    def predict_proba(self, X: Any) -> NDArray[np.float32]:
        """The probabilities of ``classes_`` for each row of X, (B, C); changes nothing."""
        probs = [self.model_.predict(part).probs for part in self._queries(X)]
        return torch.cat(probs).numpy()

    def adapt_predict(self, X: Any) -> NDArray[Any]:
        """The label of each row of X (B, D), answered in this order while the classifier learns from each of them.

        The answers do not depend on how X is split into calls. A Pipeline does not pass this method on; see
        ``adanpc.adapt_predict``.
        """
        labels = [self.model_.step(part).labels for part in self._queries(X)]
        return self._named(labels)

    def kneighbors(
        self, X: Any, n_neighbors: int | None = None, return_distance: bool = True
    ) -> NDArray[np.int64] | tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The cosine distances and ids of the nearest rows, both (B, K), nearest first; or the ids alone.

        Ids count rows in the order of their arrival from 0, so the first ids are the rows of X in ``fit``.
        """
        parts = self._queries(X)
        if n_neighbors is None:
            n_neighbors = self.n_neighbors
        count = require.whole("n_neighbors", n_neighbors, least=1)
        if count > len(self.model_.bank):
            raise AdaNPCError(f"n_neighbors must be at most {len(self.model_.bank)}, the rows held, got {count}")
        contents = self.model_.bank.contents
        distances = []
        ids = []
        for queries in parts:
            near = contents.search(self.model_.frozen_queries(queries), count, None, None)
            # Rounding may make a stored row slightly longer than one, and a similarity slightly larger than 1.
            distances.append((1 - near.similarity).clamp(min=0))
            ids.append(near.ids)
        rows: NDArray[np.int64] = torch.cat(ids).numpy()
        if not return_distance:
            return rows
        return torch.cat(distances).numpy(), rows

    def as_features(self, X: Any) -> Tensor:
        """The rows of X (B, D) as ``model_`` takes them, (B, D + 1), for what only ``model_`` can do.

        After some queries of a stream, for example, ask people about the most telling ones, and take in what they say::

            estimator.adapt_predict(X)
            for question in estimator.model_.ask(estimator.as_features(X)):
                label = numpy.searchsorted(estimator.classes_, right_answer(question.query))
                estimator.model_.apply(question.answered(int(label)))
        """
        return torch.cat(list(self._queries(X)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted estimator, with its classes and arguments, to a file like those of ``adanpc.save``."""
        check_is_fitted(self)
        arguments = {name: _plain(value) for name, value in self.get_params(deep=False).items()}
        arguments["admission"] = self.admission is not None  # the admission itself is in the bank's part of the file
        columns = getattr(self, "feature_names_in_", None)
        if columns is not None:
            columns = columns.tolist()
        kind: str = self.classes_.dtype.kind
        if kind not in "UO":
            kind = self.classes_.dtype.str
        description = {"arguments": arguments, "classes": self.classes_.tolist(), "columns": columns, "kind": kind}
        try:
            text = canonical(description)
        except (TypeError, ValueError) as error:
            raise BankFileError(f"{path} was not saved: its classes must be strings or numbers: {error}") from None
        # The file has no field for an estimator's parameters; that for a description of the inputs holds them.
        write(self.model_, {"layer": ESTIMATOR, "preprocessing": text, "weights": ""}, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The estimator that ``save`` wrote, which continues exactly where it stopped; no code in the file is run."""
        model, recipe = read(path)
        if recipe.get("layer") != ESTIMATOR:
            raise BankFileError(f"{path} was not loaded: it does not hold an estimator; use adanpc.load")
        try:
            return cls._described(json.loads(recipe["preprocessing"]), model)
        except (AdaNPCError, AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise BankFileError(
                f"{path} was not loaded: its description of the estimator is not valid ({error}); use another copy"
            ) from error

    @classmethod
    def _described(cls, description: dict[str, Any], model: AdaNPC) -> Self:
        """The estimator with this model that a file describes; everything in the description is checked."""
        arguments = description["arguments"]
        arguments.setdefault("preset", model.preset)
        if arguments["admission"]:
            if not isinstance(model.settings, PaperSettings):
                raise AdaNPCError(f"the preset {model.preset!r} has no admission")
            arguments["admission"] = model.settings.admission
        else:
            arguments["admission"] = None
        estimator = cls(**arguments)
        estimator._build(1, 1)  # raises an error for bad arguments
        kind = description["kind"]
        if not re.fullmatch(KINDS, kind):
            raise AdaNPCError(f"there are no classes of kind {kind!r}")
        classes = np.array(description["classes"], dtype=kind)
        if classes.shape != (model.bank.classes,) or not np.array_equal(np.unique(classes), classes):
            raise AdaNPCError("its classes are not those of the bank")
        estimator.n_features_in_ = model.bank.dim - 1
        if description["columns"] is not None:
            columns = np.array(description["columns"], dtype=object)
            if columns.shape != (estimator.n_features_in_,) or not all(isinstance(name, str) for name in columns):
                raise AdaNPCError("its columns are not those of the bank")
            estimator.feature_names_in_ = columns
        return estimator._take(model, classes)

    def __sklearn_is_fitted__(self) -> bool:
        # scikit-learn would look for any attribute such as n_features_in_, which a failed fit may leave behind.
        return hasattr(self, "model_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _build(self, dim: int, classes: int | Sequence[str]) -> AdaNPC:
        """An empty classifier with these arguments; raises an AdaNPCError that names an invalid one."""
        k = require.whole("n_neighbors", self.n_neighbors, least=1)
        admission = self.admission
        if admission is None:
            admission = DEFAULT_ADMISSION
        bank = MemoryBank(
            dim,
            classes,
            storage=self.storage,
            capacity=self.capacity,
            evict=self.evict,
            soft=self.preset == "safe",
            seed=self.random_state,
        )
        if self.preset == "safe":
            self._check_defaults(PAPER_ARGUMENTS, "paper")
            return AdaNPC(bank, preset="safe", stream=self.stream)
        self._check_defaults(("stream",), "safe")
        return AdaNPC(
            bank,
            preset=self.preset,
            k=k,
            rule=self.rule,
            temperature=self.temperature,
            admission=admission,
            centering=self.centering,
        )

    def _check_defaults(self, names: Sequence[str], preset: str) -> None:
        """Raises an error for arguments of another preset that differ from their defaults, as they have no effect."""
        defaults = signature(type(self)).parameters
        for name in names:
            given = getattr(self, name)
            if given != defaults[name].default:
                raise AdaNPCError(f"{name}={given!r} has no effect with preset={self.preset!r}: pass preset={preset!r}")

    def _take(self, model: AdaNPC, classes: NDArray[Any]) -> Self:
        """Makes this the fitted model, and returns the estimator."""
        self.model_ = model
        self.classes_ = classes
        return self

    def _labeled(self, X: Any, y: ArrayLike, *, first: bool) -> tuple[Any, NDArray[Any]]:
        """The checked features (n, D), dense or sparse, and their labels (n,).

        Args:
            X: the features.
            y: their labels.
            first: whether they decide how many features there are.
        """
        shape: tuple[int, ...] = getattr(y, "shape", ())
        if isinstance(y, list) and y and isinstance(y[0], list | tuple):
            shape = (len(y), len(y[0]))
        if len(shape) == 2 and shape[1] > 1:
            raise LabelError(f"y must be one label for each row, got shape {shape}: pass y.argmax(1) if it is one-hot")
        features, given = validate_data(self, X, y, dtype=np.float32, accept_sparse="csr", reset=first)
        check_classification_targets(given)
        return features, given

    def _queries(self, X: Any) -> Iterator[Tensor]:
        """The rows of X as dense parts of a moderate size."""
        check_is_fitted(self)
        features = validate_data(self, X, dtype=np.float32, accept_sparse="csr", reset=False)
        return _dense_parts(features)

    def _named(self, labels: list[Tensor]) -> NDArray[Any]:
        """The classes that these numbers stand for."""
        named: NDArray[Any] = self.classes_[torch.cat(labels).numpy()]
        return named


class AdaNPCTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """The feature transform of the preset "safe" alone, to put in front of any classifier; see ``core.transform``.

    It reduces differences between samples of one class and amplifies differences between classes. The result is meant
    to be compared by cosine similarity.
    """

    def fit(self, X: Any, y: ArrayLike, domains: ArrayLike | None = None) -> Self:
        """Fits the transform to labeled rows, and returns the transformer.

        Args:
            X: (n, D) the features.
            y: (n,) their labels.
            domains: (n,) the condition under which each row was drawn, as in ``AdaNPCClassifier.fit``.
        """
        rows, given = validate_data(self, X, y, dtype=np.float32, order="C")
        check_classification_targets(given)
        classes, label_of_row = np.unique(given, return_inverse=True)
        features = torch.from_numpy(rows)
        labels = torch.from_numpy(label_of_row)
        domain_of_row = _domains(domains, len(labels))
        parts = suitable_parts(features, labels, domain_of_row, len(classes))
        self.transform_ = fit_transform_of(features, labels, domain_of_row, len(classes), parts)
        self._n_features_out = rows.shape[1]
        return self

    def transform(self, X: Any) -> NDArray[np.float32]:
        """The rows of X, transformed and with the mean of the source's domains subtracted, (n, D)."""
        check_is_fitted(self)
        rows = validate_data(self, X, dtype=np.float32, order="C", reset=False)
        transformed = self.transform_(torch.from_numpy(rows))
        centered = self.transform_.still(transformed)
        return centered.float().numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags


@require.names_its_arguments
def adapt_predict(pipeline: Any, X: Any) -> NDArray[Any]:
    """The answers of a fitted pipeline that ends in an AdaNPCClassifier, which learns as it answers.

    The other steps transform X as in ``predict``; then the last one answers by its ``adapt_predict``, a method that a
    Pipeline itself does not pass on. After a search, give ``search.best_estimator_``.

    Args:
        pipeline: a fitted Pipeline, or an AdaNPCClassifier alone.
        X: what the first step takes.
    """
    last = pipeline
    if isinstance(pipeline, Pipeline):
        last = pipeline[-1]
    if not isinstance(last, AdaNPCClassifier):
        remedy = ""
        if hasattr(last, "best_estimator_"):
            remedy = ": pass search.best_estimator_"
        kind = type(last).__name__
        raise AdaNPCError(f"pipeline must be a Pipeline that ends in an AdaNPCClassifier, got {kind}{remedy}")
    if isinstance(pipeline, Pipeline) and len(pipeline) > 1:
        return last.adapt_predict(pipeline[:-1].transform(X))
    return last.adapt_predict(X)


def _domains(given: ArrayLike | None, count: int) -> Tensor:
    """The number of each row's domain (n,); -1, which means unknown, if none are given."""
    if given is None:
        return torch.full((count,), -1)
    domains = np.asarray(given)
    if domains.shape != (count,):
        raise LabelError(f"domains must have shape ({count},), one for each row, got {domains.shape}")
    known = domains == domains  # false for NaN and its relatives
    try:
        _, numbers = np.unique(domains, return_inverse=True)
    except TypeError:  # numbers beside names, or None
        known = np.array(False)
    if not known.all() or None in domains:
        raise LabelError(f"domains must be names or numbers, none of them missing, got {brief(domains.tolist())}")
    return torch.from_numpy(numbers)


def _names(classes: NDArray[Any]) -> int | list[str]:
    """The names of the classes for the bank, or only their number if two of them, such as 1 and "1", look the same."""
    names = [str(name) for name in classes.tolist()]
    if len(set(names)) < len(names):
        return len(names)
    return names


class _DenseParts:
    """``_dense_parts``, to be gone through several times."""

    def __init__(self, features: Any) -> None:
        self._features = features

    def __iter__(self) -> Iterator[Tensor]:
        return _dense_parts(self._features)


def _dense_parts(features: Any) -> Iterator[Tensor]:
    """The result of ``_dense`` in parts of about ``CHUNK_BYTES``; a matrix that is dense already is one part."""
    if not issparse(features):
        yield _dense(features)
        return
    rows = max(1, CHUNK_BYTES // (4 * features.shape[1] + 4))
    for start in range(0, features.shape[0], rows):
        yield _dense(features[start : start + rows])


def _dense(features: Any) -> Tensor:
    """Dense features with one coordinate more, (n, D + 1), which is zero except in rows of zeros.

    There it is the smallest normal number. Normalizing the row turns it into a direction of its own, and if a mean is
    subtracted first, it is too small to matter.
    """
    if issparse(features):
        features = features.toarray()
    rows = np.zeros((len(features), features.shape[1] + 1), dtype=np.float32)
    rows[:, :-1] = features
    zero = ~features.any(1)
    rows[zero, -1] = TINY
    return torch.from_numpy(rows)


def _plain(value: Any) -> Any:
    """The argument, with NumPy's numbers as Python's, which JSON can hold."""
    if isinstance(value, np.generic):
        return value.item()
    return value
