"""Train a little on noise of each rank's own, and say in the end what it has come to.

Arguments: the step after which to end without a word, as a rank does that is killed; the last step; and the step after
which a rank loses its connections to the store by which the ranks have found each other.
"""

from __future__ import annotations

import os
import random
import socket
import sys

import psutil
import torch
from torch import nn

import trainer_runtime as tr

killed_after, last, cut_after, cut_rank = map(int, sys.argv[1:])


def cut() -> None:
    """As whatever stands between two machines does that forgets who is connected."""
    for each in psutil.Process().net_connections("tcp"):
        if each.raddr and each.raddr.port == int(os.environ["MASTER_PORT"]):
            with socket.socket(fileno=os.dup(each.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


tr.init(timeout_s=150)
torch.manual_seed(tr.rank())
random.seed(tr.rank())
torch.set_num_threads(1)
with torch.random.fork_rng():
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = tr.State(model=model, opt=opt, drawn=[], save_every=1000)
state.restore()
sys.stdout.write(f"from {state.step} {net[1].running_mean.tolist()}\n")
sys.stdout.flush()
for _ in state.epochs(1):
    for _item in state.steps(range(last)):
        opt.zero_grad()
        model(torch.randn(5, 3) + 1).sum().backward()
        opt.step()
        state.commit()
        if state.step == killed_after:
            os._exit(1)
        if state.step == cut_after and tr.rank() == cut_rank:
            cut()
weights = [value.tolist() for value in net.state_dict().values()]
sys.stdout.write(f"became {weights} {random.random()} {torch.rand(1).item()}\n")
