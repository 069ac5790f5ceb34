"""Reading all rows once for each batch of queries: approximate products, with a bound on their error.

A scan never decides an answer: it only says which rows are worth an exact look.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy
import torch
from torch import Tensor

numkong: Any = import_module("numkong") if find_spec("numkong") else None  # the extra `fast`

CONVERTED = 16  # tiles made float32 at once: what the cache holds
TILE = 64  # rows scanned together; every block of rows holds whole tiles
INPUT_ROUNDING = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}  # of torch's float32 matmul precisions


def scan(blocks: list[Tensor], queries: Tensor, out: Tensor) -> Tensor:
    """Writes the products of all stored codes, blocks of (n, D), and unit queries (B, D) into ``out`` (tiles, B, 64).

    Returns a bound on the error of each query's products, as a share of the length of the codes (B,).
    """
    fast = numkong is not None and len(queries) < 8 and out.device.type == "cpu" and blocks[0].dtype != torch.float32
    with torch.autocast(out.device.type, enabled=False):  # it would compute some products in bfloat16
        return numkong_scan(blocks, queries, out) if fast else torch_scan(blocks, queries, out)


def torch_scan(blocks: list[Tensor], queries: Tensor, out: Tensor) -> Tensor:
    """Batched products, in the orientation in which BLAS reads rows at memory speed."""
    batch, dim = queries.shape
    done = 0
    for block in blocks:
        for part in block.view(-1, TILE, dim).split(len(block) if block.dtype == torch.float32 else CONVERTED):
            target, part = out[done : done + len(part)], part.float()
            done += len(part)
            if batch == 1:
                torch.bmm(part, queries.T.expand(len(part), dim, 1), out=target.transpose(1, 2))
            elif batch < 8:
                target.copy_(torch.bmm(part, queries.T.expand(len(part), dim, batch)).transpose(1, 2))
            else:
                torch.bmm(queries.expand(len(part), batch, dim), part.transpose(1, 2), out=target)
    return queries.new_full((batch,), 1.01 * (dim * 2.0**-24 + 2 * _input_rounding()))


def _input_rounding() -> float:
    """By how much torch may round the factors of a product at the precision that is set."""
    try:
        return INPUT_ROUNDING[torch.get_float32_matmul_precision()]
    except RuntimeError:  # set by torch's newer switches, for each backend its own: take the coarsest
        return INPUT_ROUNDING["medium"]


def numkong_scan(blocks: list[Tensor], queries: Tensor, out: Tensor) -> Tensor:
    """The same for int8 and float16 rows by SIMD kernels; the query is rounded to the type of the rows."""
    if blocks[0].dtype == torch.int8:
        scale = queries.abs().amax(1, keepdim=True).clamp(min=2.0**-24) / 127
        codes, kernel = (queries / scale).round().to(torch.int8), {"metric": "dot", "out_dtype": "float32"}
    else:
        scale, codes, kernel = queries.new_ones(len(queries), 1), queries.half(), {"metric": "dot"}
    encoded = codes.numpy()
    done = 0
    for block in blocks:  # in this thread: on two cores a second one only met torch's own, which still spin
        products = numkong.cdist(encoded, block.numpy(), **kernel)
        found = torch.from_numpy(numpy.asarray(products)).view(len(queries), -1, TILE).transpose(0, 1)
        torch.mul(found, scale, out=out[done : done + len(found)])
        done += len(found)
    rounding: Tensor = (queries - codes * scale).norm(dim=1)
    return rounding * 1.001 + queries.shape[1] * 2.0**-23
