"""Learns source rows that need not fit into memory: they come piece by piece, several times.

The preset "safe" fits its transform to all source rows. Where these are many, it is fitted to AT_ONCE coordinates of
them instead, evenly spaced among the rows of each class in each domain: as many as are needed for the directions in
which a class varies and those that tell classes apart. Whatever depends on how densely the rows lie is computed from
all of them, in a second pass: how similar they are to rows of other classes, and how often they answer each other
correctly. In a third pass they join the bank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adanpc.core import safe
from adanpc.core.changes import Append
from adanpc.core.contents import Contents
from adanpc.core.estimate import Rivals, answering_groups, calibration_of, rows_to_ask
from adanpc.core.safe import SOURCE_ROWS, STREAM_ROWS, STREAM_TEMPERATURE, SafeSettings
from adanpc.core.source import Source
from adanpc.core.transform import NEAREST, SAMPLE, Transform, less_centers, per_class
from adanpc.index import unit

AT_ONCE = 1 << 26  # up to this many coordinates are learned in one change, and a transform is fitted to as many


def appending(source: Source, contents: Contents, settings: SafeSettings) -> Iterator[Append]:
    """The changes that append source rows to a bank of the preset "safe", with their features as it stores them."""
    classes = contents.settings.classes
    chosen, features = _some(source, contents.settings.dim)
    labels = source.labels[chosen]
    domains = source.domains[chosen]
    transform = contents.statistics.transform
    unfitted = transform is None
    if transform is None:
        transform = safe.fitted(features, labels, domains, classes, settings)
    centers = safe.source_centers(transform, transform(features), labels, domains, first=unfitted)
    prepared = _Prepared(source, transform, centers, contents.settings.dim)
    if unfitted:
        transform = _measured(prepared, chosen, features, classes)
    for start, rows in prepared:
        change = replace(source.change(start, rows), centered=True)
        if unfitted:
            change = replace(change, transform=transform)
            unfitted = False
        yield change


def _some(source: Source, dim: int) -> tuple[Tensor, Tensor]:
    """The numbers (m,) of rows to which a transform is fitted, in rising order, and their features (m, D).

    They are evenly spaced within each class of each domain, and each of these has one of them at least.
    """
    _, strata = torch.stack([source.domains, source.labels]).unique(dim=1, return_inverse=True)
    order = strata.argsort(stable=True)
    most = max(1, AT_ONCE // dim)
    spaced = torch.arange(min(most, len(order)), device=order.device) * len(order) // min(most, len(order))
    begins = strata[order].diff(prepend=strata.new_full((1,), -1)) > 0
    begins[spaced] = True
    chosen = order[begins].sort().values
    found = []
    for start, some in source.checked(dim):
        there = chosen[(chosen >= start) & (chosen < start + len(some))]
        found.append(some[there - start])
    return chosen, torch.cat(found)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Source rows as the bank stores them, made anew in each pass."""

    source: Source
    transform: Transform
    centers: dict[int, Tensor]  # of domains
    dim: int

    def rows(self, features: Tensor, domains: Tensor) -> Tensor:
        """Features (n, D) of rows in these domains (n,) as the bank stores them."""
        transformed = self.transform(features)
        return safe.directed(less_centers(transformed, domains, self.centers), transformed)

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for start, some in self.source.checked(self.dim):
            yield start, self.rows(some, self.source.domains[start : start + len(some)])


def _measured(prepared: _Prepared, chosen: Tensor, features: Tensor, classes: int) -> Transform:
    """The transform, with what is known of how densely all rows lie.

    Args:
        prepared: all rows.
        chosen: (m,) the numbers of some rows, which are compared with all.
        features: (m, D) the features of these.
        classes: the number of classes of the bank.
    """
    source = prepared.source
    groups, own_error = answering_groups(source.domains)
    # In float64 their products are exact, so the result does not depend on how rows are cut into pieces.
    rows = unit(prepared.rows(features, source.domains[chosen])).double()
    labels = source.labels[chosen]
    apart = _evenly(len(chosen)).to(chosen.device)
    foreign = Rivals(rows[apart], labels[apart], NEAREST)
    asked = rows_to_ask(labels, groups[chosen])
    answering = Rivals(rows[asked], groups[chosen][asked], SOURCE_ROWS)
    for start, some in prepared:
        here = slice(start, start + len(some))
        at_length_one = unit(some).double()
        foreign.see(at_length_one, source.labels[here], source.labels[here])
        answering.see(at_length_one, groups[here], source.labels[here])
    voters = prepared.transform.per_class
    if voters == per_class(labels):
        # As many vote as the rows of the sample allow. There may be more of each class among all rows.
        voters = per_class(source.labels)
    calibration = calibration_of(
        rows[asked],
        labels[asked],
        source.domains[chosen][asked],
        answering.answers(classes, voters),
        own_error,
        witnesses=STREAM_ROWS,
        temperature=STREAM_TEMPERATURE,
    )
    return replace(
        prepared.transform,
        foreign=foreign.means(),
        calibration=calibration.packed().to(features.device),
        voters=prepared.transform.voters.new_tensor([voters]),
    )


def _evenly(count: int) -> Tensor:
    """At most SAMPLE of the first ``count`` numbers, evenly spaced."""
    size = min(SAMPLE, count)
    return torch.arange(size) * count // max(size, 1)
