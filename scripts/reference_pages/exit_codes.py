"""exit-codes.md: exit codes of the agent, of commands and of workers."""

from __future__ import annotations

import ast

from reference_pages.source import cell, code_cell, fields_of, page, source_of, table

_AGENT_CODES = {
    0: "The job succeeded or was stopped by `elastic-agent stop`, or this agent was asked to leave.",
    1: "An error in elastic-agent itself, a declined confirmation, or a worker's own code that is one of these codes.",
    2: "A mistake on the command line, a damaged record, credentials that etcd refuses, or a limit of this machine "
    "that leaves no room.",
    69: "etcd could not be reached.",
    74: "The job was stopped by `elastic-agent stop`, and steps that only the agents' memory had could not be saved.",
    75: "`--elastic_timeout` or a command's `--wait` passed, or the agent was asked to leave by a signal under "
    "Slurm or in an Indexed Job of Kubernetes.",
    76: "Too many restarts without progress (`--max_restarts`).",
    130: "Ctrl-C.",
}
_FOR_SCHEDULERS = (
    ("0", "no", "The job has finished, an operator has stopped it, or the others continue without this node."),
    ("2", "no", "The same line would end in the same way: somebody must change something first."),
    ("69", "yes, later", "etcd was away. The job continues from its newest checkpoint."),
    ("74", "no", "An operator has stopped the job."),
    ("75", "yes", "The nodes were taken away (Slurm), or too few were there for `--elastic_timeout`."),
    ("76", "no", "It was tried `--max_restarts` times without progress."),
    ("129, 130", "no", "Somebody has ended this agent, by SIGHUP or Ctrl-C."),
    ("137, with restarts allowed", "yes", "The agent itself was killed: out of memory, or with its container or node."),
    ("93", "no", "A worker asked for no restart."),
    (
        "1, and all others",
        "no",
        "A worker's failure that was not to be tried again: `--max_restarts=0`, or a mistake in the script.",
    ),
)
"""Code, whether to start the job again, and why."""
_RULE = """\
So start the job again after 69 and 75, and after the agent was killed. An agent has already made the restarts that may
help within its allocation, so no other code asks for one.

- **A job that has ended is recorded as ended in an etcd that outlives it**, also after 75 by `--elastic_timeout`:
  agents that are started again exit at once with the same code. Run `elastic-agent reset --yes` before. No reset is
  needed after agents were asked to leave, or with an etcd that they bring (`--standalone`, `--ips`, Slurm).
- **Slurm.** The code of `srun` is the highest of its tasks: one that was killed (137) hides a 75.
  `deploy/slurm/train.sbatch` requeues after 75.
- **Kubernetes.** `deploy/kubernetes/jobset.yaml` has these rules as a `podFailurePolicy`
  ([kubernetes.md](../kubernetes.md#exit-codes); not tried on a cluster). It also starts a pod again after 1, 2, 139 and
  143, a few times: one pod alone may be at fault. A StatefulSet starts its pods again after any code.
- **NVIDIA's resiliency extension** (in August 2026). Its `ft_launcher` exits with 93 (`--ft-no-restart-exit-code`) if
  the job must not be started again, since restarts made no progress or its analysis says so, and with 1 after any other
  failure, also after `--max-restarts`; what to do then is up to the scheduler. Here the agent exits with 93 if a
  worker did: the rule *not after 93* becomes *only after 69, 75 and 137*.
- **torchrun** exits with 1 after every failure of a worker.
"""


def exit_codes_page() -> str:
    """Exit codes of the agent, of commands and of workers."""
    errors, contract = source_of("agent/errors.py"), source_of("trainer_runtime/contract.py")
    constants = [each for each in errors.constants if each.name.startswith("EXIT_")]
    named = {int(each.value): each for each in constants}
    codes = {**_AGENT_CODES, **{code: each.doc or _AGENT_CODES.get(code, "") for code, each in named.items()}}
    rows = [
        (str(code), cell(text), code_cell(named[code].name if code in named else ""))
        for code, text in sorted(codes.items())
    ]
    errors_rows = []
    for each in errors.classes:
        code = next((field.value for field in fields_of(each.body) if field.name == "exit_code"), "")
        code = str(next((int(one.value) for one in constants if one.name == code), code)) or "as its base class"
        bases = ", ".join(ast.unparse(base) for base in each.bases)
        errors_rows.append((code_cell(each.name), cell(code), code_cell(bases), cell(ast.get_docstring(each) or "")))
    worker_rows = [
        (each.value, cell(each.doc), code_cell(each.name))
        for each in contract.constants
        if each.name.startswith("EXIT_")
    ]
    return page(
        "Exit codes",
        "## Of the agent and of commands\n",
        "If a worker's failure ends the job, the agent exits with the worker's own code: 128 + signal if a signal "
        "killed it, and 1 if the code is one of these. An agent that SIGINT or SIGHUP has ended exits with 128 + "
        "signal.\n",
        table(("code", "meaning", "name"), rows),
        "## For schedulers: whether to start the job again\n",
        table(("code", "again?", "because"), [tuple(map(cell, row)) for row in _FOR_SCHEDULERS]),
        _RULE,
        "## Of a worker\n",
        "With these a script can tell the agent what to do.\n",
        table(("code", "meaning", "name"), worker_rows),
        "## Errors in the code\n",
        table(("class", "exit code", "base class", "meaning"), errors_rows),
    )
