"""Counter-based random numbers: each is a function of a key and of where its element lies globally.

    place = Place((8, 512, 1024), pieces)         # the global shape; which part of each dim is here
    words(place, Key(seed, step, op), device, 1)  # chunks of 32-bit words, as (where, words)

Philox-4x32-10 of Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3",
SC 2011. The key is the 64-bit seed. The counter is (c0, c1, c2, c3) = (column // n, row, step, op),
where column is the index in the last dim, row the index of all other dims as one, and a block of
four 32-bit words serves n = 4 elements of one word or n = 2 elements of two.

Invariants: a number does not depend on what else the rank holds, nor on how it is chunked; integer
ops of torch alone, so every device gives the same bits. A tensor has at most 2**32 rows and 2**33
columns. Not here: what words become (distributions.py), ops (random.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Pieces = tuple[tuple[tuple[int, int], ...], ...]

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # Weyl increments of the key
_MASK = 0xFFFFFFFF
_CPU_CHUNK = 1 << 15  # counters: what a chunk needs stays in a core's cache
_DEVICE_CHUNK = 1 << 20  # a chunk needs some 13 tensors of as many int64: 0.1 GiB


@dataclass(frozen=True, slots=True)
class Key:
    """What a number depends on besides its element. ``step`` and ``op`` have 32 bits.

    Where each row has a seed and a step of its own, they are columns, int64[rows, 1].
    """

    seed: int | Tensor
    step: int | Tensor
    op: int


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a tensor of global ``shape``: per dim the (start, stop) that it covers."""

    shape: tuple[int, ...]
    pieces: Pieces

    @staticmethod
    def whole(shape: Sequence[int]) -> Place:
        return Place(tuple(shape), tuple(((0, n),) for n in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in dim) for dim in self.pieces)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows and columns of the local tensor, seen as a matrix, that a set of words is for.

    The words of the columns from ``skip`` on are those wanted; a block may begin before them.
    """

    rows: slice
    columns: slice
    skip: int


def words(
    place: Place, key: Key, device: torch.device, per_element: int
) -> Iterator[tuple[Chunk, list[list[Tensor]]]]:
    """For each chunk, per element of a block the 32-bit words (int64 tensors [rows, blocks]).

    Element e of block b is column ``b * n + e`` of the chunk, counted before ``skip`` is taken off.
    """
    num = 4 // per_element
    rows = _rows(place, device)
    num_rows = rows.numel()
    columns = place.pieces[-1] if place.pieces else ((0, 1),)
    if num_rows == 0:
        return
    limit = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    offset = 0  # local column
    for start, stop in columns:
        first, last = start // num, -(-stop // num)
        wide = max(1, min(last - first, limit))
        tall = max(1, limit // wide)
        for block in range(first, last, wide):
            end = min(block + wide, last)
            low, high = max(start, block * num), min(stop, end * num)
            if low >= high:
                continue
            here = slice(offset + low - start, offset + high - start)
            blocks = torch.arange(block, end, dtype=torch.int64, device=device)[None, :]
            for row in range(0, num_rows, tall):
                numbers = philox(blocks, rows[row : row + tall, None], key)
                grouped = [
                    list(numbers[e * per_element : (e + 1) * per_element]) for e in range(num)
                ]
                yield Chunk(slice(row, row + tall), here, low - block * num), grouped
        offset += stop - start


def _rows(place: Place, device: torch.device) -> Tensor:
    """The global row of each local row."""
    leading = place.shape[:-1]
    if math.prod(leading) > 1 << 32:
        raise ValueError(f"a tensor of shape {place.shape} has more than 2**32 rows")
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for size, dim in zip(leading, place.pieces[: len(leading)], strict=True):
        parts = [torch.arange(a, b, dtype=torch.int64, device=device) for a, b in dim]
        index = torch.cat(parts) if parts else rows.new_empty(0)
        rows = (rows[:, None] * size + index[None, :]).reshape(-1)
    return rows


def philox(c0: Tensor, c1: Tensor, key: Key) -> list[Tensor]:
    """The four words of the counters (c0, c1, step, op): int64 tensors [rows, blocks].

    c0 is a row [1, blocks] and c1 a column [rows, 1]: the first rounds, which see one alone, are
    cheap.
    """
    k0, k1 = key.seed & _MASK, key.seed >> 32 & _MASK
    low = _M1 * (key.step & _MASK)
    product = c0 * _M0
    # round 1: c0 meets no other tensor yet
    a = c1 ^ (low >> 32 & _MASK) ^ k0
    b = low & _MASK
    c = (product >> 32 & _MASK) ^ (key.op & _MASK) ^ k1
    d = product
    # rounds 2 and 3: out of place, shapes still grow
    # of a number as_tensor would copy it from the host, which waits
    word = b if isinstance(b, Tensor) else torch.full((), b, dtype=c0.dtype, device=c0.device)
    x0, x1, x2, x3 = a, word, c, d
    for number in (1, 2):
        p0, p1 = x0 * _M0, x2 * _M1
        n0, n1 = _round_key(k0, _W0, number), _round_key(k1, _W1, number)
        x0 = ((p1 >> 32) ^ x1 ^ n0) & _MASK
        x2 = ((p0 >> 32) ^ x3 ^ n1) & _MASK
        x1, x3 = p1, p0
    # the others in place; of products the high bits are masked off when they are used
    shape = (c1.shape[0], c0.shape[1])
    x0, x2 = x0.expand(shape).contiguous(), x2.expand(shape).contiguous()
    x1, x3 = x1.expand(shape), x3.expand(shape)
    p0, p1 = torch.empty_like(x0), torch.empty_like(x0)
    q0, q1 = torch.empty_like(x0), torch.empty_like(x0)
    for number in range(3, 10):
        torch.mul(x0, _M0, out=p0)
        torch.mul(x2, _M1, out=p1)
        n0, n1 = _round_key(k0, _W0, number), _round_key(k1, _W1, number)
        torch.bitwise_right_shift(p1, 32, out=x0)
        x0.bitwise_xor_(x1).bitwise_xor_(n0).bitwise_and_(_MASK)
        torch.bitwise_right_shift(p0, 32, out=x2)
        x2.bitwise_xor_(x3).bitwise_xor_(n1).bitwise_and_(_MASK)
        x1, x3 = p1, p0
        p0, p1, q0, q1 = q0, q1, p0, p1
    return [x0, x1 & _MASK, x2, x3 & _MASK]


def _round_key(key: int | Tensor, increment: int, number: int) -> int | Tensor:
    return (key + number * increment) & _MASK
