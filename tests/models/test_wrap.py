"""wrap: any module, any feature layer, nothing changed in the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from presets import paper
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import adanpc
from adanpc.errors import AdaNPCError, FeatureError, LabelError
from adanpc.index import unit
from adanpc.models.extract import extract, find_head
from adanpc.models.recipe import RecipeError, describe, fingerprint


class Net(nn.Module):
    """A small network with everything that could go wrong: dropout, BatchNorm, an auxiliary linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.gate = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(6, 4)

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.body(images).mean((2, 3))
        logits: Tensor = self.fc(self.drop(pooled * self.gate(pooled).sigmoid()))
        return logits


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().train()


def loader(count: int = 30, **options: Any) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(count, 1, 8, 8), torch.arange(count) % 4), batch_size=7, **options)


def test_three_lines_are_enough(net: Net) -> None:
    wrapped = adanpc.wrap(net, loader(), preset="paper", k=3)
    assert isinstance(wrapped, adanpc.Wrapped)
    assert wrapped.predict(torch.randn(2, 1, 8, 8)).joined.tolist() == [-1, -1]
    answer = wrapped.step(torch.randn(5, 1, 8, 8))
    assert answer.probs.shape == (5, 4)
    assert len(wrapped.classifier.bank) == 30 + int((answer.joined >= 0).sum())
    assert wrapped.layer == "input of fc"
    assert wrapped.classifier.bank.table()["key"][:30].tolist() == list(range(30))


def test_features_are_the_input_of_the_head(net: Net) -> None:
    wrapped = adanpc.wrap(net, loader())
    images = torch.randn(6, 1, 8, 8)
    features = wrapped.features(images)
    net.eval()
    with torch.no_grad():
        torch.testing.assert_close(net.fc(features), net(images))


def test_the_model_is_left_as_it_was(net: Net) -> None:
    net.drop.eval()
    before, modes = fingerprint(net), [module.training for module in net.modules()]
    wrapped = adanpc.wrap(net, loader())
    wrapped.step(torch.randn(5, 1, 8, 8))
    assert fingerprint(net) == before  # BatchNorm statistics too
    assert [module.training for module in net.modules()] == modes
    assert not any(module._forward_hooks for module in net.modules())


@pytest.mark.parametrize(("layer", "width"), [("body", 6), ("body.0", 6), ("gate", 6), ("input of gate", 6), ("fc", 4)])
def test_a_layer_can_be_named(net: Net, layer: str, width: int) -> None:
    wrapped = adanpc.wrap(net, loader(), layer=layer)
    assert wrapped.features(torch.randn(2, 1, 8, 8)).shape == (2, width)
    assert wrapped.classifier.bank.classes == 4


def test_maps_and_tokens_are_averaged() -> None:
    conv, tokens = nn.Sequential(nn.Conv2d(1, 3, 3)), nn.Sequential(nn.Linear(8, 5))
    images = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(extract(conv, "0", images)[0], conv(images).mean((2, 3)))
    torch.testing.assert_close(extract(tokens, "0", images[:, 0])[0], tokens(images[:, 0]).mean(1))


def test_domains_and_options_reach_the_bank(net: Net) -> None:
    data = TensorDataset(torch.randn(12, 1, 8, 8), torch.arange(12) % 4, torch.arange(12) // 6)
    wrapped = adanpc.wrap(
        net,
        DataLoader(data, batch_size=5),
        storage="int8",
        capacity=3,
        preset="paper",
        centering="stream",
        rule="paper",
    )
    assert wrapped.classifier.bank.table()["domain"].tolist() == [0] * 6 + [1] * 6
    assert wrapped.classifier.bank.config()["storage"] == "int8"
    assert paper(wrapped.classifier).centering.mode == "stream"
    features = wrapped.features(data.tensors[0])
    mean = wrapped.classifier.bank.contents.statistics.source_mean
    torch.testing.assert_close(mean, unit(features).double().mean(0))


def test_a_model_without_a_linear_head_asks_for_a_layer() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 8), nn.Flatten())
    with pytest.raises(AdaNPCError, match=r"name a layer, such as layer='1'; model\.named_modules\(\) lists all"):
        adanpc.wrap(model, loader())
    assert adanpc.wrap(model, loader(), layer="1").classifier.bank.dim == 4


