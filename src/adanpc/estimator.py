"""AdaNPCClassifier: the scikit-learn face of the method, for arrays instead of tensors."""
# ruff: noqa: N803 - scikit-learn calls the features X

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from inspect import signature
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin
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

KINDS = r"[UO]|[<>|][biuf][1248]"  # of classes that a file may hold, in NumPy's letters
CHUNK_BYTES = 1 << 26  # about as much of a sparse matrix is made dense at once
PAPER_ARGUMENTS = ("n_neighbors", "rule", "temperature", "admission", "centering")
TINY = np.finfo(np.float32).tiny


@require.names_its_arguments
class AdaNPCClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A nearest-neighbor classifier by cosine similarity that can learn from its own confident answers.

    ``predict`` never changes it, so scores, searches and pipelines see the classifier as it was fitted;
    ``adapt_predict`` lets confident answers join. Arguments are checked and take effect at the next ``fit``.

    Only the direction of a row counts. That suits embeddings; columns with units of their own need a StandardScaler
    in front. A row of zeros has no direction, so it gets one of its own: similarity 0 to all other rows, as in
    scikit-learn's cosine distance, and 1 to rows of zeros. No other similarity is changed by this.

    Features may be sparse, as TF-IDF makes them. The bank is dense all the same, and needs 4 bytes for each feature of
    each row (``storage="float16"``: 2); for a large vocabulary put a TruncatedSVD in front.

    Args:
        n_neighbors: how many rows vote with ``preset="paper"``; all of them while there are fewer.
        preset: how it learns: ``safe``, or ``paper``; see ``AdaNPC``.
        stream: with ``preset="safe"``, what is known of the order in which classes arrive, see ``SafeSettings``.
        rule, temperature: with ``preset="paper"``, the vote rule, see ``adanpc.core.vote``.
        admission: with ``preset="paper"``, which answers join in ``adapt_predict``; None for
            ``Admission(min_confidence=0.9)``.
        storage, capacity, evict: see ``MemoryBank``.
        centering: with ``preset="paper"``: ``none``, ``source`` or ``stream``, see ``Centering``. The first call of
            ``partial_fit`` sets the source mean, and each call is a source domain of its own to ``stream``.
        random_state: decides which rows stay with ``evict="reservoir"``; None draws it anew in each ``fit``.

    Attributes:
        classes_: (C,) the labels, sorted.
        n_features_in_: how many features a row has.
        model_: the ``AdaNPC`` behind it. Its rows have one coordinate more, the direction of rows of zeros.
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
        """The estimator, with the labeled rows X (n, D) and nothing else in its bank.

        Args:
            X: the features.
            y: (n,) their labels.
            domains: (n,) names or numbers that say under which condition each row was drawn: a camera, a hospital, a
                style. Rows of each are centered by themselves. Without them, all are of one.
        """
        self._build(1, 1)  # refuses bad arguments before anything changes
        rows, given = self._labeled(X, y, first=True)
        classes = np.unique(given)
        model = self._build(rows.shape[1] + 1, _names(classes))
        labels = torch.from_numpy(np.searchsorted(classes, given))
        of_rows = _domains(domains, len(labels))
        parts = iter([_dense(rows)]) if model.needs_all_at_once else _dense_parts(rows)
        start = 0
        for part in parts:
            here = slice(start, start + len(part))
            model.learn(part, labels[here], domain=of_rows[here])
            start += len(part)
        return self._take(model, classes)

    def partial_fit(self, X: Any, y: ArrayLike, classes: ArrayLike | None = None) -> Self:
        """The estimator, with the labeled rows X (n, D) appended; the first call must name all ``classes``."""
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
        model.learn(_dense(rows), torch.from_numpy(np.searchsorted(named, given)))
        return self._take(model, named)

    def predict(self, X: Any) -> NDArray[Any]:
        """The label of each row of X (B, D), ties to the first class; changes nothing."""
        return self._named([self.model_.predict(part).labels for part in self._queries(X)])

    def predict_proba(self, X: Any) -> NDArray[np.float32]:
        """The probabilities of ``classes_`` for each row of X, (B, C); changes nothing."""
        return torch.cat([self.model_.predict(part).probs for part in self._queries(X)]).numpy()

    def adapt_predict(self, X: Any) -> NDArray[Any]:
        """The label of each row of X (B, D), answered in this order; confident answers join and vote from then on.

        The answers are the same for every way of cutting X into calls. A Pipeline does not pass this method on; see
        ``adanpc.adapt_predict``.
        """
        return self._named([self.model_.step(part).labels for part in self._queries(X)])

    def kneighbors(
        self, X: Any, n_neighbors: int | None = None, return_distance: bool = True
    ) -> NDArray[np.int64] | tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Cosine distances and row ids of the nearest rows, both (B, K), nearest first; or the ids alone.

        Rows are numbered in order of arrival from 0: the fitted ones are the rows of X in ``fit``.
        """
        parts = self._queries(X)
        count = _whole("n_neighbors", self.n_neighbors)
        if n_neighbors is not None:
            count = _whole("n_neighbors", n_neighbors)
        if count > len(self.model_.bank):
            raise AdaNPCError(f"n_neighbors must be at most {len(self.model_.bank)}, the rows held, got {count}")
        contents = self.model_.bank.contents
        distances = []
        ids = []
        for queries in parts:
            near = contents.search(self.model_.frozen_queries(queries), count, None, None)
            # Stored rows have length one up to rounding, so a similarity may exceed 1 by as much.
            distances.append((1 - near.similarity).clamp(min=0))
            ids.append(near.ids)
        rows: NDArray[np.int64] = torch.cat(ids).numpy()
        return (torch.cat(distances).numpy(), rows) if return_distance else rows

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted estimator, classes and arguments included, as ``adanpc.save`` writes a bank."""
        check_is_fitted(self)
        arguments = {name: _plain(value) for name, value in self.get_params(deep=False).items()}
        arguments["admission"] = self.admission is not None
        columns = getattr(self, "feature_names_in_", None)
        kind = self.classes_.dtype.kind
        description = {
            "arguments": arguments,
            "classes": self.classes_.tolist(),
            "columns": None if columns is None else columns.tolist(),
            "kind": kind if kind in "UO" else self.classes_.dtype.str,
        }
        try:
            text = canonical(description)
        except (TypeError, ValueError) as error:
            raise BankFileError(f"{path} was not saved: its classes must be strings or numbers: {error}") from None
        write(self.model_, {"layer": ESTIMATOR, "preprocessing": text, "weights": ""}, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The estimator that ``save`` wrote, to continue exactly where it stopped; executes no code from the file."""
        model, recipe = read(path)
        if recipe.get("layer") != ESTIMATOR:
            raise BankFileError(f"{path} was not loaded: it holds no estimator; use adanpc.load")
        try:
            return cls._described(json.loads(recipe["preprocessing"]), model)
        except (AdaNPCError, AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise BankFileError(
                f"{path} was not loaded: its description of the estimator is not valid ({error}); use another copy"
            ) from error

    @classmethod
    def _described(cls, description: dict[str, Any], model: AdaNPC) -> Self:
        """The estimator with this model that a file describes; nothing in the description is believed."""
        arguments = description["arguments"]
        arguments.setdefault("preset", model.preset)
        if arguments["admission"]:
            if not isinstance(model.settings, PaperSettings):
                raise AdaNPCError(f"the preset {model.preset!r} has no admission")
            arguments["admission"] = model.settings.admission
        else:
            arguments["admission"] = None
        made = cls(**arguments)
        made._build(1, 1)
        kind = description["kind"]
        if not re.fullmatch(KINDS, kind):
            raise AdaNPCError(f"there are no classes of kind {kind!r}")
        classes = np.array(description["classes"], dtype=kind)
        if classes.shape != (model.bank.classes,) or not np.array_equal(np.unique(classes), classes):
            raise AdaNPCError("its classes are not those of the bank")
        made.n_features_in_ = model.bank.dim - 1
        if description["columns"] is not None:
            columns = np.array(description["columns"], dtype=object)
            if columns.shape != (made.n_features_in_,) or not all(isinstance(name, str) for name in columns):
                raise AdaNPCError("its columns are not those of the bank")
            made.feature_names_in_ = columns
        return made._take(model, classes)

    def __sklearn_is_fitted__(self) -> bool:
        # A first call that is refused may leave n_features_in_ behind, so scikit-learn's own guess would be wrong.
        return hasattr(self, "model_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _build(self, dim: int, classes: int | Sequence[str]) -> AdaNPC:
        """An empty model of this size, or an AdaNPCError that names the argument at fault."""
        k = _whole("n_neighbors", self.n_neighbors)
        capacity = None if self.capacity is None else _whole("capacity", self.capacity)
        admission = DEFAULT_ADMISSION if self.admission is None else self.admission
        if not isinstance(self.temperature, Real):
            raise AdaNPCError(f"temperature must be a number, got {self.temperature!r}")
        bank = MemoryBank(
            dim,
            classes,
            storage=self.storage,
            capacity=capacity,
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
            temperature=float(self.temperature),
            admission=admission,
            centering=self.centering,
        )

    def _check_defaults(self, names: Sequence[str], preset: str) -> None:
        """Refuses arguments of another preset that are not at their defaults: they would have no effect."""
        defaults = signature(type(self)).parameters
        for name in names:
            given = getattr(self, name)
            if given != defaults[name].default:
                raise AdaNPCError(f"{name}={given!r} has no effect with preset={self.preset!r}: pass preset={preset!r}")

    def _take(self, model: AdaNPC, classes: NDArray[Any]) -> Self:
        self.model_ = model
        self.classes_ = classes
        return self

    def _labeled(self, X: Any, y: ArrayLike, *, first: bool) -> tuple[Any, NDArray[Any]]:
        """Features (n, D), dense or sparse, and their labels (n,)."""
        shape: tuple[int, ...] = getattr(y, "shape", ())
        if isinstance(y, list) and y and isinstance(y[0], list | tuple):
            shape = (len(y), len(y[0]))
        if len(shape) == 2 and shape[1] > 1:
            raise LabelError(f"y must be one label for each row, got shape {shape}: pass y.argmax(1) if it is one-hot")
        features, given = validate_data(self, X, y, dtype=np.float32, accept_sparse="csr", reset=first)
        check_classification_targets(given)
        return features, given

    def _queries(self, X: Any) -> Iterator[Tensor]:
        """The rows of X in parts that fit into memory, dense."""
        check_is_fitted(self)
        return _dense_parts(validate_data(self, X, dtype=np.float32, accept_sparse="csr", reset=False))

    def _named(self, labels: list[Tensor]) -> NDArray[Any]:
        named: NDArray[Any] = self.classes_[torch.cat(labels).numpy()]
        return named


class AdaNPCTransformer(TransformerMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """The feature transform of the preset "safe" by itself, for any classifier behind it; see ``core.transform``.

    What tells samples of one class apart counts less, and what tells classes apart counts more. The result is meant to
    be compared by cosine similarity.
    """

    def fit(self, X: Any, y: ArrayLike, domains: ArrayLike | None = None) -> Self:
        """The transformer, fitted to labeled rows X (n, D).

        Args:
            X: the features.
            y: (n,) their labels.
            domains: (n,) under which condition each row was drawn, as in ``AdaNPCClassifier.fit``.
        """
        rows, given = validate_data(self, X, y, dtype=np.float32, order="C")
        check_classification_targets(given)
        classes, labels = np.unique(given, return_inverse=True)
        of_rows = _domains(domains, len(labels))
        source = (torch.from_numpy(rows), torch.from_numpy(labels), of_rows, len(classes))
        self.transform_ = fit_transform_of(*source, suitable_parts(*source))
        return self

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Rows X (n, D), transformed and less the mean of the source's domains, (n, D)."""
        check_is_fitted(self)
        rows = validate_data(self, X, dtype=np.float32, order="C", reset=False)
        transformed = self.transform_.still(self.transform_(torch.from_numpy(rows)))
        return transformed.float().numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags


@require.names_its_arguments
def adapt_predict(pipeline: Any, X: Any) -> NDArray[Any]:
    """The answers of a fitted pipeline that ends in an AdaNPCClassifier, which learns from the confident ones.

    X passes the other steps as in ``predict``; then the last one answers by its ``adapt_predict``. A Pipeline itself
    passes on no method that scikit-learn does not know. Of a search, give ``search.best_estimator_``.

    Args:
        pipeline: a fitted Pipeline, or an AdaNPCClassifier alone.
        X: what its first step takes.
    """
    last = pipeline[-1] if isinstance(pipeline, Pipeline) else pipeline
    if not isinstance(last, AdaNPCClassifier):
        raise AdaNPCError(f"pipeline must be a Pipeline that ends in an AdaNPCClassifier, got {type(last).__name__}")
    if isinstance(pipeline, Pipeline) and len(pipeline) > 1:
        return last.adapt_predict(pipeline[:-1].transform(X))
    return last.adapt_predict(X)


def _domains(given: ArrayLike | None, count: int) -> Tensor:
    """The domain of each row (n,); -1, which is unknown, if none are given."""
    if given is None:
        return torch.full((count,), -1)
    domains = np.asarray(given)
    if domains.shape != (count,):
        raise LabelError(f"domains must have shape ({count},), one for each row, got {domains.shape}")
    return torch.from_numpy(np.unique(domains, return_inverse=True)[1])


def _names(classes: NDArray[Any]) -> int | list[str]:
    """The names of classes for the bank, or their number if some would be called alike."""
    names = [str(name) for name in classes.tolist()]
    return names if len(set(names)) == len(names) else len(names)


def _dense_parts(features: Any) -> Iterator[Tensor]:
    """``_dense`` for as many rows at a time as need little memory; a dense matrix is taken whole."""
    if not issparse(features):
        yield _dense(features)
        return
    rows = max(1, CHUNK_BYTES // (4 * features.shape[1] + 4))
    for start in range(0, features.shape[0], rows):
        yield _dense(features[start : start + rows])


def _dense(features: Any) -> Tensor:
    """Features (n, D) with one coordinate more, (n, D + 1), in which rows of zeros alone are not zero.

    It is as small as can be: normalized, it is the row's whole direction; beside a mean taken away, it is nothing.
    """
    if issparse(features):
        features = features.toarray()
    rows = np.zeros((len(features), features.shape[1] + 1), dtype=np.float32)
    rows[:, :-1] = features
    rows[~features.any(1), -1] = TINY
    return torch.from_numpy(rows)


def _plain(value: Any) -> Any:
    """An argument as JSON can hold it."""
    return value.item() if isinstance(value, np.generic) else value


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, Integral) or value < 1:
        raise AdaNPCError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)
