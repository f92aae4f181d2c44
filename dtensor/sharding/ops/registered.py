"""Importing this module registers all ops of `torch.ops.dt`.

A process that only names an op (an actor, or `dt.kernel("dt::rope", "cuda")`) imports it through
`dtensor.op_names.op_packet`. Other modules import the files of the ops that they use.
"""

from dtensor.sharding.ops import attention as attention
from dtensor.sharding.ops import attention_masked as attention_masked
from dtensor.sharding.ops import batch_norm as batch_norm
from dtensor.sharding.ops import cache_attention as cache_attention
from dtensor.sharding.ops import cross_entropy as cross_entropy
from dtensor.sharding.ops import experts as experts
from dtensor.sharding.ops import gates as gates
from dtensor.sharding.ops import load_balance as load_balance
from dtensor.sharding.ops import norms as norms
from dtensor.sharding.ops import random as random
from dtensor.sharding.ops import rope as rope
from dtensor.sharding.ops import sampling as sampling
