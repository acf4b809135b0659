"""The nesting of a state's containers, separate from their content.

A state is taken apart at every snapshot, so this is a single pass with as little work per leaf as possible. Leaves are
listed in the order of the pass, and for each container the number of leaves before it is recorded. That suffices to put
the state together again, and two states of the same structure have equal containers.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.Size, torch.device})
"""Types of values that load back as they are. A list or tuple with only such values is one leaf."""

_DICT, _ORDERED, _LIST, _TUPLE = range(4)
_CODES: dict[type, int] = {dict: _DICT, OrderedDict: _ORDERED, list: _LIST, tuple: _TUPLE}

Container = tuple[int, int, tuple[Any, ...] | int]
"""Kind of the container, number of leaves before it, and its keys or number of elements."""


@dataclass(frozen=True, slots=True)
class Apart:
    """A state that was taken apart."""

    containers: list[Container] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    """Everything that is not a container; for an `OrderedDict` also its attributes, before its values."""

    def add(self, part: Any) -> None:  # noqa: ANN401 - anything that a state contains
        """Take a part of the state apart, and append its containers and leaves."""
        code = _CODES.get(type(part))
        if code is None or (code >= _LIST and PLAIN.issuperset(map(type, part))):
            self.leaves.append(part)
            return
        if code >= _LIST:
            self.containers.append((code, len(self.leaves), len(part)))
            inner = part
        else:
            self.containers.append((code, len(self.leaves), tuple(part)))
            inner = part.values()
            if code == _ORDERED:
                self.leaves.append(vars(part))  # a module's state keeps the versions of its submodules there
        for each in inner:
            if type(each) in _CODES:
                self.add(each)
            else:
                self.leaves.append(each)


def take_apart(value: object) -> Apart:
    """Return the containers and leaves of a state."""
    apart = Apart()
    apart.add(value)
    return apart


def put_together(containers: list[Container], leaves: list[Any]) -> Any:  # noqa: ANN401 - any state
    """Return the state that was taken apart into these containers and leaves."""
    return _Builder(containers, leaves).part()


class _Builder:
    def __init__(self, containers: list[Container], leaves: list[Any]) -> None:
        self._containers, self._leaves = containers, leaves
        self._opened = self._taken = 0

    def part(self) -> Any:  # noqa: ANN401 - any part
        if self._opened == len(self._containers) or self._containers[self._opened][1] > self._taken:
            return self._leaf()
        code, _, keys = self._containers[self._opened]
        self._opened += 1
        if isinstance(keys, int):
            parts = [self.part() for _ in range(keys)]
            return parts if code == _LIST else tuple(parts)
        if code == _DICT:
            return {key: self.part() for key in keys}
        attributes = self._leaf()
        ordered = OrderedDict((key, self.part()) for key in keys)
        ordered.__dict__.update(attributes)
        return ordered

    def _leaf(self) -> Any:  # noqa: ANN401 - as above
        self._taken += 1
        return self._leaves[self._taken - 1]
