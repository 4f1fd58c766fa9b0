"""A byte-level GPT: the usual small transformer, in plain torch.

It has what a checkpoint must get right and toy models lack: dropout (so that losses depend on the
state of the random number generator), a weight shared by the embedding and the output, and
enough parameters that a version is many megabytes.

The architecture is GPT-2's (Radford et al. 2019) with bytes for tokens: pre-norm blocks, learned
positions, GELU, tied output.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from .job import Shape

BYTE_VALUES = 256


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.project = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        projected: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.perceptron = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        added: Tensor = x + self.dropout(self.perceptron(self.norm2(x)))
        return added


class ByteGPT(nn.Module):
    """Predict the next byte of a text."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTE_VALUES, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.output = nn.Linear(shape.width, BYTE_VALUES, bias=False)
        self.apply(_initialize)
        self.output.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss in nats per byte of *text*, int64 of (batch, context + 1)."""
        source, target = text[:, :-1], text[:, 1:]
        at = torch.arange(source.shape[1], device=text.device)
        x = self.dropout(self.tokens(source) + self.positions(at))
        for block in self.blocks:
            x = block(x)
        scores = self.output(self.norm(x))
        return functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
