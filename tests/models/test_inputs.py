"""What people have: tokenizers' dictionaries, several inputs, arrays, output objects, and mistakes."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import adanpc
from adanpc.errors import AdaNPCError, LabelError
from adanpc.models.extract import extract, find_head, run
from adanpc.models.inputs import InputError
from adanpc.models.loading import LoaderError

WORDS, WIDTH, CLASSES = 20, 8, 3


class ModelOutput(OrderedDict[str, Any]):
    """As in transformers: a dictionary whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Tokens(UserDict[str, Any]):
    """As transformers' BatchEncoding: a mapping, but not a dict."""


@dataclass(frozen=True)
class Answer:
    logits: Tensor
    hidden: tuple[Tensor, ...]


Pair = namedtuple("Pair", ["logits", "hidden"])


class Reader(nn.Module):
    """A small text classifier with inputs by name; it ignores padding itself."""

    forms: ClassVar[dict[str, Any]] = {
        "object": lambda logits, hidden: ModelOutput(loss=None, logits=logits, hidden=(hidden,)),
        "dict": lambda logits, hidden: {"hidden": hidden, "logits": logits},
        "dataclass": lambda logits, hidden: Answer(logits, (hidden,)),
        "tuple": lambda logits, hidden: (logits, hidden),
        "named tuple": Pair,
        "dict without logits": lambda logits, hidden: {"hidden": hidden, "out": logits},
        "list": lambda logits, hidden: [hidden.sum(), logits],
    }

    def __init__(self, form: str = "object") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.form = form

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        hidden = self.mix(self.embed(input_ids)).tanh()
        weights = attention_mask[:, :, None].to(hidden.dtype)
        pooled = (hidden * weights).sum(1) / weights.sum(1)
        return self.forms[self.form](self.head(pooled), hidden)


def sentences(count: int, length: int = 5) -> Tokens:
    torch.manual_seed(count)
    return Tokens(input_ids=torch.randint(1, WORDS, (count, length)), attention_mask=torch.ones(count, length).long())


def padded(tokens: Tokens, extra: int) -> Tokens:
    return Tokens({name: nn.functional.pad(value, (0, extra)) for name, value in tokens.items()})


@pytest.mark.parametrize("form", Reader.forms)
def test_the_head_is_found_in_every_form_of_output(form: str) -> None:
    model = Reader(form)
    assert find_head(model, sentences(4)) == ("input of head", CLASSES)
    wrapped = adanpc.wrap(model, [(sentences(9), torch.arange(9) % 3)], preset="paper", k=1)
    tokens = sentences(4)
    features, output = wrapped.features_and_output(tokens)
    own = wrapped(tokens)
    assert type(output) is type(own) is type(model(**tokens))
    torch.testing.assert_close(model.head(features), output[-1] if form == "list" else logits_of(output))
    torch.testing.assert_close(logits_of(own), logits_of(output))
    torch.testing.assert_close(logits_of(wrapped(**tokens)), logits_of(output))
    torch.testing.assert_close(logits_of(wrapped(tokens["input_ids"], tokens["attention_mask"])), logits_of(own))
    answer = wrapped.classifier.predict(features)
    assert torch.equal(answer.probs, wrapped.predict(tokens).probs)


def logits_of(output: Any) -> Any:
    if isinstance(output, dict):
        return output.get("logits", output.get("out"))
    if isinstance(output, list):
        return output[1]
    return output.logits if hasattr(output, "logits") else output[0]


@pytest.mark.parametrize("form", Reader.forms)
def test_outputs_of_several_batches_are_joined_in_their_form(form: str) -> None:
    model = Reader(form)
    tokens = sentences(7)
    _, whole = extract(model, "input of head", tokens)
    features, output = extract(model, "input of head", tokens, 3)
    assert features.shape == (7, WIDTH)
    assert type(output) is type(whole)
    torch.testing.assert_close(logits_of(output), logits_of(whole))
    if form == "list":
        assert output[0] is None  # a sum over a batch that nobody gave
    if form == "object":
        assert output.loss is None
        torch.testing.assert_close(output.hidden[0], whole.hidden[0])
    if form == "dataclass":
        torch.testing.assert_close(output.hidden[0], whole.hidden[0])


