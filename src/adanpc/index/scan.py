"""Scans, which read all rows once for each batch of queries: approximate products with a bound on their error.

A scan never decides the result. It only tells which rows are worth scoring exactly.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy
import torch
from torch import Tensor

from adanpc.index.blocks import TILE
from adanpc.index.grid import Array
from adanpc.index.kernels import LONGEST, ByteQueries, chosen, multiply_rows, roundings

numkong: Any = import_module("numkong") if find_spec("numkong") else None  # installed by the extra `fast`

MULTIPLYING = ("avx512", "avx2")  # kernels that multiply rows faster than NumPy does
CACHED = 1 << 23  # float32 numbers that fit into the cache: 32 MiB
ALONE = 9216  # size of a matrix from which OpenBLAS, NumPy's BLAS, wakes threads to multiply it
COORDINATES = 1 << 20  # coordinates scored in float64 at once, few enough to stay in the cache
CONVERTED = 16  # tiles converted to float32 at once, few enough to stay in the cache
LONG_ENOUGH = 32  # row length from which integer products pay off; torch 2.13 gets them wrong for one coordinate
MULTIPLIED = 128  # tiles of int8 rows multiplied at once, few enough for their products to stay in the cache
INPUT_ROUNDING = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}  # by torch's float32 matmul precision


def scan(blocks: list[Tensor], queries: Tensor, out: Tensor) -> Tensor:
    """Multiplies all stored codes, in blocks (n, D), by unit queries (B, D), and writes into ``out`` (tiles, B, 64).

    Returns a bound (B,) on the error of each query's products, relative to the length of the codes.
    """
    if out.is_cpu and queries.shape[0] < 8:
        return _scan_for_few(blocks, queries, out)
    return _scan_for_many(blocks, queries, out)


def _scan_for_few(blocks: list[Tensor], queries: Tensor, out: Tensor) -> Tensor:
    """``scan`` for fewer than eight queries in main memory."""
    count, dim = queries.shape
    if blocks[0].dtype == torch.int8 and dim > LONGEST:
        return _scan_for_many(blocks, queries, out)  # all other scans sum in 32 bits
    float32 = blocks[0].dtype == torch.float32
    coordinates = out.shape[0] * TILE * dim
    path = multiplying_path(coordinates, float32=float32)
    if path is not None:
        return kernel_scan(path, blocks, queries, out)
    if not float32 and numkong is not None:
        return numkong_scan(blocks, queries, out)
    if float32 and count <= 2 and cached(coordinates):
        return numpy_scan(blocks, queries, out)
    return _scan_for_many(blocks, queries, out)


def multiplying_path(coordinates: int, *, float32: bool) -> str | None:
    """Returns the kernels to multiply so many coordinates by a few queries in this thread; None if others are faster.

    Beyond the cache, all of torch's threads together read float32 rows faster than one.
    """
    path = chosen()
    alone = not float32 or torch.get_num_threads() == 1 or cached(coordinates)
    if path in MULTIPLYING and alone:
        return path
    return None


def cached(coordinates: int) -> bool:
    """Returns whether so many float32 coordinates stay in the cache, so that two threads read them no faster."""
    return coordinates <= CACHED and torch.get_num_threads() <= 2


def _scan_for_many(blocks: list[Tensor], queries: Tensor, out: Tensor) -> Tensor:
    """``scan`` in torch, on any device."""
    whole_numbers = blocks[0].dtype == torch.int8 and LONG_ENOUGH <= queries.shape[1] <= LONGEST
    if out.is_cpu and whole_numbers and multiplies_integers():
        return integer_scan(blocks, queries, out)
    with torch.autocast(out.device.type, enabled=False):  # which would compute some products in bfloat16
        return torch_scan(blocks, queries, out)


def kernel_scan(path: str, blocks: list[Tensor], queries: Tensor, out: Tensor) -> Tensor:
    """``scan`` with a compiled kernel, in this thread; each row is read once for every two queries."""
    exact = queries.numpy()
    count, dim = exact.shape
    multiplied: Array | ByteQueries = numpy.ascontiguousarray(exact)
    if blocks[0].dtype == torch.int8:
        multiplied = ByteQueries.of(exact)
        left = exact - multiplied.read()
        errors = numpy.sqrt(numpy.vecdot(left, left)) * 1.001 + 2.0**-22  # sums are exact and rounded only once
    else:
        errors = numpy.full(count, kernel_error(dim))
    products = out.numpy()
    done = 0
    for block in blocks:
        tiles = len(block) // TILE
        multiply_rows(path, block.numpy(), multiplied, products[done : done + tiles])
        done += tiles
    return torch.from_numpy(errors)


def kernel_error(dim: int) -> float:
    """Returns a bound on the error of a kernel's float32 products, relative to the length of the codes."""
    rounded = roundings(dim) * 2.0**-24
    return 1.01 * rounded / (1 - rounded)


