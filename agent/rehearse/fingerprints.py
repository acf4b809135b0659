"""Short hashes of live objects, to compare two runs of a script.

Everything here only reads: it draws no random numbers, changes no tensor and puts nothing on a device. The torch module
is passed in and never imported, because a script may not use it.
"""

from __future__ import annotations

import random
import sys
from hashlib import blake2b
from typing import Any

_MAX_ELEMENTS = 1 << 16
"""Of larger tensors so many elements are hashed, evenly spread: training changes nearly all of them at once."""
_MAX_ROWS = 4096
_MAX_DEPTH = 8


class Fingerprints:
    """Hashes by value; equal for equal values in any process.

    Args:
        torch: the imported module.
    """

    def __init__(self, torch: Any) -> None:  # noqa: ANN401 - this package does not import torch
        self._torch = torch

    def of(self, *values: object) -> str:
        """Hash tensors, plain values, and lists, tuples and dicts of these; of other objects only the class name."""
        digest = blake2b(digest_size=8)
        with self._torch.no_grad():
            for value in values:
                self._feed(digest, value, 0)
        return digest.hexdigest()

    def of_optimizer(self, optimizer: Any) -> str:  # noqa: ANN401 - torch's
        """Hash an optimizer's state and settings, such as the learning rate, but not its parameters."""
        settings = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
        states = [optimizer.state.get(parameter) for parameter in parameters_of(optimizer)]
        return self.of(settings, states)

    def of_rows(self, inputs: object) -> list[str]:
        """Return a hash for each sample of a batch: each row of its first tensor. Empty if there are too many."""
        first = next(iter(self.tensors_in(inputs)), None)
        if first is None or first.ndim == 0 or first.shape[0] > _MAX_ROWS:
            return []
        if first.numel() > _MAX_ELEMENTS * max(1, first.shape[0]):
            return [self.of(row) for row in first]
        content, size = self._content_of(first), first.shape[0]
        length = len(content) // size if size else 0
        return [blake2b(content[at * length : (at + 1) * length], digest_size=8).hexdigest() for at in range(size)]

    def of_random_states(self) -> dict[str, str]:
        """Hash the global random states: Python's, NumPy's if it is imported, torch's, the GPU's if it is in use."""
        torch = self._torch
        states: dict[str, object] = {"Python": repr(random.getstate()), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            states["NumPy"] = tuple(
                part.tobytes() if hasattr(part, "tobytes") else part for part in sys.modules["numpy"].random.get_state()
            )
        if torch.cuda.is_initialized():
            states["CUDA"] = torch.cuda.get_rng_state()
        return {name: self.of(state) for name, state in states.items()}

    def has_tensor(self, inputs: object) -> bool:
        """Return whether the inputs contain a tensor, at any depth."""
        return next(iter(self.tensors_in(inputs)), None) is not None

    def tensors_in(self, value: object, depth: int = 0) -> Any:  # noqa: ANN401 - an iterator of torch's tensors
        """Yield the tensors in a value: itself, or within lists, tuples and dicts."""
        if isinstance(value, self._torch.Tensor):
            yield value
        elif depth < _MAX_DEPTH and isinstance(value, (list, tuple, dict)):
            for part in value.values() if isinstance(value, dict) else value:
                yield from self.tensors_in(part, depth + 1)

    def _feed(self, digest: Any, value: object, depth: int) -> None:  # noqa: ANN401 - hashlib's type has no name
        if isinstance(value, self._torch.Tensor):
            digest.update(self._bytes_of(value))
        elif isinstance(value, dict) and depth < _MAX_DEPTH:
            for key in sorted(value, key=str):
                digest.update(f"{key}=".encode())
                self._feed(digest, value[key], depth + 1)
        elif isinstance(value, (list, tuple)) and depth < _MAX_DEPTH:
            digest.update(f"[{len(value)}".encode())
            for part in value:
                self._feed(digest, part, depth + 1)
        elif value is None or isinstance(value, (int, float, str, bytes)):
            digest.update(f"{value!r};".encode())
        else:
            digest.update(f"{type(value).__qualname__};".encode())  # a repr may contain an address

    def _bytes_of(self, tensor: Any) -> bytes:  # noqa: ANN401 - torch's
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.numel() > _MAX_ELEMENTS:
            flat = local.detach().reshape(-1)
            local = flat[:: len(flat) // _MAX_ELEMENTS + 1]
        return f"{tuple(tensor.shape)}".encode() + self._content_of(local)

    def _content_of(self, tensor: Any) -> bytes:  # noqa: ANN401 - torch's
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        content: bytes = flat.view(self._torch.uint8).numpy().tobytes()
        return content


def parameters_of(optimizer: Any) -> list[Any]:  # noqa: ANN401 - torch's
    """Return all parameters of an optimizer, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
