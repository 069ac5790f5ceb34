"""The frozen vote as an ONNX model, which maps features to the answers of a bank that no longer learns.

The model follows the computation of the bank step by step: unit features on the grid of 2**-24, exact products in
float64, the k largest with ties broken by the lowest id, and the vote. So the runtime finds the same rows, and its
probabilities differ at most by the rounding of an exponential.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from adanpc import require
from adanpc.core import AdaNPC, Contents, Origin
from adanpc.core.centering import BOUND, Centering
from adanpc.core.contents import Pool
from adanpc.core.safe import SHARPNESS_OF_ANSWERS, SOURCE_ROWS, SOURCE_TEMPERATURE, SafeSettings
from adanpc.core.table import ACTIVE
from adanpc.core.transform import Transform
from adanpc.core.vote import FLOOR, PER_CLASS
from adanpc.errors import AdaNPCError, EmptyBankError
from adanpc.index.grid import GRID
from adanpc.store.check import BankFileError
from adanpc.store.file import replace_or_explain

OPSET = 18
IR_VERSION = 10  # older runtimes can read it, too
MOST_BYTES = 2**31 - 2**20  # an ONNX file is a single protobuf message, which must be smaller than 2 GiB
DOUBLE, SINGLE, WHOLE = 11, 1, 7  # the numbers of these types in ONNX


class Graph:
    """Nodes that are added one after another; values are referred to by the names of the outputs."""

    def __init__(self) -> None:
        self.helper = require.library("onnx.helper", "a model in ONNX")
        self._from_array = require.library("onnx.numpy_helper", "a model in ONNX").from_array
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def constant(self, value: Any, dtype: Any = numpy.float64) -> str:
        """Adds numbers to the model, and returns their name."""
        name = f"c{len(self.initializers)}"
        self.initializers.append(self._from_array(numpy.asarray(value, dtype), name))
        return name

    def add(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Adds a node of a kind, and returns the name of its output."""
        return self.several(kind, *inputs, outputs=[output or f"n{len(self.nodes)}"], **attributes)[0]

    def several(self, kind: str, *inputs: str, outputs: Sequence[str], **attributes: Any) -> Sequence[str]:
        """Adds a node with several outputs, and returns their names."""
        self.nodes.append(self.helper.make_node(kind, list(inputs), list(outputs), **attributes))
        return outputs

    def cast(self, value: str, to: int, output: str = "") -> str:
        """Returns a value converted to another type."""
        return self.add("Cast", value, to=to, output=output)

    def total(self, value: str, axis: int, kind: str = "ReduceSum", *, keep: bool = False) -> str:
        """Returns the sum along an axis, or another reduction such as the largest or smallest value."""
        return self.add(kind, value, self.constant([axis], numpy.int64), keepdims=int(keep))


def write_onnx(classifier: AdaNPC, path: Path) -> None:
    """Writes a model in which the rows that a classifier holds now vote; the model never learns.

    With the preset "paper", it gives the same answers as ``predict``; with "safe", those of ``Prediction.frozen``, the
    vote of the source rows. Input: ``features`` (B, D) float32. Outputs: ``probs`` (B, C) float32, ``labels`` (B,)
    int64, and ``neighbors`` (B, K) int64, the ids of the rows that voted.
    """
    contents = classifier.bank.contents
    size = 4 * len(contents) * (contents.settings.dim + contents.settings.soft * contents.settings.classes)
    if size > MOST_BYTES:
        raise BankFileError(
            f"{path} was not saved: an ONNX file holds less than 2 GiB, and the rows have {size:,} bytes"
        )
    graph = Graph()
    settings = classifier.settings
    features = graph.cast("features", DOUBLE)
    if isinstance(settings, SafeSettings):
        queries = _moved_to_origin(graph, features, contents.statistics.transform)
        pools: list[Pool] = [Pool(SOURCE_ROWS, source=True)]
        rule = "classwise"
        temperature = SOURCE_TEMPERATURE / SHARPNESS_OF_ANSWERS
        per_class = contents.transform().per_class
    else:
        queries = _centered(graph, features, contents, settings.centering)
        pools = settings.pools
        rule = settings.rule
        temperature = settings.temperature
        per_class = PER_CLASS
    voters = [_voters(contents, pool) for pool in pools]
    similarity, places = _nearest(graph, queries, pools, voters)
    labels = _of_voters(graph, voters, "label", places)
    graph.add("Identity", _of_voters(graph, voters, "id", places), output="neighbors")
    classes = contents.settings.classes
    members = _members(graph, labels, classes)
    if contents.settings.soft and rule != "classwise":  # the rule "classwise" only uses labels
        members = graph.cast(_of_voters(graph, voters, "soft", places), DOUBLE)
    probs = _vote(graph, rule, similarity, members, temperature, classes, per_class)
    graph.cast(probs, SINGLE, output="probs")
    graph.add("ArgMax", "probs", axis=1, keepdims=0, output="labels")
    _write(graph, contents, path)


