"""Parameter servers: train sparse models that are larger than one machine's memory, with workers that join and leave.

Servers and workers run the same script, as with Paddle's fleet:

    from trainer_runtime import ps

    ps.init()
    if ps.is_server():
        ps.init_server()
        ps.run_server()
    else:
        model = Net(ps.EmbeddingBag(16))
        ps.init_worker()
        opt = ps.distributed_optimizer(torch.optim.Adam(model.parameters(), 1e-3), model)
        for part in ps.data_parts(1000):
            for batch in read(part):
                loss(model, batch).backward()
                opt.step()
                opt.zero_grad()
        ps.stop_worker()
"""

from __future__ import annotations

from trainer_runtime.ps.client import NotReadyError
from trainer_runtime.ps.frames import RefusedError
from trainer_runtime.ps.modules import EmbeddingBag, SparseEmbedding
from trainer_runtime.ps.process import (
    init,
    is_first_worker,
    is_server,
    is_worker,
    server_endpoints,
    server_index,
    server_num,
    worker_index,
    worker_num,
)
from trainer_runtime.ps.rules import SGD, Adagrad, Adam, RowWiseAdagrad, Rule, Sum
from trainer_runtime.ps.server_process import init_server, run_server
from trainer_runtime.ps.worker_process import (
    data_parts,
    distributed_optimizer,
    init_worker,
    resting,
    save,
    shrink,
    stop_worker,
)
from trainer_runtime.ps.worker_progress import ASYNC, SYNC, Mode, bounded, geo

__all__ = [
    "ASYNC",
    "SGD",
    "SYNC",
    "Adagrad",
    "Adam",
    "EmbeddingBag",
    "Mode",
    "NotReadyError",
    "RefusedError",
    "RowWiseAdagrad",
    "Rule",
    "SparseEmbedding",
    "Sum",
    "bounded",
    "data_parts",
    "distributed_optimizer",
    "geo",
    "init",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "resting",
    "run_server",
    "save",
    "server_endpoints",
    "server_index",
    "server_num",
    "shrink",
    "stop_worker",
    "worker_index",
    "worker_num",
]