def test_the_head_is_the_layer_that_makes_the_output_not_the_last_one_defined() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.head(inputs)
            return out

    assert find_head(Odd(), torch.randn(4, 3)) == ("input of head", 2)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "the loader is empty"),
        (
            [torch.randn(2, 1, 8, 8)],
            r"must give batches \(inputs, labels\), got a Tensor: for a single batch pass \[\(inputs, l",
        ),
        (None, "must be a DataLoader or a list of batches .*, got None"),
        (
            TensorDataset(torch.randn(2, 1, 8, 8), torch.tensor([0, 1])),
            r"got a data set \(TensorDataset\): pass DataLoader\(dataset, batch_size=64\)",
        ),
    ],
)
def test_loaders_without_labels_are_refused(net: Net, batches: Any, message: str) -> None:
    with pytest.raises(AdaNPCError, match=message):
        adanpc.wrap(net, batches)


def test_an_unknown_layer_is_named_with_those_there_are(net: Net) -> None:
    with pytest.raises(AdaNPCError, match="the model has no layer 'features'; it has: body, body.0"):
        adanpc.wrap(net, loader(), layer="features")


def test_a_layer_that_does_not_run_is_refused() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    model.spare = nn.Linear(2, 2)
    model.forward = lambda inputs: model[1](model[0](inputs))  # type: ignore[method-assign]
    with pytest.raises(AdaNPCError, match="layer 'spare' returned no tensor"):
        extract(model, "spare", torch.randn(1, 2))


def test_preprocessing_is_described_stably() -> None:
    class Scale:
        def __repr__(self) -> str:
            return "Scale(0.5)"

    assert describe(None) == ""
    assert describe("mean 0.5, std 0.5") == "mean 0.5, std 0.5"
    assert describe(Scale()) == "Scale(0.5)"
    assert describe(torch.relu) == describe(torch.relu)
    assert "0x" not in describe(object())
    assert describe(test_preprocessing_is_described_stably).endswith(".test_preprocessing_is_described_stably")


def test_preprocessing_is_taken_from_the_data_set(net: Net) -> None:
    given = loader()
    given.dataset.transform = "divide by 255"  # type: ignore[attr-defined]
    assert adanpc.wrap(net, given).recipe["preprocessing"] == "divide by 255"
    assert adanpc.wrap(net, given, preprocessing="other").recipe["preprocessing"] == "other"


def test_a_recipe_is_checked(net: Net) -> None:
    wrapped = adanpc.wrap(net, loader(), preprocessing="divide by 255")
    wrapped.check(wrapped.recipe)
    with pytest.raises(RecipeError, match="prepared by 'none', not by 'divide by 255'"):
        wrapped.check({**wrapped.recipe, "preprocessing": "none"})
    with torch.no_grad():
        net.fc.bias.add_(1)
    with pytest.raises(RecipeError, match="weights"):
        wrapped.check({**wrapped.recipe, "weights": "0" * 16})


def test_features_are_those_before_an_in_place_module_works_on_them() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    inputs = torch.randn(5, 3)
    expected = model[0](inputs).detach()
    assert (expected < 0).any()
    for layer in ("0", "input of 1"):
        torch.testing.assert_close(extract(model, layer, inputs)[0], expected)


def test_loaders_may_use_their_arrays_again(net: Net) -> None:
    images, labels = torch.randn(12, 1, 8, 8), torch.arange(12) % 4

    def reusing() -> Any:
        label = torch.zeros(4, dtype=torch.int64)
        for start in range(0, 12, 4):
            label.copy_(labels[start : start + 4])
            yield images[start : start + 4], label

    assert adanpc.wrap(net, reusing()).classifier.bank.table()["label"].tolist() == labels.tolist()