def _unit(graph: Graph, features: str) -> str:
    """Returns what ``index.unit`` returns, in float64."""
    sizes = graph.add("Abs", features)
    largest = graph.total(sizes, 1, "ReduceMax", keep=True)
    divisor = graph.add("Max", largest, graph.constant(1e-300))
    scaled = graph.add("Div", features, divisor)
    # The length is computed from whole numbers, because their squares add up without rounding.
    steps = graph.constant(2.0**20)
    rounded = graph.add("Round", graph.add("Mul", scaled, steps))
    whole = graph.cast(rounded, WHOLE)
    squares = graph.total(graph.add("Mul", whole, whole), 1, keep=True)
    root = graph.add("Sqrt", graph.cast(squares, DOUBLE))
    length = graph.add("Max", root, graph.constant(1.0))
    factor = graph.add("Div", steps, length)
    return _snap(graph, graph.add("Mul", scaled, factor))


def _snap(graph: Graph, values: str) -> str:
    """Returns the nearest multiples of 2**-24."""
    grid = graph.constant(GRID)
    rounded = graph.add("Round", graph.add("Mul", values, grid))
    return graph.add("Div", rounded, grid)


def _as_single(graph: Graph, values: str) -> str:
    """Returns float64 numbers rounded to float32 precision."""
    return graph.cast(graph.cast(values, SINGLE), DOUBLE)


def _directed(graph: Graph, moved: str, instead: str) -> str:
    """Returns moved features at length one; a feature that was moved to the origin keeps its earlier direction."""
    moved = _as_single(graph, moved)
    size = graph.total(graph.add("Abs", moved), 1, "ReduceMax", keep=True)
    nowhere = graph.add("Equal", size, graph.constant(0.0))
    return _unit(graph, graph.add("Where", nowhere, instead, moved))


def _centered(graph: Graph, features: str, contents: Contents, centering: Centering) -> str:
    """Returns the queries as ``Centering.queries`` centers them if each comes next, at length one."""
    statistics = contents.statistics
    mean = statistics.source_mean
    if centering.mode == "none" or mean is None:
        return _unit(graph, features)
    if centering.unit_features:
        features = _unit(graph, features)
    if centering.mode == "source":
        means = graph.constant(mean.cpu())
    else:
        total = statistics.stream_total
        if total is None:
            total = torch.zeros_like(mean)
        totals = graph.add("Add", graph.constant(total.cpu()), features)
        known = graph.constant((centering.prior * mean).cpu())
        count = graph.constant(float(statistics.stream_count + 1 + centering.prior))
        means = graph.add("Div", graph.add("Add", totals, known), count)
    less = graph.add("Clip", graph.add("Sub", features, means), graph.constant(-BOUND), graph.constant(BOUND))
    return _directed(graph, less, features)


