"""A layer of transformers' cache that is a layer of a cache of slots.

    Cache(layers=[layer(cache, i) for i in range(4)])      # transformers' own Cache, made anew

A model's attention calls ``past_key_values.update(k, v, layer_idx)``, which comes here. Imported
only where a model of transformers is generated from.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class _Layer(CacheLayerMixin):
    """transformers asks a cache for its length to make masks and positions, which are given to the
    model; of what it asks here nothing is used."""

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
