"""Train a sharded model on data that does not depend on the ranks, and say in the end what it has come to.

Arguments: the step after which to end without a word, as a rank does that is killed; the last step; and how the model
is sharded: `fsdp`, `hsdp` (two replicas), `tensor` (tensor parallel), or `2d` (tensor parallel in pairs, and FSDP2).
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import trainer_runtime as tr

killed_after, last, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class Net(nn.Module):
    """A tied layer, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.odd = nn.Linear(8, 1)  # torch splits tensor parallel layers evenly only
        self.again = self.up
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what two passes make of `x`."""
        y = self.down(self.again(self.down(self.up(x).relu())).relu())
        return (y + self.odd(y)) * self.scale


def shard(net: Net) -> None:
    """Shard the model over all ranks."""
    world = tr.world_size()
    tensor, data = {"fsdp": (1, world), "hsdp": (1, world), "tensor": (world, 1), "2d": (2, world // 2)}[how]
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copy", "data"))
    else:
        mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    if tensor > 1:
        parallelize_module(net, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if how != "tensor":
        for layer in (net.up, net.down, net):
            fully_shard(layer, mesh=mesh if how == "hsdp" else mesh["data"])


tr.init(timeout_s=150)
torch.set_num_threads(1)
torch.manual_seed(7)
net = Net()
shard(net)
opt = torch.optim.AdamW(net.parameters(), lr=0.05, foreach=how == "fsdp")
state = tr.State(model=net, opt=opt, save_every=1000)
state.restore()
sys.stdout.write(f"from {state.step}\n")
sys.stdout.flush()
for _ in state.epochs(1):
    for item in state.steps(range(last)):
        made = torch.Generator().manual_seed(item)
        points, wanted = torch.randn(12, 8, generator=made), torch.randn(12, 8, generator=made)
        nn.functional.mse_loss(net(points), wanted).backward()
        opt.step()
        opt.zero_grad()
        net.scale += 0.125
        state.commit()
        if state.step == killed_after:
            state.settle()
            os._exit(1)
tensors = dict(net.state_dict())
for key, parameter in net.named_parameters():
    tensors |= {f"{key} {kind}": value for kind, value in opt.state[parameter].items()}
weights = {key: (each.full_tensor() if isinstance(each, DTensor) else each).tolist() for key, each in tensors.items()}
sys.stdout.write(f"became {json.dumps(weights)}\n")
