"""What a bank holds, for other libraries: a pandas table, a SciPy graph. Both are imported when they are asked for."""

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
    """A pandas DataFrame with one line for each row, in the order of ids. Features stay in the bank."""
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
    """The k most similar rows of each row but itself, as a CSR array (n, n) of similarities, in the order of ids.

    Rows that may not vote have neighbors, and are nobody's neighbor.
    """
    k = require.whole("k", k, least=1)
    sparse = require.library("scipy.sparse", "a graph of the bank")
    slots = contents.held_slots()
    ids = contents.index.ids(slots)
    values = []
    columns = []
    counts = [torch.zeros(1, dtype=torch.int64)]
    for start in range(0, len(ids), CHUNK):
        part = slice(start, start + CHUNK)
        rows = unit(contents.index.rows(slots[part]))
        found = contents.nearest(rows, k, exclude=ids[part, None])
        present = found.ids >= 0
        columns.append(torch.searchsorted(ids, found.ids[present]).cpu())
        values.append(found.similarity[present].cpu())
        counts.append(present.sum(1).cpu())
    starts = torch.cat(counts).cumsum(0)
    data = torch.cat([torch.zeros(0, dtype=torch.float64), *values])
    indices = torch.cat([torch.zeros(0, dtype=torch.int64), *columns])
    return sparse.csr_array((data.numpy(), indices.numpy(), starts.numpy()), shape=(len(ids), len(ids)))