@pytest.mark.parametrize("layer", ["mix", "input of mix", "embed"])
def test_a_padded_sentence_has_the_feature_of_the_sentence(layer: str) -> None:
    model = Reader()
    short = sentences(4)
    features, _ = extract(model, layer, short)
    torch.testing.assert_close(extract(model, layer, padded(short, 6))[0], features)
    with_padding = padded(short, 6)["input_ids"]
    unmasked = extract(model, layer, Tokens(input_ids=with_padding, attention_mask=torch.ones(4, 11)))[0]
    assert not torch.allclose(unmasked, features, atol=0.01)
    by_place = tuple(padded(short, 6).values())
    torch.testing.assert_close(extract(model, layer, by_place)[0], features)


def test_a_mask_of_other_tokens_is_not_used() -> None:
    class Shortening(Reader):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            return self.head(self.mix(self.embed(input_ids[:, ::2])))

    model = Shortening()
    tokens = padded(sentences(2, 4), 2)
    expected = model.mix(model.embed(tokens["input_ids"][:, ::2])).mean(1)
    torch.testing.assert_close(extract(model, "mix", tokens)[0], expected)


@pytest.mark.parametrize("name", ["labels", "label"])
@pytest.mark.parametrize("kind", [dict, Tokens])
def test_batches_may_be_dictionaries(name: str, kind: Any) -> None:
    batch = kind({**sentences(6), name: torch.arange(6) % 3})
    wrapped = adanpc.wrap(Reader(), [batch], preset="paper", k=1)
    assert wrapped.classifier.bank.table()["label"].tolist() == [0, 1, 2, 0, 1, 2]
    assert wrapped.predict(sentences(6)).neighbors.ids[:, 0].tolist() == list(range(6))


def test_a_dictionary_without_labels_is_refused() -> None:
    message = "batches need an entry 'labels' with class numbers, got: input_ids, attention_mask"
    with pytest.raises(LoaderError, match=message):
        adanpc.wrap(Reader(), [sentences(3)])


