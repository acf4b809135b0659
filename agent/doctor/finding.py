"""What a check says: what it found, and what to do where that is wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis."""

    about: str
    found: str
    do: str = ""
    """Empty: it is as it should be."""

    @property
    def is_fine(self) -> bool:
        """Whether there is nothing to do."""
        return not self.do

    @property
    def line(self) -> str:
        """For people."""
        if self.is_fine:
            return f"ok     {self.about}: {self.found}"
        return f"WRONG  {self.about}: {self.found}; do: {self.do}"
