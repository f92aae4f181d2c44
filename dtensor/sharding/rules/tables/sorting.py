"""Rules of sorting and searching: sort, topk, medians, running extrema, searches, histograms.

    sort(1)              "d0 d1! -> d0 d1!, d0 d1!"
    kthvalue(k, 1)       "d0 d1! -> d0, d0"
    searchsorted         "... s, ... v -> ... v"     s split: the ranks' counts are summed
    histc(min, max)      "n -> b!"                   n split: the ranks' counts are summed

A sorted dim is whole. The sequence of searchsorted may be split: each piece of it is sorted, and
the number of smaller elements is the sum of the numbers in the pieces.
"""

from __future__ import annotations

from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.rules.build import make, operand_index
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.reduce import along_dim, reduction
from dtensor.sharding.rules.tables.unsplittable import Unsplittable


def _bucketize(call: OpCall) -> Rule:
    return make(call, "..., b -> ...") if len(call.operands) == 2 else make(call, "b -> ")


def _searchsorted(call: OpCall) -> Rule:
    """Return the rule of searchsorted; the sequence splits unless it has a sorter."""
    sorter = operand_index(call, 6, "sorter")
    factor = "s" if sorter is None else "s!"
    shared = len(call.operands[0].shape) == 1
    sequence = factor if shared else f"... {factor}"
    terms = [sequence]
    result = ""
    if operand_index(call, 1, "self") is not None:
        result = "..." if shared else "... v"
        terms.append(result)
    terms += [sequence] * (sorter is not None)
    return make(call, f"{', '.join(terms)} -> {result}")


def _histc(call: OpCall) -> Rule:
    """Return the rule of histc. If min = max, the bins depend on the extrema of x: x is whole."""
    has_limits = call.arg(2, "min", 0) != call.arg(3, "max", 0)
    dims = " ".join(f"d{i}" if has_limits else f"d{i}!" for i in range(len(call.operands[0].shape)))
    return make(call, f"{dims} -> b!")


_WHY_BINS_WHOLE = "the edges of the bins, or their density, depend on all values"
_WHY_HASH_WHOLE = "a hash of all bytes"

RULES: dict[str, Builder] = {
    "aten.sort.default": along_dim(1, default=-1),
    "aten.sort.stable": along_dim(2, default=-1),
    "aten.argsort.default": along_dim(1, default=-1),
    "aten.argsort.stable": along_dim(2, default=-1),
    "aten.msort.default": along_dim(9, default=0),
    "aten.topk.default": along_dim(2, default=-1),
    "aten.kthvalue.default": reduction(None, dim_at=2, keepdim_at=3, default=-1),
    "aten.mode.default": reduction(None, default=-1),
    "aten.median.dim": reduction(None),
    "aten.nanmedian.dim": reduction(None),
    "aten.median.default": reduction(None, keepdim_at=0),
    "aten.nanmedian.default": reduction(None, keepdim_at=0),
    "aten.cummax.default": along_dim(1),
    "aten.cummin.default": along_dim(1),
    "aten.logcumsumexp.default": along_dim(1),
    "aten.bucketize.Tensor": _bucketize,
    "aten.bucketize.Scalar": _bucketize,
    "aten.searchsorted.Tensor": _searchsorted,
    "aten.searchsorted.Scalar": _searchsorted,
    "aten.histc.default": _histc,
    "aten.histogram.bin_ct": Unsplittable(_WHY_BINS_WHOLE),
    "aten.histogram.bins_tensor": Unsplittable(_WHY_BINS_WHOLE),
    "aten._histogramdd_bin_edges.default": Unsplittable(_WHY_BINS_WHOLE),
    "aten._histogramdd_from_bin_cts.default": Unsplittable(_WHY_BINS_WHOLE),
    "aten._histogramdd_from_bin_tensors.default": Unsplittable(_WHY_BINS_WHOLE),
    "aten.hash_tensor.default": Unsplittable(_WHY_HASH_WHOLE),
    "aten.nonzero_static.default": Unsplittable("which places are not zero depends on all values"),
}