class Two(nn.Module):
    """A model with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.cat([left, right], 1))
        return logits


def test_several_inputs_are_given_one_by_one() -> None:
    model = Two()
    left, right = torch.randn(5, 2), torch.randn(5, 4)
    wrapped = adanpc.wrap(model, [((left, right), torch.arange(5) % 2)])
    expected = torch.cat([left, right], 1)
    for inputs in ((left, right), [left, right], [left.numpy(), right], {"left": left.tolist(), "right": right}):
        torch.testing.assert_close(wrapped.features(inputs), expected)
    torch.testing.assert_close(wrapped(left, right=right.numpy()), model(left, right))
    torch.testing.assert_close(extract(model, "input of head", (left, right), 2)[0], expected)


def test_inputs_that_a_model_does_not_take_are_refused_in_one_sentence() -> None:
    wrapped = adanpc.wrap(nn.Sequential(nn.Linear(3, 2)), [(torch.randn(4, 3), torch.arange(4) % 2)])
    samples = [torch.randn(3), torch.randn(3)]
    with pytest.raises(InputError, match=r"Sequential does not take these inputs .*: .* pass torch.stack\(samples\)$"):
        wrapped.predict(samples)
    wrapped.predict(torch.stack(samples))
    reader = adanpc.wrap(Reader(), [(sentences(9), torch.arange(9) % 3)])
    with pytest.raises(
        InputError, match=r"Reader .* unexpected keyword argument 'token_type_ids'\): name the inputs as"
    ):
        reader.predict({**sentences(2), "token_type_ids": torch.zeros(2, 5)})


def test_a_whole_batch_of_a_loader_is_answered_by_what_to_pass() -> None:
    data = TensorDataset(torch.randn(6, 3), torch.arange(6) % 2)
    loader = DataLoader(data, batch_size=3)
    wrapped = adanpc.wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), loader)
    batch = next(iter(loader))
    for given in (batch, tuple(batch)):
        with pytest.raises(InputError, match=r"leave out the labels, as in step\(batch\[0\]\)"):
            wrapped.step(given)
    whole: list[Any] = [loader, data, iter(loader), (inputs for inputs, _ in loader), [tuple(batch), tuple(batch)]]
    for given in whole:
        with pytest.raises(InputError, match=r"must be one batch, got a \w+: call it for each batch of a loader"):
            wrapped.step(given)
    with pytest.raises(InputError, match=r"if they are the samples of one batch, pass torch.stack\(samples\)"):
        wrapped.step([batch[0][0], batch[0][1], batch[0][2]])
    with pytest.raises(InputError, match="pass torch.stack"):
        wrapped.step([torch.arange(3), torch.arange(3)])
    reader = adanpc.wrap(Reader(), [(sentences(9), torch.arange(9) % 3)])
    with pytest.raises(InputError, match=r"leave out 'label'"):
        reader.step({**sentences(2), "label": torch.zeros(2)})


class Pairs(nn.Module):
    """Takes a list of pairs, which is none of labeled batches, or empty."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, pairs: list[Any]) -> Tensor:
        total = torch.zeros(len(pairs), 3)
        for number, pair in enumerate(pairs):
            total[number] = pair[0]
        logits: Tensor = self.head(total)
        return logits


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(torch.ones(3), torch.ones(3))],
        [(torch.ones(1, 3), torch.ones(3))],
        [(torch.ones(3), "a text")],
        [(torch.ones(3),)],
    ],
)
def test_other_lists_of_pairs_reach_the_model(pairs: list[Any]) -> None:
    assert run(Pairs(), pairs).shape == (len(pairs), 2)


def test_an_error_inside_a_model_is_its_own() -> None:
    class Odd(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if len(input) == 1:
                raise TypeError("one is too few")
            return super().forward(input)

    wrapped = adanpc.wrap(
        nn.Sequential(nn.Linear(3, 3), Odd(3, 2)), [(torch.randn(4, 3), torch.arange(4) % 2)], layer="0"
    )
    with pytest.raises(TypeError, match="one is too few"):
        wrapped.predict(torch.randn(1, 3))


def test_a_model_that_hides_its_arguments_is_called_as_it_is() -> None:
    class Hidden:
        __signature__ = "none"

        def __call__(self, inputs: Tensor, attention_mask: Tensor) -> Tensor:
            return inputs.sum(1)

    model = nn.Sequential(nn.Embedding(9, 4))
    model.forward = Hidden()  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        extract(model, "", (torch.zeros(1, 2),))


def test_arrays_and_lists_become_tensors_of_the_models_precision() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    inputs = torch.randn(5, 3)
    wrapped = adanpc.wrap(model, [(inputs.numpy(), [0, 1, 0, 1, 0])])
    expected = wrapped.features(inputs)
    array = inputs.numpy()
    frozen = array.copy()
    frozen.setflags(write=False)
    for same in (array, array.astype(numpy.float64), inputs.tolist(), tuple(inputs.tolist()), frozen):
        assert torch.equal(wrapped.features(same), expected)
    assert torch.equal(wrapped.features(array[::-1]).flip(0), expected)
    model.double()
    assert wrapped.features(inputs.tolist()).dtype == torch.float64


def test_a_layer_that_gives_a_tuple_shows_its_first_tensor() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(4, 6, batch_first=True)
            self.head = nn.Linear(6, 2)

        def forward(self, inputs: Tensor) -> Any:
            states, _ = self.rnn(inputs)
            return self.head(states[:, -1])

    model = Recurrent()
    inputs = torch.randn(3, 5, 4)
    torch.testing.assert_close(extract(model, "rnn", inputs)[0], model.rnn(inputs)[0].mean(1))


def test_texts_and_other_objects_reach_the_model_as_they_are() -> None:
    class Letters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, texts: list[str]) -> Any:
            return self.head(torch.tensor([[len(text), text.count("a")] for text in texts]).float())

    wrapped = adanpc.wrap(Letters(), [(["banana", "kiwi"], torch.tensor([0, 1]))])
    assert wrapped.features(["papaya"]).tolist() == [[6, 3]]
    with pytest.raises(InputError, match="encode_size needs inputs that are tensors"):
        extract(Letters(), "head", ["papaya"], 2)


