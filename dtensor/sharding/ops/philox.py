"""Counter-based random words: each is a function of a key and of the element's global index.

    place = Place((8, 512, 1024), pieces)         # the global shape, and the rank's part of it
    words(place, Key(seed, step, op), device, 1)  # yields (chunk, words of the chunk)

Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
The key is the 64-bit seed. The counter is (column // n, row, step, op): column is the index in the
last dim, row the index in the other dims flattened. Its four 32-bit words serve n = 4 elements of
one word, or n = 2 elements of two words. A number depends neither on the rank's other elements nor
on the chunks. Only integer ops are used, so every device gives the same bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Pieces = tuple[tuple[tuple[int, int], ...], ...]

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # Weyl increments of the key
_MASK = 0xFFFFFFFF
_CPU_CHUNK = 1 << 15  # counters in a chunk: its tensors stay in a core's cache
_DEVICE_CHUNK = 1 << 20  # counters in a chunk: its 13 int64 tensors take 0.1 GiB


@dataclass(frozen=True, slots=True)
class Key:
    """The key of random numbers. ``step`` and ``op`` have 32 bits. ``seed`` and ``step`` may be
    tensors int64[], or columns int64[rows, 1] with one value for each row."""

    seed: int | Tensor
    step: int | Tensor
    op: int


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a tensor of global ``shape``: the intervals (start, stop) of each dim."""

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
    """The rows and columns of the local tensor, viewed as a matrix, for which words are computed.
    The first block may begin before the first column: the words of ``skip`` elements are not used.
    """

    rows: slice
    columns: slice
    skip: int


def words(
    place: Place, key: Key, device: torch.device, per_element: int
) -> Iterator[tuple[Chunk, list[list[Tensor]]]]:
    """Yield (chunk, elements) for each chunk of the rank's part of a tensor.

    A block is the n = 4 / ``per_element`` consecutive columns that one counter serves.
    ``elements[e]`` has the random words of element e of every block, int64[rows, blocks] each.
    Element e of block b is column ``b * n + e - skip`` of the chunk. Raises ValueError if the
    tensor has more than 2**32 rows.
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
        first, last = start // num, -(-stop // num)  # blocks: floor(start / n) to ceil(stop / n)
        max_blocks = max(1, min(last - first, limit))
        max_rows = max(1, limit // max_blocks)
        for block in range(first, last, max_blocks):
            end = min(block + max_blocks, last)
            low, high = max(start, block * num), min(stop, end * num)
            if low >= high:
                continue
            chunk_columns = slice(offset + low - start, offset + high - start)
            blocks = torch.arange(block, end, dtype=torch.int64, device=device)[None, :]
            for row in range(0, num_rows, max_rows):
                numbers = philox(blocks, rows[row : row + max_rows, None], key)
                grouped = [
                    list(numbers[e * per_element : (e + 1) * per_element]) for e in range(num)
                ]
                yield Chunk(slice(row, row + max_rows), chunk_columns, low - block * num), grouped
        offset += stop - start


def _rows(place: Place, device: torch.device) -> Tensor:
    """Return the global row number of each local row, int64[rows]. Rows are the indices of all dims
    but the last, flattened. Raises ValueError if there are more than 2**32 rows."""
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
    """Return the four words of the counters (c0, c1, step, op), each int64[rows, blocks]. c0 is a
    row [1, blocks] and c1 a column [rows, 1]: the first rounds compute on these and are cheap."""
    k0, k1 = key.seed & _MASK, key.seed >> 32 & _MASK
    low = _M1 * (key.step & _MASK)
    product = c0 * _M0
    # round 1: rows and columns are not combined yet
    a = c1 ^ (low >> 32 & _MASK) ^ k0
    b = low & _MASK
    c = (product >> 32 & _MASK) ^ (key.op & _MASK) ^ k1
    d = product
    # rounds 2 and 3: out of place, because shapes grow to [rows, blocks]
    # torch.full, not as_tensor, which would copy a number from the host and wait
    word = b if isinstance(b, Tensor) else torch.full((), b, dtype=c0.dtype, device=c0.device)
    x0, x1, x2, x3 = a, word, c, d
    keys = zip(_round_keys(k0, _W0), _round_keys(k1, _W1), strict=True)
    for n0, n1 in itertools.islice(keys, 2):
        p0, p1 = x0 * _M0, x2 * _M1
        x0 = ((p1 >> 32) ^ x1 ^ n0) & _MASK
        x2 = ((p0 >> 32) ^ x3 ^ n1) & _MASK
        x1, x3 = p1, p0
    # rounds 4 to 10: in place; the high bits of products are masked off when they are used
    shape = (c1.shape[0], c0.shape[1])
    x0, x2 = x0.expand(shape).contiguous(), x2.expand(shape).contiguous()
    x1, x3 = x1.expand(shape), x3.expand(shape)
    p0, p1 = torch.empty_like(x0), torch.empty_like(x0)
    q0, q1 = torch.empty_like(x0), torch.empty_like(x0)
    for n0, n1 in keys:
        torch.mul(x0, _M0, out=p0)
        torch.mul(x2, _M1, out=p1)
        torch.bitwise_right_shift(p1, 32, out=x0)
        x0.bitwise_xor_(x1).bitwise_xor_(n0).bitwise_and_(_MASK)
        torch.bitwise_right_shift(p0, 32, out=x2)
        x2.bitwise_xor_(x3).bitwise_xor_(n1).bitwise_and_(_MASK)
        x1, x3 = p1, p0
        p0, p1, q0, q1 = q0, q1, p0, p1
    return [x0, x1 & _MASK, x2, x3 & _MASK]


def _round_keys(key: int | Tensor, increment: int) -> Sequence[int | Tensor]:
    """Return the keys of rounds 2 to 10: Philox adds a Weyl increment in each round."""
    if isinstance(key, Tensor):
        number = torch.arange(1, 10, device=key.device)
        return (key[..., None] + number * increment & _MASK).unbind(-1)
    return [key + number * increment & _MASK for number in range(1, 10)]
