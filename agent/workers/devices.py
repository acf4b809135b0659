"""The GPUs that the ranks of this node use: detected or chosen, and divided evenly.

As with Paddle's launcher, `--gpus` selects from CUDA_VISIBLE_DEVICES or, if that is not set, from the GPUs that the
driver lists. All ranks see all selected GPUs, in that order, so that both conventions work: `LOCAL_RANK` picks one
where each rank has one, and FLAGS_selected_gpus lists a rank's own GPUs as indices into those that it sees.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from os import cpu_count
from pathlib import Path
from shutil import which

from agent.core.bounds import MAX_NPROC
from agent.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")
_QUERY_WITHIN_S = 30.0
"""A cold machine with eight GPUs, whose driver is not kept loaded, needs ten seconds."""
_DEVICES = Path("/dev")


def choose(asked: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that this node's ranks may use, by `--gpus` and CUDA_VISIBLE_DEVICES. Empty: none were chosen.

    Raises:
        ConfigError: a GPU that was asked for does not exist.
    """
    visible = _visible(environ)
    if asked is None:
        return visible or ()
    wanted = tuple(word.strip() for word in asked.split(","))
    known = _installed(environ) if visible is None else visible
    unknown = [gpu for gpu in wanted if gpu not in known]
    if unknown or len(set(wanted)) < len(wanted):
        where = "the driver lists" if visible is None else f"{VISIBLE} has"
        wrong = f"there is no GPU {unknown[0]!r}" if unknown else "one is named twice"
        raise ConfigError(f"--gpus={asked}: {wrong}; {where} {','.join(known) or 'none'}")
    return wanted


def count_ranks(asked: str | None, gpus: tuple[str, ...], environ: Mapping[str, str]) -> int:
    """Return the number of rank processes, from `--nproc_per_node` and the selected GPUs.

    Without a number there is one rank for each GPU, selected or detected, and one rank if there is no GPU. torchrun's
    words `gpu`, `cpu` and `auto` are accepted.

    Raises:
        ConfigError: the number does not fit.
    """
    if asked in {None, "gpu", "auto"}:
        found = len(gpus) if gpus or VISIBLE in environ else len(_indices(environ))
        if asked == "gpu" and not found:
            raise ConfigError("--nproc_per_node=gpu: there is no GPU here; give a number")
        return found or ((cpu_count() or 1) if asked == "auto" else 1)
    if asked == "cpu":
        return cpu_count() or 1
    nproc = _number(asked)
    if gpus and len(gpus) % nproc:
        fits = ", ".join(str(n) for n in range(1, len(gpus) + 1) if len(gpus) % n == 0)
        raise ConfigError(
            f"--nproc_per_node={nproc} does not divide the GPUs {','.join(gpus)} evenly: give {fits}, or choose "
            "others with --gpus"
        )
    return nproc


def detect(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the indices of the installed GPUs, unless CUDA_VISIBLE_DEVICES selects some.

    Raises:
        ConfigError: the driver does not answer.
    """
    return () if VISIBLE in environ else _indices(environ)


def bus_ids(gpus: tuple[str, ...], environ: Mapping[str, str]) -> list[str]:
    """Return the PCI bus ids of the selected GPUs, or else of all; empty if the driver does not know all of them."""
    known = _ask_driver(environ)
    if not gpus and VISIBLE not in environ:
        return [bus_id for _, _, bus_id in known]
    by_name = {name: bus_id for *names, bus_id in known for name in names}
    return [by_name[gpu] for gpu in gpus] if set(gpus) <= by_name.keys() else []


def gpus_of_rank(environ: Mapping[str, str], nproc: int, local_rank: int) -> str:
    """Return the value of FLAGS_selected_gpus for a rank: its GPUs, as indices into those it sees. Empty: no choice."""
    gpus = _visible(environ) or ()
    each = len(gpus) // nproc if len(gpus) % nproc == 0 else 0
    return ",".join(map(str, range(local_rank * each, (local_rank + 1) * each)))


def _visible(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the GPUs of CUDA_VISIBLE_DEVICES; None: it is not set. As in CUDA, an empty entry or -1 ends the list."""
    if VISIBLE not in environ:
        return None
    found: list[str] = []
    for word in environ[VISIBLE].split(","):
        if word.strip() in {"", "-1", "NoDevFiles"}:
            break
        found.append(word.strip())
    return tuple(found)


def _installed(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return index and UUID of each GPU: `--gpus` accepts both."""
    return tuple(word for gpu in _ask_driver(environ) for word in gpu[:2] if word)


def _indices(environ: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(index for index, *_ in _ask_driver(environ))


def _ask_driver(environ: Mapping[str, str]) -> list[list[str]]:
    """Return index, UUID and bus id of each GPU; empty without a driver. Raises `ConfigError` if it does not answer."""
    if which(_QUERY[0], path=environ.get("PATH")) is None:
        # A container may have GPUs without the driver's tools. Then only their order is known.
        return [[str(number), "", ""] for number in range(sum(1 for _ in _DEVICES.glob("nvidia[0-9]*")))]
    asked = subprocess.Popen(_QUERY, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = asked.communicate(timeout=_QUERY_WITHIN_S)
    except subprocess.TimeoutExpired:
        asked.kill()  # do not wait: without its driver it may stay in the kernel
        raise ConfigError(_no_answer(f"not within {_QUERY_WITHIN_S:g} s")) from None
    if asked.returncode:
        if "No devices were found" in output:
            return []
        raise ConfigError(_no_answer(" ".join(output.split())[:200]))
    return [[word.strip() for word in line.split(",")] for line in output.splitlines()]


def _no_answer(how: str) -> str:
    return (
        f"nvidia-smi does not say which GPUs there are: {how}; repair it, or name them in CUDA_VISIBLE_DEVICES (empty: "
        "none) or, where the script chooses them, how many ranks by --nproc_per_node"
    )


def _number(text: str) -> int:
    nproc = int(text) if re.fullmatch(r"[0-9]{1,9}", text.strip()) else 0
    if not 1 <= nproc <= MAX_NPROC:
        raise ConfigError(
            f"--nproc_per_node must be at least 1 and at most {MAX_NPROC}, or gpu, cpu or auto, not {text}"
        )
    return nproc