# Mistakes


class Picture:
    """As a PIL image, which the tests need not have."""


Picture.__module__ = "PIL.Image"


class Pictures(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> Any:
        return Picture(), 0


@pytest.mark.parametrize("given", [Picture(), [Picture(), Picture()]])
def test_pictures_ask_for_a_transform(given: Any) -> None:
    with pytest.raises(InputError, match="are PIL images.*give the data set the transform.*ToTensor"):
        extract(nn.Linear(2, 2), "", given)
    with pytest.raises(InputError, match="are PIL images"):
        adanpc.wrap(nn.Linear(2, 2), [(given, [0])])


def test_a_data_set_of_pictures_asks_for_a_transform() -> None:
    with pytest.raises(InputError, match="are PIL images.*give the data set the transform"):
        adanpc.wrap(nn.Linear(2, 2), DataLoader(Pictures(), batch_size=2))


def test_other_errors_of_a_loader_are_its_own() -> None:
    class Broken(Pictures):
        def __getitem__(self, row: int) -> Any:
            raise TypeError("no such file")

    with pytest.raises(TypeError, match="no such file"):
        adanpc.wrap(nn.Linear(2, 2), DataLoader(Broken(), batch_size=2))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.eye(4)[:3], r"got shape \(3, 4\): pass labels.argmax\(1\) if they are one-hot"),
        (torch.zeros(3, 1).long(), r"got shape \(3, 1\): pass labels.flatten\(\)"),
        (1, "got a single one: give batches"),
        (["cat", "dog", "cat"], r"labels must be whole numbers from 0, got \['cat', 'dog'"),
        ([0, 1], "gave 3 inputs with 2 labels: give one for each"),
        (torch.rand(3), "labels must be whole numbers, got torch.float32"),
    ],
)
def test_labels_must_be_class_numbers(labels: Any, message: str) -> None:
    with pytest.raises(LabelError, match=message):
        adanpc.wrap(nn.Linear(2, 4), [(torch.randn(3, 2), labels)])


def test_a_second_input_is_not_taken_for_labels() -> None:
    batches = [(torch.randn(3, 2), torch.randn(3, 5), torch.arange(3))]
    with pytest.raises(
        LabelError, match=r"got shape \(3, 5\): if it is a second input .* give \(\(one, two\), labels\)"
    ):
        adanpc.wrap(nn.Linear(2, 4), batches)


@pytest.mark.parametrize("batches", [[], [(torch.randn(0, 2), torch.zeros(0).long())]])
def test_a_loader_without_samples_is_refused(batches: Any) -> None:
    with pytest.raises(LoaderError, match="is empty: a bank needs labeled source data"):
        adanpc.wrap(nn.Linear(2, 2), batches)


def test_rows_of_unequal_length_are_refused() -> None:
    with pytest.raises(InputError, match="rows of equal length, got a list"):
        extract(nn.Linear(2, 2), "", [[1.0, 2.0], [3.0]])


def test_every_error_has_a_code_of_its_own() -> None:
    kinds: list[type[AdaNPCError]] = [InputError, LoaderError, adanpc.models.RecipeError]
    assert [kind.code for kind in kinds] == ["bad-inputs", "bad-loader", "other-recipe"]