def test_streaming_data_sets_are_loaders_too(net: Net) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.randn(1, 8, 8), i % 4) for i in range(10)])

    assert len(adanpc.wrap(net, DataLoader(Stream(), batch_size=4)).classifier.bank) == 10


def test_modules_that_act_on_their_mode_are_put_back() -> None:
    class Merging(nn.Linear):
        merged = False

        def train(self, mode: bool = True) -> Merging:
            self.merged = not mode
            super().train(mode)
            return self

    model = nn.Sequential(Merging(3, 2)).train()
    find_head(model, torch.randn(4, 3))
    assert not model[0].merged
    model.eval()
    find_head(model, torch.randn(4, 3))
    assert model[0].merged


@pytest.mark.parametrize("third", [["a", "b"], [None, None]])
def test_domains_that_are_not_numbers_are_refused(net: Net, third: list[Any]) -> None:
    with pytest.raises(AdaNPCError, match="the loader's domains must be whole numbers"):
        adanpc.wrap(net, [(torch.randn(2, 1, 8, 8), torch.tensor([0, 1]), third)])


def test_a_layer_of_scalars_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (2, 3)), nn.Linear(3, 2))
    with pytest.raises(AdaNPCError, match=r"features must have shape .*, got \(6,\)"):
        extract(model, "0", torch.randn(2, 3))


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(AdaNPCError, match="must be a torch.nn.Module, got function: .* use adanpc.AdaNPC"):
        adanpc.wrap(lambda inputs: inputs, loader())  # type: ignore[arg-type]
    with pytest.raises(AdaNPCError, match="must be a torch.nn.Module, got the class Net: pass an instance of it"):
        adanpc.wrap(Net, loader())  # type: ignore[arg-type]
    with pytest.raises(AdaNPCError, match="got OrderedDict: pass the module into which you load these weights"):
        adanpc.wrap(Net().state_dict(), loader())  # type: ignore[arg-type]


