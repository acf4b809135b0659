"""Click-through rates with parameter servers: an embedding table without a vocabulary, and workers that come and go.

    elastic-agent --server_num=2 --worker_num=4 examples/train_ctr.py

The data is synthetic: each view has eight ids, each of which makes a click more or less likely. Prints the area under
the ROC curve (AUC) on held-out views; with the true probabilities it would be 0.86.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from trainer_runtime import ps

FIELDS = 8
IDS = 2_000
"""Ids per field."""
LIKING = torch.randn(FIELDS * IDS, generator=torch.Generator().manual_seed(1)) * 0.7
"""How much likelier each id makes a click (its logit); shape (FIELDS * IDS,)."""


class Views(NamedTuple):
    """A batch of views."""

    ids: torch.Tensor
    """Shape (views, FIELDS), int64."""
    clicked: torch.Tensor
    """Shape (views,), float32, 0 or 1."""


class Net(nn.Module):
    """A sum of embeddings' biases, and a small network over the embeddings."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embedding = ps.SparseEmbedding(dim, scale=0.05)
        self.bias = ps.EmbeddingBag(1, mode="sum", initial="zeros")
        self.top = nn.Sequential(nn.Linear(FIELDS * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logit of a click for each view, shape (views,), for ids of shape (views, FIELDS)."""
        logits: torch.Tensor = self.top(self.embedding(ids).flatten(1)) + self.bias(ids)
        return logits.squeeze(1)


def make_views(number: int, views: int) -> Views:
    """Return the views of one part of the data; the same on every worker."""
    chance = torch.Generator().manual_seed(number)
    # A few ids occur often, most occur rarely.
    drawn = (torch.rand(views, FIELDS, generator=chance) ** 3 * IDS).long()
    ids = drawn + torch.arange(FIELDS) * IDS
    logits = LIKING[ids].sum(1) - 1
    return Views(ids, (torch.rand(views, generator=chance) < logits.sigmoid()).float())


def area_under_curve(logits: torch.Tensor, clicked: torch.Tensor) -> float:
    """Return the probability that a clicked view ranks above one that was not clicked."""
    ranks = torch.empty(len(logits)).scatter_(0, logits.argsort(), torch.arange(1.0, len(logits) + 1))
    clicks = clicked.sum()
    above = ranks[clicked > 0].double().sum() - clicks * (clicks + 1) / 2
    return float(above / (clicks * (len(logits) - clicks)))


def main() -> None:
    """Run as a server or a worker, as the environment says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["sync", "async", "bounded", "geo"], default="async")
    parser.add_argument("--parts", type=int, default=400, help="number of parts of the data")
    parser.add_argument("--epochs", type=int, default=1, help="how often all parts are trained")
    parser.add_argument("--views", type=int, default=2048, help="views in a part, which is one step")
    parser.add_argument("--keep_dir", help="directory where servers keep their rows")
    options, _ = parser.parse_known_args()
    ps.init({"sync": ps.SYNC, "async": ps.ASYNC, "bounded": ps.bounded(4), "geo": ps.geo(5)}[options.mode])
    if ps.is_server():
        ps.init_server(keep_dir=options.keep_dir, keep_every_s=1.0)
        ps.run_server()
        return
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net()
    ps.init_worker()
    optimizer = ps.distributed_optimizer(torch.optim.Adam(model.parameters(), 1e-2), model)
    for epoch in range(options.epochs):
        for part in ps.data_parts(options.parts):
            views = make_views(part, options.views)
            loss = functional.binary_cross_entropy_with_logits(model(views.ids), views.clicked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if part % 20 == 0:
                print(f"worker {ps.worker_index()}: epoch {epoch}: part {part}: loss {loss.item():.4f}", flush=True)
    if ps.is_first_worker():
        model.eval()
        unseen = make_views(1 << 40, 50_000)
        with torch.no_grad():
            print(f"AUC {area_under_curve(model(unseen.ids), unseen.clicked):.4f}", flush=True)
    ps.stop_worker()


if __name__ == "__main__":
    main()
