"""The optimizer of a model on parameter servers: it pushes gradients, and pulls the updated parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer_runtime.ps.client import Client
from trainer_runtime.ps.geo import GeoClient
from trainer_runtime.ps.messages import Gradients
from trainer_runtime.ps.modules import SparseEmbedding
from trainer_runtime.ps.rules import SGD, Adagrad, Adam, Rule
from trainer_runtime.ps.table import TableSpec

_DENSE_DIM = 256


@dataclass(frozen=True)
class _Dense:
    """The parameters of one group of a torch optimizer, as rows of a table that they fill in order."""

    table: int
    parameters: Sequence[nn.Parameter]
    ids: torch.Tensor

    def rows_of(self, tensors: Sequence[torch.Tensor], lr: float | None = None) -> Gradients:
        """Return tensors with the parameters' shapes as rows."""
        flat = torch.zeros(len(self.ids) * _DENSE_DIM, device="cpu", dtype=torch.float32)
        torch.cat([tensor.detach().reshape(-1).float().cpu() for tensor in tensors], out=flat[: self.size])
        return Gradients(self.table, self.ids, flat.view(-1, _DENSE_DIM), lr)

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    def load(self, rows: torch.Tensor) -> None:
        """Set the parameters to the values of the rows."""
        flat = rows.view(-1)[: self.size]
        pieces = flat.split([parameter.numel() for parameter in self.parameters])  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter, piece in zip(self.parameters, pieces, strict=True):
                parameter.copy_(piece.view_as(parameter))


class DistributedOptimizer:
    """Pushes gradients, and pulls the parameters that result from all workers' gradients.

    Args:
        rule: a torch optimizer of all parameters that are trained (SGD, Adagrad or Adam, without momentum and weight
            decay), or the rule for the rows of a model that has no parameters. Its learning rates may change from step
            to step, for example by torch's schedulers.
        model: the model, the same on all workers. Its modules that are `SparseEmbedding` get their tables.
        client: client of the servers.
        name: prefix of the names of the parameters' tables; several optimizers need different ones.

    Raises:
        ValueError: servers do not support the torch optimizer, or the model has parameters and there is none.
        RefusedError: this model's tables differ from those of the other workers.
    """

    def __init__(
        self, rule: Optimizer | Rule, model: nn.Module, client: Client | GeoClient, name: str = "dense"
    ) -> None:
        if isinstance(rule, Rule) and any(each.requires_grad for each in model.parameters()):
            raise ValueError("wanted a torch optimizer, since the model has parameters, got a rule")
        self._client = client
        self._names = {id(each): path for path, each in model.named_parameters()}
        self._optimizer = rule if isinstance(rule, Optimizer) else None
        groups = self._optimizer.param_groups if self._optimizer else []
        rules = self._rules = [rule] if isinstance(rule, Rule) else [_rule_of(rule, group) for group in groups]
        self._sparse = [(name, each) for name, each in model.named_modules() if isinstance(each, SparseEmbedding)]
        self._dense = [
            self._declare_dense(f"{name}.{number}", rules[number], group["params"])
            for number, group in enumerate(groups)
        ]
        for path, module in self._sparse:
            module.attach(client, client.declare(module.spec(path, rules[0])))
        if self._dense:
            client.initialize(self._local_values())
            client.local_values = self._local_values
            self._pull()

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float = 1.0) -> Any:  # noqa: ANN401 - the closure's
        """Push the gradients of the backward passes, and set the parameters to the servers' new values.

        Args:
            closure: computes the loss again, as for torch's optimizers; its result is returned.
            weight: weight of this worker's gradients in the mean of a common step, for example the size of its batch.

        Raises:
            NotReadyError: a server did not answer in time.
            ValueError: a setting of the torch optimizer other than the learning rate has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rates = self._rates()
        found = [each for _, module in self._sparse if (each := module.take_gradients(rates[0])) is not None]
        for dense, lr in zip(self._dense, rates, strict=False):
            if any(each.grad is not None for each in dense.parameters):
                gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in dense.parameters]
                found.append(dense.rows_of(gradients, lr))
        self._client.push(found, weight)
        self._pull()
        if self._optimizer is not None:
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - otherwise schedulers warn
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - as torch's
        """Clear the gradients of parameters and embeddings."""
        for _, module in self._sparse:
            module.drop_gradients()
        for dense in self._dense:
            for parameter in dense.parameters:
                if parameter.grad is not None:
                    parameter.grad = None if set_to_none else parameter.grad.zero_()

    def _rates(self) -> list[float | None]:
        """Return the current learning rates, by group."""
        if self._optimizer is None:
            return [None]
        now = [_rule_of(self._optimizer, group) for group in self._optimizer.param_groups]
        if [replace(rule, lr=0.0) for rule in now] != [replace(rule, lr=0.0) for rule in self._rules]:
            raise ValueError("only the learning rate of the optimizer may change after it was given to the servers")
        return [rule.lr for rule in now]

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip parameters and embeddings together, as `torch.nn.utils.clip_grad_norm_`; return the norm before."""
        gradients = [found[1] for _, module in self._sparse if (found := module.merged_gradients()) is not None]
        gradients += [each.grad for part in self._dense for each in part.parameters if each.grad is not None]
        norms = [torch.linalg.vector_norm(each.float()).cpu() for each in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)
        share = min(1.0, max_norm / (float(norm) + 1e-6))
        for each in gradients:
            each.mul_(share)
        return norm

    def _local_values(self) -> list[Gradients]:
        return [dense.rows_of(dense.parameters) for dense in self._dense]

    def _declare_dense(self, name: str, rule: Rule, parameters: Sequence[nn.Parameter]) -> _Dense:
        description = ",".join(f"{self._names.get(id(each), '')}{tuple(each.shape)}" for each in parameters)
        layout = hashlib.blake2b(description.encode(), digest_size=8).hexdigest()
        spec = TableSpec(name, _DENSE_DIM, rule, initial="zeros", layout=layout)
        rows = -(-sum(each.numel() for each in parameters) // _DENSE_DIM)
        return _Dense(self._client.declare(spec), parameters, torch.arange(rows, device="cpu"))

    def _pull(self) -> None:
        for dense in self._dense:
            dense.load(self._client.pull(dense.table, dense.ids))


def _rule_of(optimizer: Optimizer, group: dict[str, Any]) -> Rule:
    """Return the rule that corresponds to a torch optimizer. Raises `ValueError`."""
    unknown = [name for name in ("momentum", "weight_decay", "lr_decay", "amsgrad", "maximize") if group.get(name)]
    if unknown:
        raise ValueError(f"servers do not support {' and '.join(unknown)}: remove it from {type(optimizer).__name__}")
    lr = float(group["lr"])
    match optimizer:
        case torch.optim.SGD():
            return SGD(lr)
        case torch.optim.Adagrad():
            return Adagrad(lr, group["eps"], group["initial_accumulator_value"])
        case torch.optim.Adam():
            beta1, beta2 = group["betas"]
            return Adam(lr, beta1, beta2, group["eps"])
        case _:
            raise ValueError(f"servers support SGD, Adagrad and Adam, not {type(optimizer).__name__}")
