"""A configuration file: options of the command line by their names, in TOML.

    job_id = "resnet"
    elastic_server = "etcd:2379"
    np = "2:4"
    checkpoint_dir = "/shared/checkpoints"

The command line wins over a variable, and a variable over the file. The script and its arguments stay on the command
line. Commands about a job take from the same file which job they are about.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

import click

from agent.errors import ConfigError

_OF_A_JOB = frozenset(
    {"elastic_server", "etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file", "job_id"}
)
"""What commands about a job take from the file: the rest is about the agent, or for them has another meaning."""
_ITSELF = "config"


def use_config_file(context: click.Context, _parameter: click.Parameter, path: str | None) -> str | None:
    """Make the values of a file the defaults of the other options. To be called before these are read.

    Raises:
        ConfigError: the file cannot be read, or names something that is no option.
    """
    if not path:
        if path == "":
            raise ConfigError("--config is empty: give it a file, or leave it out")
        return None
    given = _values_in(path)
    has_script = any(parameter.name == "nproc_per_node" for parameter in context.command.params)
    context.default_map = given if has_script else {name: given[name] for name in given.keys() & _OF_A_JOB}
    return path


def _values_in(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        read = tomllib.loads(text)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--config={path} cannot be read: {why}; wanted TOML as in: np = 2") from None
    names = _names()
    values: dict[str, Any] = {}
    for key, value in read.items():
        name = names.get(key.replace("-", "_"))
        if name is None:
            if isinstance(value, dict):
                raise ConfigError(f"--config={path}: options stand at the top level, not in a table: [{key}]")
            near = difflib.get_close_matches(key.replace("-", "_"), names, 1)
            hint = f"did you mean {near[0]}?" if near else "see elastic-agent help all for the names"
            raise ConfigError(f"--config={path}: {key} is no option: {hint}")
        if name in values:
            raise ConfigError(f"--config={path}: {key} and another line set the same option: keep one")
        values[name] = _value_of(path, key, value)
    return values


def _value_of(path: str, key: str, value: object) -> object:
    if isinstance(value, list) and all(isinstance(each, str | int) for each in value):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return value
    if isinstance(value, str | int | float):
        return str(value)  # refused or taken as on the command line
    raise ConfigError(f"--config={path}: {key} must be a text, a number, true, false or a list of texts, not {value!r}")


def _names() -> dict[str, str]:
    """The name of each option, by all of its names without hyphens."""
    from agent.cli.options import parameters_of  # noqa: PLC0415 - these modules declare --config
    from agent.cli.run_options import TOPICS  # noqa: PLC0415 - same

    options = [each for topic in TOPICS for each in parameters_of(topic.options) if each.name != _ITSELF]
    return {spelling.lstrip("-"): str(each.name) for each in options for spelling in each.opts if spelling[:2] == "--"}
