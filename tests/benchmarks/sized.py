"""A model whose state is as large as wanted; the scripts that need one find it beside themselves."""

from __future__ import annotations

import torch
from torch import nn

_HEAD_WIDTH = 64
_BYTES_OF_WEIGHT = 12
"""With the two moments of AdamW."""


def build_transformer(megabytes: int) -> nn.TransformerEncoder:
    """So wide, with a layer for each head, that parameters and two moments are about so large."""
    width = (megabytes * 10**6 * _HEAD_WIDTH / (12 * _BYTES_OF_WEIGHT)) ** (1 / 3)
    heads = max(1, round(width / _HEAD_WIDTH))
    layer = nn.TransformerEncoderLayer(heads * _HEAD_WIDTH, heads, 4 * heads * _HEAD_WIDTH)
    return nn.TransformerEncoder(layer, heads, enable_nested_tensor=False)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, with gradients that are there and stay zero: steps without the arithmetic of a model."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return torch.optim.AdamW(model.parameters(), foreach=False, fused=True)
