"""What the doctors compare and report: a machine's versions and files, and the findings of the checks."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from agent.files import open_regular

_MODULES = 200
_PACKAGES = ("elastic-agent", "torch", "numpy")


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    about: str
    found: str
    do: str = ""
    """What to do about it. Empty: nothing is wrong."""

    @property
    def is_fine(self) -> bool:
        """Whether there is nothing to do."""
        return not self.do

    @property
    def line(self) -> str:
        """The finding as a line of text."""
        if self.is_fine:
            return f"ok     {self.about}: {self.found}"
        return f"WRONG  {self.about}: {self.found}; do: {self.do}"


@dataclass(frozen=True)
class Facts:
    """The software of a machine: package versions, and the script with the modules beside it."""

    packages: Mapping[str, str]
    """Version by package name."""
    files: Mapping[str, str]
    """Digest of the script and of the modules beside it that it may import, by file name."""
    script: str = ""
    """File name of the script. Empty: none, or not known."""

    @classmethod
    def here(cls, script: Path | None) -> Facts:
        """Collect the facts of this machine."""
        packages = {"python": ".".join(map(str, sys.version_info[:3]))}
        for name in _PACKAGES:
            with suppress(metadata.PackageNotFoundError):
                packages[name] = metadata.version(name)
        if script is None:
            return cls(packages, {})
        files = {path.name: hashlib.sha256(content).hexdigest() for path, content in _read_with_modules(script).items()}
        return cls(packages, files, script.name)

    @classmethod
    def from_json(cls, data: Any) -> Facts:  # noqa: ANN401 - received over the network
        """Parse the facts of another machine. Raises `ValueError`, `TypeError` or `KeyError` if they are invalid."""
        packages, files = (
            {str(name): str(value) for name, value in data[kind].items()} for kind in ("packages", "files")
        )
        return cls(packages, files, str(data["script"]))

    @property
    def brief(self) -> tuple[tuple[str, str], ...]:
        """The versions, the script's name, and one digest of all files."""
        digest = hashlib.sha256(repr(sorted(self.files.items())).encode()).hexdigest()[:12] if self.files else ""
        scripts = (("script name", self.script), ("script", digest)) if digest else ()
        return (*sorted(self.packages.items()), *scripts)

    def differences(self, other: Facts) -> list[str]:
        """Describe what differs on the other machine."""
        names = sorted({*self.packages, *other.packages})
        versions = [
            f"{name} {self.packages.get(name, 'none')} here, {other.packages.get(name, 'none')} there"
            for name in names
            if self.packages.get(name) != other.packages.get(name)
        ]
        changed = sorted(name for name in {*self.files, *other.files} if self.files.get(name) != other.files.get(name))
        if self.script and other.script and self.script != other.script:
            versions.append(f"script {self.script} here, {other.script} there")
        return versions + ([f"different contents of {', '.join(changed[:5])}"] if changed else [])


def _read_with_modules(script: Path) -> dict[Path, bytes]:
    """Return the contents of a script, and of those modules beside it whose names occur in it or in one of them."""
    beside = {path.stem.encode(): path for path in sorted(script.parent.glob("*.py"))[:_MODULES]}
    read, wanted = dict[Path, bytes](), [script]
    while wanted:
        path = wanted.pop()
        if path in read:
            continue
        with suppress(OSError), os.fdopen(open_regular(path), "rb") as file:  # it may belong to another user
            read[path] = file.read()
            wanted += [beside[word] for word in set(re.findall(rb"\w+", read[path])) & beside.keys()]
    return read