def _moved_to_origin(graph: Graph, features: str, transform: Transform | None) -> str:
    """Returns the queries as the preset "safe" moves them if nothing is known about the stream, at length one."""
    if transform is None:
        raise EmptyBankError("no row of the bank may vote: learn source rows first")
    if float(transform.power) == 0.5:
        features = graph.add("Mul", graph.add("Sign", features), graph.add("Sqrt", graph.add("Abs", features)))
    rooted = _unit(graph, features)
    along = _snap(graph, graph.add("MatMul", rooted, graph.constant(transform.directions.T.cpu())))
    taken = _snap(graph, graph.add("MatMul", along, graph.constant(transform.damped.cpu())))
    damped = graph.add("Sub", rooted, taken)
    telling = _snap(graph, graph.add("MatMul", damped, graph.constant(transform.telling.T.cpu())))
    added = _snap(graph, graph.add("MatMul", telling, graph.constant(transform.amplified.cpu())))
    transformed = graph.add("Add", damped, added)
    moved = graph.add("Sub", transformed, graph.constant(transform.origin.cpu()))
    return _directed(graph, moved, _as_single(graph, transformed))


def _voters(contents: Contents, pool: Pool) -> dict[str, Tensor]:
    """Returns the columns and features of the rows of a pool that may vote, in the order of ids."""
    slots = contents.held_slots()
    table = contents.table_of(slots)
    voting = table["state"] == ACTIVE
    if pool.source is not None:
        voting &= (table["origin"] == int(Origin.SOURCE)) == pool.source
    found = {name: column[voting].cpu() for name, column in table.items() if name in ("id", "label", "soft")}
    if not len(found["id"]):
        raise EmptyBankError("no row of the bank may vote: append source rows first, or restore vetoed ones")
    found["feature"] = contents.index.rows(slots[voting]).cpu()
    return found


def _of_voters(graph: Graph, voters: Sequence[dict[str, Tensor]], column: str, places: str) -> str:
    """Returns the values of a column for the rows at these places (B, K) among the voters of all pools."""
    values = torch.cat([pool[column] for pool in voters])
    return graph.add("Gather", graph.constant(values, values.numpy().dtype), places, axis=0)


def _nearest(graph: Graph, queries: str, pools: Sequence[Pool], voters: Sequence[dict[str, Tensor]]) -> tuple[str, str]:
    """Returns the similarities (B, K) of the rows that vote, largest first, and their places among all voters."""
    similarities = []
    places = []
    before = 0
    for pool, table in zip(pools, voters, strict=True):
        count = len(table["id"])
        rows = graph.cast(graph.constant(table["feature"].T, numpy.float32), DOUBLE)
        similarity, place = _largest(graph, graph.add("MatMul", queries, rows), min(pool.k, count))
        similarities.append(similarity)
        places.append(graph.add("Add", place, graph.constant(before, numpy.int64)))
        before += count
    if len(pools) == 1:
        return similarities[0], places[0]
    both = graph.add("Concat", *similarities, axis=1)
    width = sum(min(pool.k, len(table["id"])) for pool, table in zip(pools, voters, strict=True))
    similarity, order = _largest(graph, both, width)
    return similarity, graph.add("GatherElements", graph.add("Concat", *places, axis=1), order, axis=1)


def _largest(graph: Graph, values: str, count: int) -> tuple[str, str]:
    """Returns the largest values for each query and their places; among equal values, lower places come first."""
    outputs = [f"largest{len(graph.nodes)}", f"place{len(graph.nodes)}"]
    graph.several("TopK", values, graph.constant([count], numpy.int64), outputs=outputs, axis=1, largest=1, sorted=1)
    return outputs[0], outputs[1]


def _members(graph: Graph, labels: str, classes: int) -> str:
    """Returns whether each neighbor belongs to each class as numbers (B, K, C)."""
    column = graph.add("Unsqueeze", labels, graph.constant([2], numpy.int64))
    return graph.cast(graph.add("Equal", column, graph.constant(numpy.arange(classes), numpy.int64)), DOUBLE)


