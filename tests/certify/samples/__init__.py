"""Sample calls for every op that has a rule: what the certificates are made from.

    SAMPLES["aten.mm.default"]        # [of("m k", "k n")]

One file per family, each with a dict from an op's full name to functions of a Draw (draw.py);
FAMILIES lists them. A new family adds its file and a line there. Invariants: an op has samples in
one family; STAND_INS, UNCHECKED and NO_HALF say what is special about an op,
not how it is split.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.certify.samples.draw import EDGES, VARIANTS, Draw, Sample
from tests.certify.samples.experts import EXPERTS
from tests.certify.samples.indexing import INDEXING
from tests.certify.samples.layers import LAYERS
from tests.certify.samples.losses import LAYER_LOSSES
from tests.certify.samples.matrices import MATRICES
from tests.certify.samples.ordering import ORDERING
from tests.certify.samples.pointwise import POINTWISE, SPECIAL
from tests.certify.samples.tensors import ARRANGEMENT, OWN, STAND_INS, TENSORS

FAMILIES: tuple[Mapping[str, list[Sample]], ...] = (
    *(
        ARRANGEMENT,
        EXPERTS,
        INDEXING,
        LAYERS,
        LAYER_LOSSES,
        MATRICES,
        ORDERING,
        OWN,
        POINTWISE,
        SPECIAL,
    ),
    TENSORS,
)

# Not tried under placements that do not belong together, nor at sizes of 0: their kernels do not
# check shapes, and end the process.
UNCHECKED = {
    "aten.batch_norm_backward.default",
    "aten.native_batch_norm_backward.default",
    "aten.linalg_ldl_solve.default",
    "aten.linalg_lu_solve.default",
    "aten.lu_unpack.default",
    "dt.attention.default",
    "dt.attention_backward.default",
    "dt.attention_part.default",
    "dt.attention_part_backward.default",
    "dt.attention_masked.default",
    "dt.attention_masked_backward.default",
    "dt.cache_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    "aten._embedding_bag.default",
    "aten._embedding_bag_forward_only.default",
    "aten._embedding_bag_backward.default",
    "aten._embedding_bag_per_sample_weights_backward.default",
}

# Whose kernel fails in bfloat16 where a dim has size 1, an internal error of torch.
NO_HALF = {"aten.index_reduce.default"}

SAMPLES: dict[str, list[Sample]] = {
    name: samples for family in FAMILIES for name, samples in family.items()
}

__all__ = [
    "EDGES",
    "FAMILIES",
    "NO_HALF",
    "POINTWISE",
    "SAMPLES",
    "SPECIAL",
    "STAND_INS",
    "UNCHECKED",
    "VARIANTS",
    "Draw",
    "Sample",
]