class TwoHeads(nn.Module):
    """The mean of two heads, as in distilled transformers: neither makes the output alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.body(inputs)
        mean: Tensor = (self.heads[0](features) + self.heads[1](features)) / 2
        return mean


def test_where_no_head_is_found_a_layer_is_suggested_that_works() -> None:
    model = TwoHeads()
    with pytest.raises(AdaNPCError, match="such as layer='input of heads.1'"):
        adanpc.wrap(model, [(torch.randn(4, 3), torch.arange(4) % 2)])
    wrapped = adanpc.wrap(model, [(torch.randn(4, 3), torch.arange(4) % 2)], layer="input of heads.1")
    assert wrapped.classifier.bank.dim == 8


class Squeezed(nn.Module):
    """Ends in a convolution and a mean over space, as SqueezeNet does; one layer never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU())
        self.spare = nn.Linear(6, 6)
        self.classify = nn.Sequential(nn.Dropout(), nn.Conv2d(6, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.body(images))
        return logits


def test_a_model_that_ends_in_a_convolution_is_given_the_layer_before_it() -> None:
    with pytest.raises(AdaNPCError, match="such as layer='classify.0'"):
        adanpc.wrap(Squeezed(), loader())
    assert adanpc.wrap(Squeezed(), loader(), layer="classify.0").classifier.bank.dim == 6


def test_where_no_layer_runs_the_model_itself_is_suggested() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs @ self.head.weight.T

    with pytest.raises(AdaNPCError, match="such as layer='', the output of the model"):
        adanpc.wrap(Plain(), [(torch.randn(4, 3), torch.arange(4) % 2)])
    assert adanpc.wrap(Plain(), [(torch.randn(4, 3), torch.arange(4) % 2)], layer="").classifier.bank.dim == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused_because_hooks_cannot_see_into_it() -> None:
    model = torch.jit.trace(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(2, 3))
    for layer in (None, "0"):
        with pytest.raises(AdaNPCError, match="TorchScript.*: wrap the module that it was made from"):
            adanpc.wrap(model, [(torch.randn(4, 3), torch.arange(4) % 2)], layer=layer)


def test_an_error_of_the_model_says_what_it_was_called_with(net: Net) -> None:
    wrapped = adanpc.wrap(net, loader())
    with pytest.raises(RuntimeError) as caught:
        wrapped.step(torch.randn(2, 1, 8, 8).double())
    (note,) = caught.value.__notes__
    assert note == (
        "adanpc called Net, whose weights are float32 on cpu, with (2, 1, 8, 8) float64; "
        "the first dimension counts samples"
    )
    with pytest.raises(RuntimeError) as caught:
        extract(nn.Bilinear(2, 2, 2), "", {"input1": torch.zeros(3, 2), "input2": [[True]]})
    assert "with (3, 2) float32, (1, 1) bool; the" in caught.value.__notes__[0]
    with pytest.raises(AttributeError) as other:
        extract(nn.Flatten(), "", "a text")
    assert other.value.__notes__[0].startswith("adanpc called Flatten, which has no weights, with no tensor, but str")


def test_attributes_that_a_wrapped_model_does_not_have_cannot_be_set(net: Net) -> None:
    wrapped = adanpc.wrap(net, loader())
    wrapped.encode_size = 4
    with pytest.raises(AdaNPCError, match="has no setting 'encodesize'; did you mean 'encode_size'"):
        wrapped.encodesize = 4


class Counting(nn.Module):
    """Counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)
        self.runs = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.runs += 1
        logits: Tensor = self.head(inputs)
        return logits


GOOD = (torch.ones(2, 3), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("bad", "options", "message"),
    [
        ((torch.ones(2, 3), torch.tensor([0, 4])), {}, "batch 1 of the loader: labels must be .* 0 and 3, got 4"),
        ((torch.ones(2, 3), torch.tensor([0, -1])), {"layer": "head"}, "batch 1 of the loader: labels .* got -1"),
        ((torch.ones(2, 3), torch.rand(2)), {}, r"labels must be whole numbers, got torch.float32: pass labels.long"),
        ((torch.ones(2, 3) * torch.nan, torch.tensor([0, 1])), {}, "batch 1 of the loader: feature row 0 holds NaN"),
        ((torch.ones(2, 3), torch.tensor([0, 1]), torch.tensor([0])), {}, "gave 2 inputs with 1 domains"),
    ],
)
def test_a_bad_batch_is_refused_before_the_model_runs_on_the_next(
    bad: tuple[Tensor, ...], options: dict[str, Any], message: str
) -> None:
    model = Counting()
    with pytest.raises(AdaNPCError, match=message):
        adanpc.wrap(model, [GOOD, bad, *[GOOD] * 10], **options)
    assert model.runs <= 3  # the first batch may run twice, to find the head


def test_a_batch_may_have_a_single_domain() -> None:
    wrapped = adanpc.wrap(Counting(), [(*GOOD, 5), (*GOOD, torch.tensor(7))])
    assert wrapped.classifier.bank.table()["domain"].tolist() == [5, 5, 7, 7]


def test_an_empty_batch_does_not_tell_which_layer_is_the_head() -> None:
    class Doubtful(Counting):
        """Runs another layer of the same width after its head."""

        def __init__(self) -> None:
            super().__init__()
            self.aside = nn.Linear(3, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            logits = super().forward(inputs)
            self.aside(inputs)
            return logits

    model = Doubtful()
    empty = (torch.zeros(0, 3), torch.zeros(0).long())
    for batches in ([GOOD, empty, GOOD], [empty, GOOD, GOOD]):
        wrapped = adanpc.wrap(model, batches)
        assert wrapped.layer == "input of head"
        assert wrapped.classifier.bank.table()["label"].tolist() == [0, 1, 0, 1]


def test_row_numbers_are_not_taken_for_domains() -> None:
    model = Counting()
    rows = DataLoader(TensorDataset(torch.ones(400, 3), torch.arange(400) % 4, torch.arange(400)), batch_size=40)
    with pytest.raises(AdaNPCError, match="no two of the first 120 samples have the same domain: .* leave it out"):
        adanpc.wrap(model, rows)
    assert model.runs <= 4
    few = DataLoader(TensorDataset(torch.ones(90, 3), torch.arange(90) % 4, torch.arange(90)), batch_size=40)
    assert adanpc.wrap(model, few).classifier.bank.table()["domain"].tolist() == list(range(90))


def test_a_data_set_without_labels_is_told_apart_from_a_single_batch() -> None:
    with pytest.raises(AdaNPCError, match=r"got a list of 1: its data set must give \(input, label\)"):
        adanpc.wrap(Counting(), DataLoader(TensorDataset(torch.randn(4, 3))))


def test_a_deep_model_is_not_listed_layer_by_layer() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    with pytest.raises(AdaNPCError, match="it has: 0, 1, .*, 7 and 32 more$"):
        adanpc.wrap(model, [(torch.randn(4, 2), torch.arange(4) % 2)], layer="features")


def test_labels_may_be_bytes_as_many_data_sets_store_them(net: Net) -> None:
    inputs = torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = (torch.arange(40) % 3).to(torch.uint8)
    assert torch.equal(adanpc.wrap(net, [(inputs, labels.numpy())]).classifier.bank.table()["label"], labels.long())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, "layer must be a string, got 3"),
        ({"device": "gpu"}, "device must be one that torch can use here, with float64, such as 'cpu', got 'gpu'"),
        ({"device": "meta"}, "device must be one that torch can use here, with float64, such as 'cpu', got 'meta'"),
        ({"keys": ["a"] * 6}, "keys must be whole numbers, one for each sample, got"),
        ({"classes": ["cat", "dog"]}, "labels must be between 0 and 1, got 2"),
    ],
)
def test_unusable_arguments_are_refused_in_one_sentence(net: Net, options: dict[str, Any], message: str) -> None:
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    with pytest.raises(AdaNPCError, match=message):
        adanpc.wrap(net, [(torch.randn(6, 1, 8, 8), labels)], **options)


def test_keys_of_a_step_must_be_whole_numbers(net: Net) -> None:
    wrapped = adanpc.wrap(net, [(torch.randn(6, 1, 8, 8), torch.arange(6) % 3)])
    for verb in (wrapped.step, wrapped.propose):
        with pytest.raises(LabelError, match="keys must be whole numbers"):
            verb(torch.randn(2, 1, 8, 8), keys=["a", "b"])


def test_features_that_are_not_finite_are_said_to_be(net: Net) -> None:
    with pytest.raises(FeatureError, match="feature row 0 holds NaN"):
        adanpc.wrap(net, [(torch.full((6, 1, 8, 8), float("nan")), torch.arange(6) % 3)])


@pytest.mark.parametrize("device", ["cuda:99", "meta"])
def test_a_device_that_cannot_be_used_is_refused_before_the_model_runs(device: str) -> None:
    model = Counting()
    with pytest.raises(AdaNPCError, match=f"device must be one that torch can use here, .* got '{device}'"):
        adanpc.wrap(model, [GOOD], device=device)
    assert model.runs == 0


def test_a_wrapped_model_says_what_its_guard_sees_and_asks_people() -> None:
    torch.manual_seed(0)
    centers = torch.eye(4)[:, :3] * 3 + 1
    labels = torch.arange(400) % 4
    inputs = centers[labels] + 0.3 * torch.randn(400, 3)
    wrapped = adanpc.wrap(nn.Sequential(nn.Identity(), nn.Linear(3, 4)), [(inputs[:200], labels[:200])])
    shifted = inputs[200:] + torch.tensor([1.5, -1.0, 0.0])
    wrapped.step(shifted)
    assert wrapped.signs() == wrapped.classifier.signs()
    assert wrapped.signs().queries > 100
    asked = wrapped.ask(shifted, most=3)
    assert asked == wrapped.classifier.ask(wrapped.features(shifted), most=3)
    assert 0 < len(asked) <= 3
    wrapped.apply(asked[0].answered(int(labels[200 + asked[0].query])))
