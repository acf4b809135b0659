"""The hook: the interpreter finds it first on PYTHONPATH and imports it during start-up, before the script.

Whatever happens here, a standby must not run its script without "go", and a cold start must continue. The script would
find imported what this file imports, so it imports only what the interpreter has loaded by then.
"""

import os
import sys

TYPE_CHECKING = False  # importing `typing` takes longer than this whole file
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(__file__)
_PACKAGE = "_elastic_agent_standby"  # private: the script may find another version under our own name
# The same as in `trainer_runtime.contract`, whose import takes too long.
_STANDBY_FD = "ELASTIC_AGENT_STANDBY_FD"
_STANDBY_ORDER_FD = "ELASTIC_AGENT_STANDBY_ORDER_FD"
_STANDBY_PYTHONPATH = "ELASTIC_AGENT_STANDBY_PYTHONPATH"
_IMPORTS_FD = "ELASTIC_AGENT_IMPORTS_FD"


def _begin() -> None:
    """Do everything that comes before the script."""
    is_standby = _STANDBY_FD in os.environ
    try:
        variables = _undo()
        recorder = _load("import_recorder").ImportRecorder.of(variables.get(_IMPORTS_FD))
        if is_standby:
            _load("waiting").stand_by(int(variables[_STANDBY_FD]), int(variables[_STANDBY_ORDER_FD]), recorder)
        _load("wait_for_master").install()
        _load("import_hooks").pause_garbage_collection()
        recorder.start()
    except BaseException as error:  # noqa: BLE001 - includes what an imported module raises to exit
        what = "a warm worker ends" if is_standby else "what this worker imports is not recorded"
        os.write(2, f"elastic-agent: {what}: {type(error).__name__}: {error}\n".encode(errors="replace"))
        if is_standby:
            os._exit(1)


def _undo() -> dict[str, str]:
    """Remove the changes that loaded this hook from the environment and the path; return our own variables."""
    names = (_STANDBY_FD, _STANDBY_ORDER_FD, _STANDBY_PYTHONPATH, _IMPORTS_FD)
    variables = {name: os.environ.pop(name) for name in names if name in os.environ}
    if _HERE in sys.path:
        sys.path.remove(_HERE)
    sys.path_importer_cache.pop(_HERE, None)
    if _STANDBY_PYTHONPATH in variables:
        os.environ["PYTHONPATH"] = variables[_STANDBY_PYTHONPATH]
    else:
        os.environ.pop("PYTHONPATH", None)
    return variables


def _load(name: str) -> "Any":  # noqa: ANN401 - a module
    """Import one of our modules and remove it, and what it imported, from `sys.modules`, as the script expects."""
    known = set(sys.modules)
    package = type(sys)(_PACKAGE)
    package.__path__ = [_HERE]
    sys.modules[_PACKAGE] = package
    try:
        return getattr(__import__(f"{_PACKAGE}.{name}"), name)
    finally:
        for new in set(sys.modules) - known:
            if not new.startswith("encodings."):  # the interpreter caches these and would not import them again
                del sys.modules[new]
        sys.path_importer_cache.pop(_HERE, None)


def _run_user_sitecustomize() -> None:
    """Run the user's own `sitecustomize`; raise ImportError if there is none, as Python would."""
    import site  # noqa: PLC0415 - `site` imports this file, so it is loaded

    del sys.modules["sitecustomize"]
    site.execsitecustomize()
    if "sitecustomize" not in sys.modules:
        raise ImportError("no sitecustomize but the agent's", name="sitecustomize")  # `site` ignores this error


if __name__ == "sitecustomize":
    _begin()
    _run_user_sitecustomize()
