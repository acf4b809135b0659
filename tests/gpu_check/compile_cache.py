"""Row 6: the first step of a compiled model, without and with the compilers' caches of an earlier process."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_check.processes import run
from gpu_check.results import Options, Result


def check(options: Options) -> Iterator[Result]:
    """Yield one result."""
    caches = {
        name: str(options.directory / "caches" / name)
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
    }
    without, kept = (run("compiled_step.py", environ=caches)[0]["first_step_s"] for _ in range(2))
    yield Result(what="first step of a compiled model", figures=f"{without:.1f} s, with the caches kept {kept:.1f} s")
