"""Compile a model and train one step; seconds from the import of torch to its end, as JSON."""

from __future__ import annotations

import json
import time

import torch
from torch import nn

WIDTH = 512


def main() -> None:
    """Measure."""
    began = time.perf_counter()
    layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = torch.compile(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda())
    loss = model(torch.randn(4, 128, WIDTH, device="cuda")).square().mean()
    loss.backward()
    torch.cuda.synchronize()
    print(json.dumps({"first_step_s": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
