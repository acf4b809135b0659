"""How the containers of a state nest, apart from what is in them.

A state is taken apart at every snapshot, so this is one pass that does as little as possible for each leaf: leaves come
in the order in which the pass meets them, and of each container it is noted how many leaves came before it. That is
enough to put the state together again, and two states that are made alike have equal containers.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.Size, torch.device})
"""Kinds of values that load back as they are. A list or tuple of nothing else is one leaf."""

_DICT, _ORDERED, _LIST, _TUPLE = range(4)
_CODES: dict[type, int] = {dict: _DICT, OrderedDict: _ORDERED, list: _LIST, tuple: _TUPLE}

Container = tuple[int, int, tuple[Any, ...] | int]
"""Its kind, the number of leaves before it, and its keys or how many parts it has."""


@dataclass(frozen=True, slots=True)
class Apart:
    """A state that was taken apart."""

    containers: list[Container] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    """Whatever is no container; of an `OrderedDict` also its attributes, before its values."""

    def add(self, part: Any) -> None:  # noqa: ANN401 - whatever a state holds
        """Take apart what comes next."""
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
                self.leaves.append(vars(part))  # a module's state has the versions of its parts there
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


def put_together(containers: list[Container], leaves: list[Any]) -> Any:  # noqa: ANN401 - as it was
    """Return the state that was taken apart into these."""
    return _Builder(containers, leaves).part()


class _Builder:
    def __init__(self, containers: list[Container], leaves: list[Any]) -> None:
        self._containers, self._leaves = containers, leaves
        self._opened = self._taken = 0

    def part(self) -> Any:  # noqa: ANN401 - whatever comes next
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
