"""Rules of ops on a vocabulary: embedding, embedding bags, cross entropy, choice of a token.

    embedding     "v d, ... -> ... d"            v split: ids of other ranks give 0; then a sum
    embedding_bag "v! d, i!, o! -> b! d, ..."    only columns are split
    ce_stats      "n v, n -> n k!"               v split: reduced with "softmax"
    ce_loss       "n k!, n -> n"
    ce_backward   "n, n v, n k!, n -> n v"       v split: nothing is reduced
    next_tokens   "n v!, n, n r!, n p! -> n, n"  each row needs the whole vocabulary

If the vocabulary is split, localizers pass the rank's global rows or columns to the op. The ops are
in ops/attention.py, ops/cross_entropy.py and ops/sampling.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dtensor.sharding.ops import attention as attention  # registers torch.ops.dt
from dtensor.sharding.ops import sampling as sampling
from dtensor.sharding.ops.call import Local, Localizer, OpCall
from dtensor.sharding.rules.build import flatten_intervals, make, pattern, retarget
from dtensor.sharding.rules.registry import Builder, no_rule
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.localizers import contiguous, unless_empty
from dtensor.sharding.rules.tables.unsplittable import Unsplittable


def _embedding_localizer(call: OpCall, local: Local) -> OpCall:
    """Pass the rank's global rows if the table's rows are split; other ids then give zeros."""
    num_ids = call.operands[0].shape[0]
    if local.operand_shape(0)[0] == num_ids:
        return call
    rows = flatten_intervals(local.operand_intervals(0, 0))
    return retarget(call, torch.ops.dt.embedding_shard.default, *call.args[:2], rows, num_ids)


def _embedding_backward(call: OpCall) -> Rule:
    if call.arg(4, "scale_grad_by_freq", False):
        raise no_rule(call, "scale_grad_by_freq counts the ids of the whole batch")
    localize = _embedding_backward_localizer
    return make(call, "... d, ... -> v d", linear=((0,),), localize=localize)


def _embedding_backward_localizer(call: OpCall, local: Local) -> OpCall:
    """Pass the rank's global rows if the gradient's rows are split."""
    grad, ids, num_rows, padding = call.args[:4]
    num_local_rows = local.result_shape()[0]
    if num_local_rows == num_rows:
        return call
    rows = flatten_intervals(local.result_intervals(0, 0))
    target = torch.ops.dt.embedding_shard_backward.default
    return retarget(call, target, grad, ids, num_local_rows, rows, padding)


def _bag(call: OpCall) -> Rule:
    """Return the rule of embedding bags, which splits only the columns d of the embedding. Results
    of fewer than two dims depend only on the indices (``~d``: they are equal on all ranks of d)."""
    if call.args[5] if len(call.args) > 5 else False:
        raise no_rule(call, "sparse gradients")
    weights = ", i!" if len(call.operands) > 3 else ""
    right = ["b! d"]
    for i, meta in enumerate(call.results[1:]):
        assert meta is not None
        dims = [f"r{i}!"] if len(meta.shape) < 2 else ["b!", "d"]
        right.append(" ".join([*dims, *(["~d"] if "d" not in dims else [])]))
    return make(call, f"v! d, i!, o!{weights} -> {', '.join(right)}", localize=contiguous())


def _bag_backward(call: OpCall) -> Rule:
    """Return the rule of (grad, indices, offsets, bag of each index, bag sizes, maxima, weights?)
    -> gradient of the table, [v, d]."""
    left = ["b! d", "i!", "o!", "f!", "s!"]
    left.append("b! d" if len(call.operands[5].shape) > 1 else "m!")
    left += ["i!" for _ in call.operands[6:]]
    return make(call, f"{', '.join(left)} -> v! d", linear=((0,),), localize=contiguous())


def _vocab(operand: int, position: int) -> Localizer:
    """Return a localizer that passes the global columns of the rank's logits, ``operand``, as the
    argument at ``position``."""

    def localize(call: OpCall, local: Local) -> OpCall:
        if local.operand_shape(operand)[1] == call.operands[operand].shape[1]:
            return call
        vocab = flatten_intervals(local.operand_intervals(operand, 1))
        return retarget(call, call.target, *call.args[:position], vocab)

    return localize


def _stats(call: OpCall) -> Rule:
    """Return the rule of ce_stats. Its pending statistics are parts of the loss."""
    rule = make(call, "n v, n -> n k!", reduce="softmax", localize=_vocab(0, 3))
    return replace(rule, of_loss=True)


RULES: dict[str, Builder] = {
    "aten.embedding.default": pattern(
        "v d, ... -> ... d", linear=((0,),), localize=_embedding_localizer
    ),
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.embedding_renorm.default": Unsplittable(
        "each index that occurs scales its row, and the norm is over the whole row"
    ),
    "dt.ce_stats.default": _stats,
    # the bound on targets is checked against the global number of classes: no localizer
    "dt.ce_loss.default": pattern("n k!, n -> n"),
    "dt.ce_count.default": pattern("n -> "),
    "dt.ce_backward.default": pattern(
        "n, n v, n k!, n -> n v", linear=((0,),), localize=_vocab(1, 5)
    ),
    "dt.cross_entropy_rows.default": pattern("n v!, n -> n, n k!"),
    "dt.next_tokens.default": pattern("n v!, n, n r!, n p! -> n, n"),
    "aten._embedding_bag.default": _bag,
    "aten._embedding_bag_forward_only.default": _bag,
    "aten._embedding_bag_backward.default": _bag_backward,
    "aten._embedding_bag_per_sample_weights_backward.default": pattern(
        "b! d, v! d, i!, o!, f! -> i!", linear=((0,), (1,)), localize=unless_empty(contiguous())
    ),
}
