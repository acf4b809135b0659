"""environment.md: the variables that a process of a job gets, and those that the agent reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from agent.cli.command_line import COMMANDS, run
from agent.cli.options import DocumentedOption
from reference_pages.source import Source, cell, code_cell, page, source_of, sources_in, table

_RANK = {
    "LOCAL_RANK": "Rank within this node, from 0.",
    "RANK": "Rank in the group, from 0.",
    "GROUP_RANK": "Position of this node in the group, from 0.",
    "ROLE_RANK": "Same as `RANK`.",
    "ROLE_NAME": "Value of `--role`.",
    "LOCAL_WORLD_SIZE": "Number of ranks on this node.",
    "WORLD_SIZE": "Number of ranks in the group.",
    "GROUP_WORLD_SIZE": "Number of nodes in the group.",
    "ROLE_WORLD_SIZE": "Same as `WORLD_SIZE`.",
    "MASTER_ADDR": "Address of the node of rank 0.",
    "MASTER_PORT": "Port for the process group on that node.",
    "TORCHELASTIC_RESTART_COUNT": "Number of groups in this run before the current one.",
    "TORCHELASTIC_MAX_RESTARTS": "Value of `--max_restarts`.",
    "TORCHELASTIC_RUN_ID": "Name of the job.",
    "TORCHELASTIC_USE_AGENT_STORE": "`False`: rank 0 hosts the store of the process group.",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "Signals that ask the node to leave.",
    "TORCHELASTIC_ERROR_FILE": "File to which torch's `@record` writes the exception that ends the rank.",
    "PADDLE_TRAINER_ID": "Same as `RANK`. For heterogeneous workers the count goes on after the workers.",
    "PADDLE_TRAINERS_NUM": "Number of ranks or, in a job with parameter servers, of workers of both kinds.",
    "PADDLE_CURRENT_ENDPOINT": "Address and port of this process.",
    "PADDLE_TRAINER_ENDPOINTS": "Addresses and ports of all ranks or workers. Absent if it would be too long.",
    "PADDLE_RANK_IN_NODE": "Same as `LOCAL_RANK`.",
    "TRAINING_ROLE": "`TRAINER`, `PSERVER` or `HETER_TRAINER`.",
    "PADDLE_PSERVERS_IP_PORT_LIST": "Addresses and ports of all parameter servers.",
    "PADDLE_HETER_TRAINER_IP_PORT_LIST": "Addresses and ports of all heterogeneous workers.",
    "PADDLE_HETER_TRAINER_DEVICE": "Value of `--heter_devices`.",
    "POD_IP": "Address of the process's machine.",
    "PADDLE_PORT": "Port of this process.",
    "PADDLE_GLOO_HTTP_ENDPOINT": "Where the workers meet, with `--http_port`.",
    "FLAGS_selected_gpus": "GPUs of this rank, counted among those that it sees.",
    "CUDA_VISIBLE_DEVICES": "GPUs that the process may use.",
    "ELASTIC_AGENT_JOB_ID": "Name of the job.",
    "ELASTIC_AGENT_NODE_ID": "Name of this node.",
    "ELASTIC_AGENT_CHECKPOINT_DIR": "Directory for checkpoints.",
    "ELASTIC_AGENT_CHANNEL_FD": "Socket between the agent and the rank.",
    "ELASTIC_AGENT_CONTROL_FD": "Shared memory page of the agent and the rank.",
    "ELASTIC_AGENT_STACKS_FD": "Memory file to which the rank writes its stacks.",
    "ELASTIC_AGENT_PS_SECRET": "Secret by which the processes of a job with parameter servers authenticate.",
    "PYTHONUNBUFFERED": "Default `1`: output is written at once.",
    "PYTHONFAULTHANDLER": "Default `1`: a fatal signal prints the Python stacks.",
    "OMP_NUM_THREADS": "Default `1` if the node has several ranks, and in a job with parameter servers.",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "Default `1`: a failed collective ends the rank.",
    "GLOO_SOCKET_IFNAME": "Default: the network interface that has this node's address.",
    "NCCL_SOCKET_IFNAME": "Default: the network interface that has this node's address.",
}
"""Descriptions of variables whose declaration has no docstring."""

_READ = {
    "ELASTIC_AGENT_ETCD_PASSWORD": "Password of `--etcd_user` or, with `--ips`, the secret that the machines share. No "
    "child process inherits it.",
    "CUDA_VISIBLE_DEVICES": "GPUs that the agent may give to its ranks.",
    "JOB_COMPLETION_INDEX": "Indexed Job of Kubernetes: an agent that a signal asks to leave exits with code 75.",
    "SLURM_JOB_ID": "Slurm: the job is named `slurm-ID`.",
    "SLURM_STEP_ID": "Slurm: the agent is a task of `srun`.",
    "SLURM_STEP_NODELIST": "Slurm: the machines of the job.",
    "SLURM_STEP_NUM_TASKS": "Slurm: must equal the number of machines.",
    "SLURM_STEP_GPUS": "Slurm: number of ranks if `CUDA_VISIBLE_DEVICES` is not set.",
    "SLURM_TOPOLOGY_ADDR": "Slurm: the switch that this node is at, as the default of `--fault_domain`.",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "Slurm: what the names in `SLURM_TOPOLOGY_ADDR` are.",
    "SLURMD_NODENAME": "Slurm: this machine.",
    "SLURM_NODEID": "Slurm: position of this machine, if `SLURMD_NODENAME` is not set.",
    "XDG_RUNTIME_DIR": "Where jobs without an etcd of yours are recorded on this machine, so that commands find them.",
    "PYTHONPATH": "Passed on to child processes, with the agent's own directory where they need it.",
    "PATH": "Where programs such as `nvidia-smi` are looked for.",
    "TERM": "Whether the terminal can redraw its last line.",
    "no_proxy": "Whether proxies are switched off, which the agent's own connections never use.",
    "NO_PROXY": "Same as `no_proxy`.",
    "OMP_NUM_THREADS": "Default `1` in a rehearsal.",
    "_ELASTIC_AGENT_COMPLETE": "Set by the script for shell completion.",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "Where incidents are sent as traces, if the OpenTelemetry SDK is installed.",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "The same, for traces only.",
    "TORCHELASTIC_ERROR_FILE": "File that gets the first failure of a failed job, as from torchrun.",
    "FLAGS_check_nan_inf": "Paddle's: not used; a warning names the alternative.",
}
"""Descriptions of variables that the agent reads beside those of options."""

_OF_A_RANK = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR"})
"""A module that sets all of these makes the environment of a process."""
_INTERNAL = ("_FD", "STANDBY", "IMPORTS", "SCRIPT_CALLS", "REHEARSAL", "GUARDIAN", "PS_SECRET")


def environment_page() -> str:
    """The variables that a process of the job gets, and those that the agent reads."""
    given = given_variables()
    torchrun = {name for name in given if name in _TORCHRUN_NAMES or name.startswith("TORCHELASTIC_")}
    paddle = {name for name in given if name.startswith(("PADDLE_", "FLAGS_", "TRAINING_")) or name == "POD_IP"}
    ours = {name for name in given if name.startswith("ELASTIC_AGENT_")}
    internal = {name for name in ours if any(part in name for part in _INTERNAL)}
    rest = given.keys() - torchrun - paddle - ours
    parts = [
        "## What ranks, workers and servers get\n",
        (
            "A process inherits the environment that the agent was started with, except for etcd's credentials, and "
            "gets the following variables.\n"
        ),
    ]
    for title, names in (
        ("As from torchrun", torchrun),
        ("As from Paddle's launcher", paddle),
        ("Variables of elastic-agent", ours - internal),
        ("Set by elastic-agent for its own runtime", internal),
        ("Others: your own value wins for those with a default", rest),
    ):
        rows = [(code_cell(name), cell(given[name])) for name in sorted(names)]
        parts += [f"### {title}\n", table(("variable", "meaning"), rows)]
    parts += [
        "## What the agent reads\n",
        (
            "Each option `--some_name` is also read from `ELASTIC_AGENT_SOME_NAME`: see [options.md](options.md). The "
            "following variables of other launchers are read, too. The command line wins.\n"
        ),
        table(("variable", "option"), _foreign_variables()),
        "Variables without an option:\n",
        table(
            ("variable", "meaning", "read in"),
            ((code_cell(name), cell(_READ.get(name, "")), places) for name, places in read_variables().items()),
        ),
    ]
    return page("Environment variables", *parts)


_TORCHRUN_NAMES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"}
    | {"ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)


def given_variables() -> dict[str, str]:
    """Description of each variable that a process of the job gets, by name."""
    found: dict[str, str] = {}
    for source in sources_in("agent"):
        names = {name for node in ast.walk(source.tree) for name in _keys_in(node, source)}
        if names >= _OF_A_RANK:
            found |= {name: _RANK.get(name, "") for name in names} | _documented_variables(source)
    return found | _documented_variables(source_of("trainer_runtime/contract.py"))


def _documented_variables(source: Source) -> dict[str, str]:
    """Constants of a module that name a variable, with their descriptions."""
    constants = ((ast.literal_eval(each.value), each.doc) for each in source.constants if each.value[:1] == "'")
    return {name: doc or _RANK.get(name, "") for name, doc in constants if name.startswith("ELASTIC_AGENT_")}


def _keys_in(node: ast.AST, source: Source) -> Iterator[str]:
    """Variables among the keys of a dictionary, or that are set in one."""
    keys: list[ast.expr | None] = []
    if isinstance(node, ast.Dict):
        keys = list(node.keys)
    elif isinstance(node, ast.Assign):
        keys = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
    values = (source.value_of(key) for key in keys if key is not None)
    return (value for value in values if value is not None and value.upper().isidentifier() and _looks_set(value))


def _looks_set(name: str) -> bool:
    return name.isupper() or name.startswith("FLAGS_")


def read_variables() -> dict[str, str]:
    """Where each variable that no option declares is read by the agent, by name in order."""
    declared = {name for command in COMMANDS.values() for each in command.params for name in each.envvar or ()}
    found: dict[str, set[str]] = {}
    for source in sources_in("agent"):
        for node in ast.walk(source.tree):
            name = _read_by(node, source)
            if name is not None and name not in declared and not _is_given_back(name):
                found.setdefault(name, set()).add(source.place)
    for name in _READ.keys() - found.keys():  # by a loop over names
        literals = (
            source.place for source in sources_in("agent") if f'"{name}"' in source.path.read_text(encoding="utf-8")
        )
        found[name] = {next(literals, "")}
    return {name: ", ".join(map(code_cell, sorted(places))) for name, places in sorted(found.items())}


def _is_given_back(name: str) -> bool:
    """Whether the agent's own runtime reads what the agent has set."""
    return (name.startswith("ELASTIC_AGENT_") and name not in _READ) or name in {"RANK", "WORLD_SIZE"}


def _read_by(node: ast.AST, source: Source) -> str | None:
    """The variable that an expression reads from an environment."""
    if isinstance(node, ast.Subscript):
        mapping, key = node.value, node.slice
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        mapping, key = node.comparators[0], node.left
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        mapping, key = node.func.value, node.args[0]
        if node.func.attr not in {"get", "pop", "setdefault"}:
            return None
    else:
        return None
    return source.value_of(key) if ast.unparse(mapping).endswith("environ") else None


def _foreign_variables() -> list[tuple[str, str]]:
    pairs = [
        (name, f"--{each.name}")
        for each in run.params
        if isinstance(each, DocumentedOption)
        for name in each.variables
        if not name.startswith("ELASTIC_AGENT_")
    ]
    return [(code_cell(name), code_cell(option)) for name, option in sorted(pairs)]
