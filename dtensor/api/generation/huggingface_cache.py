"""A layer of a Hugging Face cache that forwards its updates to a cache of slots.

    Cache(layers=[layer(cache, i) for i in range(4)])      # transformers' Cache

Imported only for Hugging Face models, because it imports transformers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class _Layer(CacheLayerMixin):
    """Passes keys and values to a cache of slots. transformers reads a cache's lengths to make
    masks and positions; here the model is given both, so the lengths are not used."""

    is_compileable = True
    is_sliding = False

    def __init__(self, cache: Any, number: int) -> None:
        super().__init__()
        self.cache, self.number = cache, number
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.cache.update(self.number, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def layer(cache: Any, number: int) -> CacheLayerMixin:
    return _Layer(cache, number)
