"""A bank's rows for other libraries: a pandas table and a SciPy graph. Either library is imported only when needed."""

from __future__ import annotations

from typing import Any

import torch

from adanpc import require
from adanpc.core.contents import Contents
from adanpc.core.table import VETOED
from adanpc.core.types import Origin
from adanpc.index import unit

CHUNK = 1024  # rows whose neighbors are searched at once


def to_pandas(contents: Contents) -> Any:
    """A pandas DataFrame with one line for each row, ordered by id. It does not contain the features."""
    pandas = require.library("pandas", "a table of the bank")
    table = contents.table("id", "label", "origin", "state", "domain", "key", "confidence")
    columns: dict[str, Any] = {name: column.cpu().numpy() for name, column in table.items()}
    names = contents.settings.names
    if names:
        columns["class"] = [names[label] for label in columns["label"]]
    columns["origin"] = [Origin(origin).name.lower() for origin in columns["origin"]]
    columns["vetoed"] = columns.pop("state") == VETOED
    return pandas.DataFrame(columns).set_index("id")


def knn_graph(contents: Contents, k: int) -> Any:
    """The k rows most similar to each row, itself excluded: a CSR array (n, n) of similarities, ordered by id.

    A vetoed row has neighbors but is not a neighbor of any row.
    """
    k = require.whole("k", k, least=1)
    sparse = require.library("scipy.sparse", "a graph of the bank")
    slots = contents.held_slots()
    ids = contents.index.ids(slots)
    count = len(ids)
    # Each list begins so that it has the right type even if there are no rows.
    values = [torch.zeros(0, dtype=torch.float64)]
    columns = [torch.zeros(0, dtype=torch.int64)]
    counts = [torch.zeros(1, dtype=torch.int64)]  # the first line of a CSR array begins at 0
    for start in range(0, count, CHUNK):
        part = slice(start, start + CHUNK)
        rows = unit(contents.index.rows(slots[part]))
        found = contents.nearest(rows, k, exclude=ids[part, None])
        present = found.ids >= 0
        places = torch.searchsorted(ids, found.ids[present])
        columns.append(places.cpu())
        values.append(found.similarity[present].cpu())
        counts.append(present.sum(1).cpu())
    data = torch.cat(values).numpy()
    indices = torch.cat(columns).numpy()
    starts = torch.cat(counts).cumsum(0).numpy()
    return sparse.csr_array((data, indices, starts), shape=(count, count))