def _vote(
    graph: Graph, rule: str, similarity: str, members: str, temperature: float, classes: int, per_class: int
) -> str:
    """Returns the probabilities (B, C) of ``core.vote`` if no neighbor is missing."""
    if rule == "classwise":
        return _classwise(graph, similarity, members, temperature, per_class)
    if rule == "paper":
        return graph.add("Softmax", _tally(graph, similarity, members), axis=1)
    if rule == "uniform":
        ones = _ones(graph, similarity)
        weights = graph.add("Div", ones, graph.total(ones, 1, keep=True))
    elif rule == "rank":
        weights = _by_rank(graph, similarity)
    elif rule in ("share", "published"):
        weights = graph.add("Softmax", graph.add("Div", similarity, graph.constant(temperature)), axis=1)
    else:
        raise AdaNPCError(f"the vote rule {rule!r} has no ONNX graph yet: add one to store/onnx_file.py")
    probs = _tally(graph, weights, members)
    if rule == "published":
        probs = graph.add("Add", probs, graph.constant(FLOOR))
        probs = graph.add("Div", probs, graph.constant(1 + classes * FLOOR))
    return probs


def _ones(graph: Graph, similarity: str) -> str:
    """Returns ones in the shape of the similarities (B, K)."""
    zeros = graph.add("Mul", similarity, graph.constant(0.0))
    return graph.add("Add", zeros, graph.constant(1.0))


def _by_rank(graph: Graph, similarity: str) -> str:
    """Returns the weights (B, K) of the rule "rank" for neighbors sorted by descending similarity."""
    ones = _ones(graph, similarity)
    counted = graph.add("CumSum", ones, graph.constant(1, numpy.int64))  # 1, 2, …
    votes = graph.add("Div", ones, graph.add("Add", counted, ones))  # 1/2, 1/3, …
    return graph.add("Div", votes, graph.total(votes, 1, keep=True))


def _tally(graph: Graph, votes: str, members: str) -> str:
    """Returns the sum (B, C) of the votes (B, K) for each class."""
    column = graph.add("Unsqueeze", votes, graph.constant([2], numpy.int64))
    return graph.total(graph.add("Mul", column, members), 1)


def _classwise(graph: Graph, similarity: str, members: str, temperature: float, per_class: int) -> str:
    """Returns the probabilities of the rule "classwise" for neighbors sorted by descending similarity."""
    # The running count of neighbors in each class: a neighbor counts if it is among the first of its class.
    so_far = graph.add("CumSum", members, graph.constant(1, numpy.int64))
    among_first = graph.cast(graph.add("LessOrEqual", so_far, graph.constant(float(per_class))), DOUBLE)
    counted = graph.add("Mul", members, among_first)
    sums = _tally(graph, similarity, counted)
    missing = graph.add("Sub", graph.constant(float(per_class)), graph.total(counted, 1))
    farthest = graph.total(similarity, 1, "ReduceMin", keep=True)
    known = graph.add("Add", sums, graph.add("Mul", missing, farthest))
    evidence = graph.add("Div", known, graph.constant(float(per_class)))
    return graph.add("Softmax", graph.add("Div", evidence, graph.constant(temperature)), axis=1)


def _write(graph: Graph, contents: Contents, path: Path) -> None:
    helper = graph.helper
    settings = contents.settings
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "frozen vote",
            [helper.make_tensor_value_info("features", SINGLE, ["B", settings.dim])],
            [
                helper.make_tensor_value_info("probs", SINGLE, ["B", settings.classes]),
                helper.make_tensor_value_info("labels", WHOLE, ["B"]),
                helper.make_tensor_value_info("neighbors", WHOLE, ["B", "K"]),
            ],
            graph.initializers,
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="adanpc",
    )
    helper.set_model_props(model, {"classes": "\n".join(settings.names)})
    data = model.SerializeToString()
    replace_or_explain(path, lambda new: _write_bytes(new, data))


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)
