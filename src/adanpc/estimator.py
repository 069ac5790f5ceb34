"""AdaNPCClassifier: the scikit-learn face of the method, for arrays instead of tensors."""
# ruff: noqa: N803 - scikit-learn calls the features X

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from adanpc.core import AdaNPC, Admission, MemoryBank
from adanpc.core.classifier import DEFAULT_ADMISSION
from adanpc.errors import AdaNPCError, LabelError

TINY = np.finfo(np.float32).tiny


class AdaNPCClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A nearest-neighbor classifier by cosine similarity that can learn from its own confident answers.

    ``predict`` never changes it, so scores, searches and pipelines see the classifier as it was fitted;
    ``adapt_predict`` lets confident answers join. Arguments are checked and take effect at the next ``fit``.

    Only the direction of a row counts. That suits embeddings; columns with units of their own need a StandardScaler
    in front. A row of zeros has no direction, so it gets one of its own: similarity 0 to all other rows, as in
    scikit-learn's cosine distance, and 1 to rows of zeros. No other similarity is changed by this.

    Args:
        n_neighbors: how many rows vote; all of them while there are fewer.
        rule, temperature: the vote rule, see ``adanpc.core.vote``.
        admission: which answers join in ``adapt_predict``; None for ``Admission(min_confidence=0.9)``.
        storage, capacity, evict: see ``MemoryBank``.
        centering: ``none``, ``source`` or ``stream``, see ``Centering``. The first call of ``partial_fit`` sets the
            source mean, and each call is a source domain of its own to ``stream``.
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
        self.rule = rule
        self.temperature = temperature
        self.admission = admission
        self.storage = storage
        self.capacity = capacity
        self.evict = evict
        self.centering = centering
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Itself, with the labeled rows X (n, D) and nothing else in its bank."""
        self._build(1, 1)  # refuses bad arguments before anything changes
        rows, given = self._labeled(X, y, first=True)
        classes = np.unique(given)
        return self._learn(self._build(rows.shape[1], len(classes)), classes, rows, given)

    def partial_fit(self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None) -> Self:
        """Itself, with the labeled rows X (n, D) appended; the first call must name all ``classes``."""
        first = not self.__sklearn_is_fitted__()
        if first and classes is None:
            raise LabelError("classes is missing: name all classes in the first call to partial_fit, or call fit first")
        rows, given = self._labeled(X, y, first=first)
        named = self.classes_ if classes is None else np.unique(np.asarray(classes))
        if not first and not np.array_equal(named, self.classes_):
            raise LabelError(f"classes were {self.classes_} before, got {named}; call fit to start anew")
        unknown = np.setdiff1d(given, named)
        if len(unknown):
            raise LabelError(
                f"label {unknown.tolist()[0]!r} is not among the classes {named}; name all classes at the start"
            )
        return self._learn(self._build(rows.shape[1], len(named)) if first else self.model_, named, rows, given)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The label of each row of X (B, D), ties to the first class; changes nothing."""
        queries = self._queries(X)
        return self._named(self.model_.predict(queries).labels)

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float32]:
        """The probabilities of ``classes_`` for each row of X, (B, C); changes nothing."""
        queries = self._queries(X)
        return self.model_.predict(queries).probs.numpy()

    def adapt_predict(self, X: ArrayLike) -> NDArray[Any]:
        """The label of each row of X (B, D), answered in this order; confident answers join and vote from then on.

        The answers are the same for every way of cutting X into calls.
        """
        queries = self._queries(X)
        return self._named(self.model_.step(queries).labels)

    def kneighbors(
        self, X: ArrayLike, n_neighbors: int | None = None, return_distance: bool = True
    ) -> NDArray[np.int64] | tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Cosine distances and row ids of the nearest rows, both (B, K), nearest first; or the ids alone.

        Rows are numbered in order of arrival from 0: the fitted ones are the rows of X in ``fit``.
        """
        queries = self._queries(X)
        count = self.model_.settings.k
        if n_neighbors is not None:
            count = _whole("n_neighbors", n_neighbors)
        if count > len(self.model_.bank):
            raise AdaNPCError(f"n_neighbors must be at most {len(self.model_.bank)}, the rows held, got {count}")
        contents = self.model_.bank.contents
        centered, _ = self.model_.settings.centering.queries(queries, contents.statistics, sequence=False)
        near = contents.search(centered, count, None, None)
        # Stored rows have length one up to rounding, so a similarity may exceed 1 by as much.
        distance = (1 - near.similarity).clamp(min=0)
        return (distance.numpy(), near.ids.numpy()) if return_distance else near.ids.numpy()

    def __sklearn_is_fitted__(self) -> bool:
        # A first call that is refused may leave n_features_in_ behind, so scikit-learn's own guess would be wrong.
        return hasattr(self, "model_")

    def _build(self, dim: int, classes: int) -> AdaNPC:
        """An empty model of this size, or an AdaNPCError that names the argument at fault."""
        k = _whole("n_neighbors", self.n_neighbors)
        capacity = None if self.capacity is None else _whole("capacity", self.capacity)
        admission = DEFAULT_ADMISSION if self.admission is None else self.admission
        if not callable(admission):
            raise AdaNPCError(f"admission must be None or an adanpc.core.Admission, got {admission!r}")
        if not isinstance(self.temperature, Real):
            raise AdaNPCError(f"temperature must be a number, got {self.temperature!r}")
        seed = self.random_state
        bank = MemoryBank(dim, classes, storage=self.storage, capacity=capacity, evict=self.evict, seed=seed)
        temperature = float(self.temperature)
        return AdaNPC(bank, k=k, rule=self.rule, temperature=temperature, admission=admission, centering=self.centering)

    def _learn(self, model: AdaNPC, classes: NDArray[Any], rows: Tensor, given: NDArray[Any]) -> Self:
        model.learn(rows, torch.from_numpy(np.searchsorted(classes, given)))
        self.model_, self.classes_ = model, classes
        return self

    def _labeled(self, X: ArrayLike, y: ArrayLike, *, first: bool) -> tuple[Tensor, NDArray[Any]]:
        features, given = validate_data(self, X, y, dtype=np.float32, reset=first)
        check_classification_targets(given)
        return _directed(features), given

    def _queries(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self)
        return _directed(validate_data(self, X, dtype=np.float32, reset=False))

    def _named(self, labels: Tensor) -> NDArray[Any]:
        named: NDArray[Any] = self.classes_[labels.numpy()]
        return named


def _directed(features: NDArray[np.float32]) -> Tensor:
    """Features (n, D) with one coordinate more, (n, D + 1), in which rows of zeros alone are not zero.

    It is as small as can be: normalized, it is the row's whole direction; beside a mean taken away, it is nothing.
    """
    rows = np.zeros((len(features), features.shape[1] + 1), dtype=np.float32)
    rows[:, :-1] = features
    rows[~features.any(1), -1] = TINY
    return torch.from_numpy(rows)


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, Integral) or value < 1:
        raise AdaNPCError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)
