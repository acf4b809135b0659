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
        "## Of a worker\n",
        "With these a script can tell the agent what to do.\n",
        table(("code", "meaning", "name"), worker_rows),
        "## Errors in the code\n",
        table(("class", "exit code", "base class", "meaning"), errors_rows),
    )
