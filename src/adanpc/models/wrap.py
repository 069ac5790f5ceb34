"""Any trained model as the encoder of a bank: ``wrap(model, loader)``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from adanpc import require
from adanpc.core import AdaNPC, Append, Change, MemoryBank, Prediction, Rollback
from adanpc.core.bank import checked_device
from adanpc.core.contents import class_names
from adanpc.core.guard import Signs
from adanpc.core.presets import PRESETS, preset_of
from adanpc.core.safe import Question
from adanpc.errors import AdaNPCError, FeatureError, LabelError
from adanpc.explanation import Explanation, Files, Witness, explanation, file_finder
from adanpc.index import check_features
from adanpc.models.extract import extract, find_head, run
from adanpc.models.filenames import FileNames, FileOfKey, checked_files, files_of
from adanpc.models.inputs import ModelInputs
from adanpc.models.kept import KeptFeatures, digest_of_batch, workspace_folder
from adanpc.models.layers import plain_layer, unwrapped
from adanpc.models.loading import LabeledBatch, LoaderError, labeled_batches
from adanpc.models.recipe import check_recipe, describe, feature_fingerprint, tensors_hash
from adanpc.models.start import Start
from adanpc.progress import track

PUBLIC = ("model", "classifier", "layer", "preprocessing", "encode_size")  # the attributes of a wrapped model


@require.names_its_arguments
class Wrapped:
    """A model that makes features, and a classifier that answers them from its bank. The model is never changed.

    Any number of threads may use it at once. The model runs in evaluation mode; when the last of them has its answer,
    it is back in the mode it had before.

    Inputs may be whatever the model takes: a tensor; an array or a list of numbers; a tuple of several inputs; a
    mapping of inputs by name, such as a tokenizer's.

    Args:
        model: any module that takes a batch of inputs.
        classifier: the bank and how it votes.
        layer: the name of the module whose output is the feature, or ``"input of NAME"``.
        preprocessing: what turns raw data into inputs, see ``describe``.
        encode_size: how many inputs the model runs on at once, see ``wrap``.
        file_of_key: a function from the key of a source row to its file, or to None if it is unknown; for ``explain``.
    """

    def __init__(
        self,
        model: nn.Module,
        classifier: AdaNPC,
        layer: str,
        preprocessing: Any = None,
        *,
        encode_size: int | None = None,
        file_of_key: FileOfKey | None = None,
    ) -> None:
        if encode_size is not None:
            encode_size = require.whole("encode_size", encode_size, least=1)
        self.model = model
        self.classifier = classifier
        self.layer = layer
        self.preprocessing = describe(preprocessing)
        self.encode_size = encode_size
        self._files = FileNames(file_of_key)
        self._start = Start.of(classifier.bank.contents)

    def __repr__(self) -> str:
        return f"<Wrapped {type(self.model).__name__}, features at {self.layer!r}: {self.classifier!r}>"

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses to set a public attribute that does not exist: it may be misspelled."""
        require.known_attribute("a wrapped model", self, name, PUBLIC, PUBLIC)
        super().__setattr__(name, value)

    # Answering

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's own output, in evaluation mode and without gradients; takes the arguments of the model."""
        if len(inputs) == 1 and not named:
            return run(self.model, inputs[0])
        return run(self.model, ModelInputs(inputs, named))

    def features(self, inputs: Any) -> Tensor:
        """The features (B, D) of a batch of inputs."""
        return self.features_and_output(inputs)[0]

    def features_and_output(self, inputs: Any) -> tuple[Tensor, Any]:
        """The features (B, D) of a batch of inputs and the model's own output, from one pass.

        Use it to compare the head's answer with the vote's: ``wrapped.classifier.step(features)`` answers as
        ``wrapped.step(inputs)`` would.
        """
        return extract(self.model, self.layer, inputs, self.encode_size)

    def predict(self, inputs: Any, *, exclude: Tensor | None = None) -> Prediction:
        """The answer that each input would get if it came next; changes nothing. See ``AdaNPC.predict``."""
        return self.classifier.predict(self.features(inputs), exclude=exclude)

    def propose(self, inputs: Any, *, domain: int = -1, keys: Any = None) -> tuple[Prediction, Append | None]:
        """The answers to inputs that arrive in this order, and the change that lets them join the bank.

        The change is not applied, so that it can be written to a log first; see ``AdaNPC.propose``.
        """
        return self.classifier.propose(self.features(inputs), domain=domain, keys=keys)

    def step(
        self, inputs: Any, *, domain: int = -1, keys: Any = None, files: Sequence[Any] | None = None
    ) -> Prediction:
        """Answers the inputs in order and learns from each of them; see ``AdaNPC.step``.

        Args:
            inputs: a batch.
            domain: the domain of all inputs, stored with those that join; -1 if it is unknown.
            keys: (B,) your own numbers for the inputs, stored with those that join.
            files: (B,) the files of the inputs, for ``explain``; they are not saved with the bank.
        """
        features = self.features(inputs)
        names = checked_files(files, len(features))
        answer = self.classifier.step(features, domain=domain, keys=keys)
        if names is not None:
            self._files.note(answer.joined, names)
            bank = self.classifier.bank
            # In a long stream through a bank with a capacity, most files belong to rows that have left.
            if len(self._files) > 2 * len(bank):
                held = set(bank.table("id")["id"].tolist())
                self._files.keep(held)
        return answer

    def ask(self, inputs: Any, *, most: int = 10) -> list[Question]:
        """The inputs whose labels would tell the most about whether to adapt, at most so many; see ``AdaNPC.ask``."""
        return self.classifier.ask(self.features(inputs), most=most)

    def signs(self) -> Signs:
        """What the guard of the preset "safe" sees in the stream; print it to read it in words."""
        return self.classifier.signs()

    def explain(self, answer: Prediction, query: int = 0, *, files: Files | None = None) -> Explanation:
        """The rows that voted on one query, with class names and files where they are known.

        Args:
            answer: an answer of this wrapped model.
            query: the position of the query in the batch.
            files: the file of each row by its key; by default the files that the loader's data set lists, and those
                given to ``step``.
        """
        file_of: Callable[[Witness], Any | None] = self._files
        if files is not None:
            file_of = file_finder(files)
        return explanation(answer, self.classifier.bank.contents, query, file_of)

    # Changing

    def apply(self, change: Change) -> range:
        """Carries out one change, and returns the ids of the rows that it appended; see ``AdaNPC.apply``."""
        return self.classifier.apply(change)

    def reset(self, *, who: str = "", why: str = "reset", when: float | None = None) -> Rollback:
        """Forgets what was learned from the stream since ``wrap`` or ``load``; returns the change that did so.

        Rows that were admitted since then leave, rows that were evicted come back, and the statistics of the stream
        are as they were. What people decided stays: vetoes, labels, deletions, experts' rows.
        """
        with self.classifier.bank.writing():
            change = self._start.rollback(self.classifier.bank.contents, who=who, why=why, when=when)
            self.classifier.apply(change)
        return change

    # Saving and loading

    def with_classifier(self, classifier: AdaNPC) -> Wrapped:
        """The same model with another classifier, whose bank has features of the same kind."""
        other = Wrapped(self.model, classifier, self.layer, self.preprocessing, encode_size=self.encode_size)
        other._files = self._files
        return other

    @property
    def recipe(self) -> dict[str, str]:
        """How features are made; it is saved with the bank and checked when that is loaded."""
        return {
            "layer": self.layer,
            "preprocessing": self.preprocessing,
            "weights": feature_fingerprint(self.model, self.layer),
        }

    def check(self, recipe: dict[str, str], strict: bool = True) -> None:
        """Raises a RecipeError if the recipe of a bank differs from this model's.

        Args:
            recipe: the recipe of the bank.
            strict: False to accept other weights and another preprocessing, if you know that the features are still
                the same, as after ``model.half()`` or if a transform was only renamed.
        """
        check_recipe(recipe, self.model, self.layer, self.preprocessing, strict)


