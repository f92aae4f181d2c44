"""Small models for tests, written for one device as a user would write them.

    model = GPT(layers=2)                      # vocab 32, width 16, 4 heads, up to 16 positions
    loss_fn(model, tokens, targets)            # (scalar, {"accuracy": scalar})

`GPT` (LayerNorm, fused qkv, GELU), `Llama` (RMSNorm, RoPE, grouped kv heads, SwiGLU), `MLP`,
`SwiGLU`. No dropout, but in `DropoutGPT`. `batch(seed)` makes tokens and targets.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self, width: int = 16, hidden: int = 64, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        a = F.gelu(h)
        return self.down(a)


class SwiGLU(nn.Module):
    def __init__(self, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(b, t, self.heads, d // self.heads).transpose(1, 2)
        k = k.view(b, t, self.heads, d // self.heads).transpose(1, 2)
        v = v.view(b, t, self.heads, d // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(b, t, d)
        return self.proj(y)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=bias)
        self.attn = CausalSelfAttention(width, heads, bias)
        self.norm2 = nn.LayerNorm(width, bias=bias)
        self.mlp = MLP(width, 4 * width, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """tokens [b t] -> logits [b t v]."""

    def __init__(
        self,
        vocab: int = 32,
        width: int = 16,
        heads: int = 4,
        layers: int = 2,
        positions: int = 16,
        tied: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads, bias) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.positions(at)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class RMSNorm(nn.Module):
    """RMSNorm written by hand, as in many Llama implementations."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return RoPE of x[b h t d] with cos, sin [t d]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class GroupedAttention(nn.Module):
    def __init__(
        self, width: int, heads: int, groups: int, spread: Literal["enable_gqa", "repeat"]
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.spread = heads, groups, width // heads, spread
        self.q = nn.Linear(width, heads * self.size, bias=False)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=False)
        self.o = nn.Linear(heads * self.size, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(b, t, self.groups, self.size).transpose(1, 2)
        v = self.v(x).view(b, t, self.groups, self.size).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        gqa = self.spread == "enable_gqa"
        if not gqa:
            k = k.repeat_interleave(self.heads // self.groups, dim=1)
            v = v.repeat_interleave(self.heads // self.groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


class LlamaBlock(nn.Module):
    def __init__(
        self,
        width: int,
        heads: int,
        groups: int,
        norm: Literal["hand", "torch"],
        spread: Literal["enable_gqa", "repeat"],
    ) -> None:
        super().__init__()
        make = RMSNorm if norm == "hand" else nn.RMSNorm
        self.norm1 = make(width, eps=1e-5)
        self.attn = GroupedAttention(width, heads, groups, spread)
        self.norm2 = make(width, eps=1e-5)
        self.mlp = SwiGLU(width, 2 * width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """tokens [b t] -> logits [b t v]; cos and sin are computed in forward."""

    def __init__(
        self,
        vocab: int = 32,
        width: int = 16,
        heads: int = 4,
        groups: int = 2,
        layers: int = 2,
        norm: Literal["hand", "torch"] = "hand",
        spread: Literal["enable_gqa", "repeat"] = "enable_gqa",
    ) -> None:
        super().__init__()
        self.size = width // heads
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            LlamaBlock(width, heads, groups, norm, spread) for _ in range(layers)
        )
        self.norm = RMSNorm(width) if norm == "hand" else nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        half = self.size // 2
        at = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        speed = 10000.0 ** (-torch.arange(half, device=tokens.device, dtype=torch.float32) / half)
        angle = at[:, None] * speed[None, :]
        angle = torch.cat((angle, angle), dim=-1)
        x = self.embed(tokens)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean cross-entropy of next tokens, and the accuracy."""
    logits = model(tokens)
    loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
    accuracy = (logits.argmax(-1) == targets).float().mean()
    return loss, {"accuracy": accuracy}


def batch(
    seed: int = 0, size: int = 4, length: int = 8, vocab: int = 32, ignored: bool = False
) -> tuple[Tensor, Tensor]:
    """Return tokens, targets [size length]; `ignored`: about a third of the targets are -100."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (size, length), generator=g)
    targets = torch.randint(0, vocab, (size, length), generator=g)
    if ignored:
        targets[torch.rand((size, length), generator=g) < 0.3] = -100
    return tokens, targets


class DropoutGPT(nn.Module):
    """A GPT with dropout where GPT-2 has it: on embeddings, attention weights, residuals.
    ``attend``: attention as a function of q, k, v [b h t e] and p; torch's by default."""

    def __init__(
        self,
        p: float = 0.1,
        vocab: int = 32,
        width: int = 16,
        heads: int = 4,
        layers: int = 2,
        attend: Any = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(16, width)
        self.drop = nn.Dropout(p)
        self.blocks = nn.ModuleList(DropoutBlock(p, width, heads, attend) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.embed(tokens) + self.positions(at))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class DropoutBlock(nn.Module):
    def __init__(self, p: float, width: int, heads: int, attend: Any = None) -> None:
        super().__init__()
        self.p, self.heads, self.function = p, heads, attend
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.proj(self.attend(self.qkv(self.norm1(x)))), self.p, self.training)
        h = F.gelu(self.up(self.norm2(x)))
        return x + F.dropout(self.down(h), self.p, self.training)

    def attend(self, qkv: Tensor) -> Tensor:
        b, t, _ = qkv.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in qkv.chunk(3, dim=-1))
        p = self.p if self.training else 0.0
        if self.function is not None:
            y = self.function(q, k, v, p)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return y.transpose(1, 2).reshape(b, t, -1)


def square_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error of an `MLP` against ``y``."""
    return F.mse_loss(model(x), y)
