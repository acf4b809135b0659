"""Optimizers that run on the servers, where the rows are.

A row consists of the trained numbers and the optimizer state. The formulas are those of `torch.optim`, with each row as
a parameter of its own: a row without a gradient does not change, and Adam counts the steps of each row (as
`torch.optim.SparseAdam`, except for that count).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch


@dataclass(frozen=True)
class Rule(ABC):
    """An optimizer with its settings."""

    kind: ClassVar[str]

    lr: float
    """Learning rate."""

    @abstractmethod
    def memory(self, dim: int) -> int:
        """Return the size of the optimizer state of a row with `dim` trained numbers."""

    @abstractmethod
    def apply(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        """Update rows (rows, dim + memory) in place with gradients (rows, dim)."""

    def begin(self, memory: torch.Tensor) -> None:
        """Initialize the optimizer state of new rows, (rows, memory)."""
        memory.zero_()

    def to_json(self) -> dict[str, Any]:
        """Return the rule as JSON for `rule_of`."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class Sum(Rule):
    """Adds what is pushed: differences that workers have trained, or counts."""

    kind: ClassVar[str] = "sum"
    lr: float = 1.0

    def memory(self, dim: int) -> int:  # noqa: ARG002 - as declared
        """No state."""
        return 0

    def apply(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        """Add."""
        rows.add_(gradients, alpha=self.lr)


@dataclass(frozen=True)
class SGD(Rule):
    """Stochastic gradient descent, as `torch.optim.SGD` without momentum."""

    kind: ClassVar[str] = "sgd"

    def memory(self, dim: int) -> int:  # noqa: ARG002 - as declared
        """No state."""
        return 0

    def apply(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        """Make one step."""
        rows.add_(gradients, alpha=-self.lr)


@dataclass(frozen=True)
class Adagrad(Rule):
    """Adagrad, as `torch.optim.Adagrad`."""

    kind: ClassVar[str] = "adagrad"
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    def memory(self, dim: int) -> int:
        """The sum of squares of each number."""
        return dim

    def begin(self, memory: torch.Tensor) -> None:
        """Initialize as torch does."""
        memory.fill_(self.initial_accumulator_value)

    def apply(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        """Make one step."""
        values, squares = rows.split(gradients.shape[1], 1)  # type: ignore[no-untyped-call]
        squares.addcmul_(gradients, gradients)
        values.addcdiv_(gradients, squares.sqrt().add_(self.eps), value=-self.lr)


@dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one sum of squares for each row, of the mean square (as FBGEMM's EXACT_ROWWISE_ADAGRAD)."""

    kind: ClassVar[str] = "rowwise_adagrad"

    def memory(self, dim: int) -> int:  # noqa: ARG002 - as declared
        """One number."""
        return 1

    def apply(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        """Make one step."""
        dim = gradients.shape[1]
        values, squares = rows[:, :dim], rows[:, dim:]
        squares.add_(gradients.square().mean(1, keepdim=True))
        values.addcdiv_(gradients, squares.sqrt().add_(self.eps), value=-self.lr)


@dataclass(frozen=True)
class Adam(Rule):
    """Adam, as `torch.optim.Adam`."""

    kind: ClassVar[str] = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def memory(self, dim: int) -> int:
        """Two moments of each number, and the number of steps of the row."""
        return 2 * dim + 1

    def apply(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        """Make one step."""
        dim = gradients.shape[1]
        values, first, second, steps = rows.split([dim, dim, dim, 1], 1)  # type: ignore[no-untyped-call]
        steps += 1
        first.lerp_(gradients, 1 - self.beta1)
        second.mul_(self.beta2).addcmul_(gradients, gradients, value=1 - self.beta2)
        step_size = self.lr / (1 - self.beta1**steps)
        denominator = second.sqrt().div_((1 - self.beta2**steps).sqrt_()).add_(self.eps)
        values.sub_(first / denominator * step_size)


_RULES: dict[str, type[Rule]] = {rule.kind: rule for rule in (Sum, SGD, Adagrad, RowWiseAdagrad, Adam)}


def rule_of(record: Mapping[str, Any]) -> Rule:
    """Return the rule that `Rule.to_json` described. Raises `ValueError`."""
    settings = dict(record)
    kind = settings.pop("kind", None)
    rule = _RULES.get(kind) if isinstance(kind, str) else None
    if rule is None:
        raise ValueError(f"no rule {kind!r}; there are {', '.join(_RULES)}")
    try:
        return rule(**{name: float(value) for name, value in settings.items()})
    except TypeError as error:
        raise ValueError(f"rule {kind!r}: {error}") from None