def wrap(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    layer: str | None = None,
    classes: int | Sequence[str] | None = None,
    preprocessing: Any = None,
    keys: Any = None,
    encode_size: int | None = None,
    storage: str = "float32",
    capacity: int | None = None,
    evict: str = "fifo",
    soft: bool | None = None,
    device: torch.device | str = "cpu",
    preset: str = "safe",
    workspace: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Wrapped:
    """The model with a bank of the features and labels of all samples of ``loader``.

    Args:
        model: a trained classifier.
        loader: batches (inputs, labels) or (inputs, labels, domains) of source data, already preprocessed; or
            dictionaries with an entry "labels" or "label", whose other entries are inputs by name.
        layer: the layer whose output is the feature, by its name in ``model.named_modules()``, or ``"input of NAME"``
            for the input of that layer. Features are averaged over space or tokens if there are any; where the inputs
            hold an ``attention_mask``, padding does not count. By default the input of the model's last linear layer,
            which is found by running one batch.
        classes: the number of classes, or their names, which the bank stores. By default the number is the width of
            that linear layer or, if ``layer`` is given, one more than the largest label; and the names are those of the
            loader's data set, if it names as many classes.
        preprocessing: what made the inputs, recorded with the bank and checked when it is loaded; by default the
            ``transform`` of the loader's data set, if it has one.
        keys: (n,) your own numbers for all samples, in the order in which the loader gives them; by default the row
            numbers of its data set, see ``labeled_batches``.
        encode_size: if given, the model always runs on batches of exactly this many inputs; the last one is filled up
            with copies. Most models round differently in batches of different sizes, so without this option the last
            bits of a feature depend on how a stream is split into batches.
        storage, capacity, evict, soft, device: see ``MemoryBank``; by default ``soft`` is what the preset needs.
        preset: how the classifier learns, ``safe`` or ``paper``; see ``AdaNPC``.
        workspace: a folder in which the features of each batch are kept as soon as they are made. If the process is
            killed, the same call goes on from there: the model runs only on batches that it has not seen, as long as
            the loader composes and preprocesses its batches as before. Weights and layers of the model are compared,
            but not the code of its methods: after changing that, give another folder. Delete the folder once the bank
            is saved. Features need not fit into memory, with a workspace or without.
        **options: options of the preset: stream, guard, balance, …; or k, rule, temperature, admission, centering, …
    """
    check_model(model)
    _check_options(layer, preset, options)
    device = checked_device(device)
    if soft is None:
        soft = preset == "safe"
    dataset = getattr(loader, "dataset", None)
    whole = _whole(dataset)
    if preprocessing is None:
        preprocessing = getattr(whole, "transform", None)
    folder = None
    if workspace is not None:
        folder = workspace_folder(workspace)
    with KeptFeatures(folder) as kept:
        samples = _encoded(model, loader, layer, _class_count(classes), encode_size, kept)
        class_count = samples.class_count
        if class_count is None:
            class_count = 1 + int(samples.labels.max())
        names = _names(classes, whole, class_count)
        bank = MemoryBank(
            samples.dim,
            names or class_count,
            storage=storage,
            capacity=capacity,
            evict=evict,
            soft=soft,
            device=device,
        )
        classifier = AdaNPC(bank, preset=preset, **options)
        file_of_key = files_of(dataset)
        all_keys = samples.keys
        given_keys = classifier.checked_keys(keys, len(samples.labels))
        if given_keys is not None:
            all_keys = given_keys
            file_of_key = None  # it takes row numbers of the data set, which these keys are not
        pieces = track(kept, "Going through the rows", samples.batches)
        classifier.learn_in_pieces(pieces, samples.labels, domain=samples.domains, keys=all_keys)
    layer = plain_layer(samples.layer)
    return Wrapped(model, classifier, layer, preprocessing, encode_size=encode_size, file_of_key=file_of_key)


class _Samples(NamedTuple):
    """What is known of the samples of a loader once the model has run on all of them, but for their features."""

    labels: Tensor  # (n,)
    domains: Tensor  # (n,)
    keys: Tensor  # (n,)
    batches: int  # in which they came
    layer: str  # whose output is the feature
    dim: int  # of a feature
    class_count: int | None  # None if it is not known


def _encoded(
    model: nn.Module,
    loader: Iterable[Any],
    layer: str | None,
    class_count: int | None,
    encode_size: int | None,
    kept: KeptFeatures,
) -> _Samples:
    """Runs the model on all samples of a loader, adds their features to those kept, and returns what else is known.

    Args:
        model, loader, encode_size: see ``wrap``.
        layer, class_count: if they are not given, they are those of the model's head.
        kept: the features of each batch, in the order in which batches come.
    """
    batches: list[LabeledBatch] = []  # without their inputs
    origin: dict[str, str] = {}
    name = ""  # of the file of a batch; not needed unless features are kept in a folder
    dim = 0
    for number, batch in enumerate(labeled_batches(loader)):
        if not len(batch.labels):
            continue  # without samples, any layer would seem to be the head
        if layer is None:
            layer, class_count = find_head(model, batch.inputs, class_count)
        if kept.in_folder:
            if not origin:
                origin = _origin(model, layer, encode_size)
            name = digest_of_batch(origin, batch.inputs)
        features = kept.add(name, partial(_features, model, layer, batch, encode_size))
        dim = features.shape[1]
        _check_batch(number, batch, features, class_count)
        batches.append(batch._replace(inputs=None))
    if layer is None or not batches:
        raise LoaderError("the loader is empty: a bank needs labeled source data")
    return _Samples(
        labels=torch.cat([batch.labels for batch in batches]),
        domains=torch.cat([batch.domains for batch in batches]),
        keys=torch.cat([batch.keys for batch in batches]),
        batches=len(batches),
        layer=layer,
        dim=dim,
        class_count=class_count,
    )


def _origin(model: nn.Module, layer: str, encode_size: int | None) -> dict[str, str]:
    """What decides the features of a batch apart from its inputs, as far as this can be known."""
    inner = unwrapped(model)
    return {
        "weights": feature_fingerprint(model, layer),
        "buffers": tensors_hash(inner.named_buffers()),  # with those that are not saved as weights
        "structure": describe(inner),
        "layer": layer,
        "size": str(encode_size),
    }


def _features(model: nn.Module, layer: str, batch: LabeledBatch, encode_size: int | None) -> Tensor:
    """The features (B, D) of a batch, as they are kept until all are there."""
    features, _ = extract(model, layer, batch.inputs, encode_size)
    return features.float().cpu()


def check_model(model: Any) -> None:
    """Raises an error if the model is not a torch module."""
    wanted = "the model must be a torch.nn.Module, got"
    if isinstance(model, type):
        raise AdaNPCError(f"{wanted} the class {model.__name__}: pass an instance of it")
    kind = type(model).__name__
    if isinstance(model, Mapping):
        raise AdaNPCError(f"{wanted} {kind}: pass the module into which you load these weights")
    if not isinstance(model, nn.Module):
        raise AdaNPCError(f"{wanted} {kind}: for features from elsewhere use adanpc.AdaNPC or adanpc.AdaNPCClassifier")
    if isinstance(unwrapped(model), torch.jit.ScriptModule):
        raise AdaNPCError(
            "the model is TorchScript, and nobody can see the features inside it: wrap the module that it was made "
            "from, or compute features yourself and use adanpc.AdaNPC"
        )


def _check_options(layer: str | None, preset: str, options: Mapping[str, Any]) -> None:
    """Raises an error for an invalid layer or option, now rather than after everything has been encoded."""
    if layer is not None:
        require.text("layer", layer)
    known = [name for name in signature(wrap).parameters if name != "options"]
    for other in PRESETS.values():
        known += other.options
    require.known_arguments("wrap", options, known)
    preset_of(preset, options)


def _class_count(classes: int | Sequence[str] | None) -> int | None:
    """How many classes there are, given their number or their names; None if it is not given."""
    if classes is None:
        return None
    names = class_names(classes)
    if names:
        return len(names)
    return require.whole("classes", classes, least=1)


def _whole(dataset: Any) -> Any:
    """The data set that a subset, such as one made by ``random_split``, belongs to; any other data set itself."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _names(classes: Any, dataset: Any, count: int) -> tuple[str, ...]:
    """The names of the classes: those that were given, or those of the data set if it has ``count`` different ones."""
    if classes is not None:
        return class_names(classes)
    listed = getattr(dataset, "classes", None)
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        return ()
    if len(listed) != count or len(set(listed)) != count:
        return ()
    return tuple(listed)


def _check_batch(number: int, batch: LabeledBatch, features: Tensor, class_count: int | None) -> None:
    """Raises an error for a batch that no bank can learn, now rather than after all others have been encoded.

    Args:
        number: its place in the loader, from 0.
        batch: the batch.
        features: (B, D) its features.
        class_count: how many classes there are, if that is known.
    """
    labels = batch.labels
    if len(features) != len(labels):
        raise LabelError(f"the loader gave {len(features)} inputs with {len(labels)} labels: give one for each")
    place = f"batch {number} of the loader"
    try:
        check_features(features, features.shape[1])
    except FeatureError as error:
        raise FeatureError(f"{place}: {error}") from None
    unusable = labels < 0
    known = "at least 0"
    if class_count is not None:
        unusable |= labels >= class_count
        known = f"between 0 and {class_count - 1}"
    if unusable.any():
        raise LabelError(f"{place}: labels must be {known}, got {int(labels[unusable][0])}")
