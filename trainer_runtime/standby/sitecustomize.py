"""The hook: found by the interpreter first on PYTHONPATH, in its start-up, before it looks at the script.

Whatever happens here, a standby does not run its script unasked, and a cold start goes on. What this file imports, the
script would find imported; nothing but what the interpreter has by then.
"""

import os
import sys

TYPE_CHECKING = False  # `typing` takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(__file__)
_PACKAGE = "_elastic_agent_standby"  # not by our own name: that may be another version, where the script looks for it
# As in `trainer_runtime.contract`, which takes too long to import.
_STANDBY_FD = "ELASTIC_AGENT_STANDBY_FD"
_STANDBY_ORDER_FD = "ELASTIC_AGENT_STANDBY_ORDER_FD"
_STANDBY_PYTHONPATH = "ELASTIC_AGENT_STANDBY_PYTHONPATH"
_IMPORTS_FD = "ELASTIC_AGENT_IMPORTS_FD"


def _begin() -> None:
    """Do all that is to be done before the script runs."""
    is_standby = _STANDBY_FD in os.environ
    try:
        told = _undo()
        recorder = _load("import_recorder").ImportRecorder.of(told.get(_IMPORTS_FD))
        if is_standby:
            _load("waiting").stand_by(int(told[_STANDBY_FD]), int(told[_STANDBY_ORDER_FD]), recorder)
        _load("wait_for_master").install()
        recorder.start()
    except BaseException as error:  # noqa: BLE001 - also what a module that was imported raises to end the process
        what = "a warm worker ends" if is_standby else "what this worker imports is not recorded"
        os.write(2, f"elastic-agent: {what}: {type(error).__name__}: {error}\n".encode(errors="replace"))
        if is_standby:
            os._exit(1)


def _undo() -> dict[str, str]:
    """Take away what let us in; return what we were told."""
    names = (_STANDBY_FD, _STANDBY_ORDER_FD, _STANDBY_PYTHONPATH, _IMPORTS_FD)
    told = {name: os.environ.pop(name) for name in names if name in os.environ}
    if _HERE in sys.path:
        sys.path.remove(_HERE)
    sys.path_importer_cache.pop(_HERE, None)
    if _STANDBY_PYTHONPATH in told:
        os.environ["PYTHONPATH"] = told[_STANDBY_PYTHONPATH]
    else:
        os.environ.pop("PYTHONPATH", None)
    return told


def _load(name: str) -> "Any":  # noqa: ANN401 - a module
    """Import a module of ours without a trace: what it imported, the script finds as in any other start."""
    known = set(sys.modules)
    package = type(sys)(_PACKAGE)
    package.__path__ = [_HERE]
    sys.modules[_PACKAGE] = package
    try:
        return getattr(__import__(f"{_PACKAGE}.{name}"), name)
    finally:
        for new in set(sys.modules) - known:
            if not new.startswith("encodings."):  # the interpreter keeps these and would not import them again
                del sys.modules[new]
        sys.path_importer_cache.pop(_HERE, None)


def _let_in_own() -> None:
    """Run the user's own `sitecustomize`; raise ImportError if there is none, for none is there to be found then."""
    import site  # noqa: PLC0415 - it is what imports us

    del sys.modules["sitecustomize"]
    site.execsitecustomize()
    if "sitecustomize" not in sys.modules:
        raise ImportError("no sitecustomize but the agent's", name="sitecustomize")  # `site` takes it as its absence


if __name__ == "sitecustomize":
    _begin()
    _let_in_own()