def numpy_scan(blocks: list[Tensor], queries: Tensor, out: Tensor) -> Tensor:
    """``scan`` for float32 rows and one or two queries, row by row in this thread.

    If the rows fit into the cache, this takes two thirds of the time of torch's scan in one thread, and as long as
    torch's scan in two threads.
    """
    dim = queries.shape[1]
    multiply: Any = numpy.vecdot
    if TILE * dim < ALONE:
        multiply = numpy.matmul  # tile by tile, which takes two thirds of the time for short rows
    products = out.numpy()
    with numpy.errstate(all="ignore"):  # slots that were never written hold arbitrary values
        for number, query in enumerate(queries.numpy()):
            done = 0
            for block in blocks:
                tiles = block.numpy().reshape(-1, TILE, dim)
                multiply(tiles, query, out=products[done : done + len(tiles), number])
                done += len(tiles)
    return queries.new_full((len(queries),), 1.01 * dim * 2.0**-24)


def torch_scan(blocks: list[Tensor], queries: Tensor, out: Tensor) -> Tensor:
    """``scan`` by batched products, oriented so that BLAS reads rows at memory speed."""
    batch, dim = queries.shape
    done = 0
    for block in blocks:
        converted = CONVERTED
        if block.dtype == torch.float32:
            converted = len(block)  # nothing to convert, so all tiles at once
        for tiles in block.view(-1, TILE, dim).split(converted):
            target = out[done : done + len(tiles)]
            done += len(tiles)
            rows = tiles.float()
            if batch == 1:
                torch.bmm(rows, queries.T.expand(len(rows), dim, 1), out=target.transpose(1, 2))
            elif batch < 8:
                target.copy_(torch.bmm(rows, queries.T.expand(len(rows), dim, batch)).transpose(1, 2))
            else:
                torch.bmm(queries.expand(len(rows), batch, dim), rows.transpose(1, 2), out=target)
    return queries.new_full((batch,), 1.01 * (dim * 2.0**-24 + 2 * input_rounding()))


def integer_scan(blocks: list[Tensor], queries: Tensor, out: Tensor) -> Tensor:
    """``scan`` for int8 rows and many queries by integer products, in a fifth of the time that float32 takes.

    A query is the sum of two parts with one byte per coordinate, so that almost nothing is lost by rounding it.
    """
    batch, dim = queries.shape
    coarse_scale = _step_of(queries)  # (B, 1)
    coarse = (queries / coarse_scale).round()
    left = queries - coarse * coarse_scale
    fine_scale = _step_of(left)
    fine = (left / fine_scale).round()
    left = left - fine * fine_scale
    codes = torch.cat([coarse, fine]).to(torch.int8)
    done = 0
    for block in blocks:
        for tiles in block.view(-1, TILE, dim).split(MULTIPLIED):
            products = torch._int_mm(codes, tiles.view(-1, dim).T).view(2, batch, -1, TILE).transpose(1, 2)
            target = out[done : done + len(tiles)]
            torch.mul(products[0], coarse_scale, out=target)
            target.addcmul_(products[1], fine_scale)
            done += len(tiles)
    errors: Tensor = left.norm(dim=1) * 1.001 + (dim + 8) * 2.0**-23
    return errors


def _step_of(vectors: Tensor) -> Tensor:
    """Returns the value (B, 1) of one unit of a byte in each of these vectors (B, D)."""
    return vectors.abs().amax(1, keepdim=True).clamp(min=2.0**-48) / 127


@cache
def multiplies_integers() -> bool:
    """Returns whether int8 matrices are multiplied fast and correctly here: some processors clip sums at 16 bits."""
    if not torch.backends.mkldnn.is_available():
        return False  # without it, torch falls back to a slow loop
    extremes = torch.tensor([127, -127, 127], dtype=torch.int8).repeat_interleave(171)[:512].repeat(TILE, 1)
    products = torch._int_mm(extremes, extremes.T)
    return bool((products == 512 * 127**2).all())


def input_rounding() -> float:
    """Returns by how much torch may round the factors of a product at the current matmul precision."""
    try:
        return INPUT_ROUNDING[torch.get_float32_matmul_precision()]
    except RuntimeError:  # set separately for each backend by torch's newer switches: assume the coarsest
        return INPUT_ROUNDING["medium"]


def numkong_scan(blocks: list[Tensor], queries: Tensor, out: Tensor) -> Tensor:
    """``scan`` for int8 and float16 rows with the SIMD kernels of NumKong; queries are rounded to the rows' type."""
    exact = queries.numpy()
    if blocks[0].dtype == torch.int8:
        scale = numpy.maximum(numpy.abs(exact).max(1, keepdims=True), 2.0**-24) / 127
        codes = numpy.rint(exact / scale).astype(numpy.int8)
        kernel = {"metric": "dot", "out_dtype": "float32"}
    else:
        scale = numpy.ones((1, 1), numpy.float32)
        codes = exact.astype(numpy.float16)
        kernel = {"metric": "dot"}
    done = 0
    target = out.numpy()
    # In this thread: on two cores, a second thread only competed with torch's own threads, which keep spinning.
    for block in blocks:
        products = numpy.asarray(numkong.cdist(codes, block.numpy(), **kernel)).reshape(len(codes), -1, TILE)
        numpy.multiply(products.transpose(1, 0, 2), scale, out=target[done : done + products.shape[1]])
        done += products.shape[1]
    left = exact - codes * scale
    return torch.from_numpy(numpy.sqrt(numpy.vecdot(left, left)) * 1.001 + queries.shape[1] * 2.0**-23)
