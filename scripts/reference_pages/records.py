"""etcd-keys.md and records.md: the keys of a job, and the fields of their records."""

from __future__ import annotations

import ast
import re

from reference_pages.source import Source, cell, code_cell, fields_of, page, sources_in, table

_WRITTEN_BY = {
    "shared/spec": "the leader of a new job, then commands",
    "shared/members": "the leader",
    "nodes": "the node's agent",
    "shared/leader": "the agent that leads",
    "shared/group": "the leader",
    "shared/restore_point": "the leader",
    "shared/handoff": "the leader",
    "handoff_request": "the leader",
    "changes": "the leader",
    "incidents": "the leader",
    "shared/result": "the leader; `reset` by a command",
    "shared/checkpoint": "the agent whose worker wrote the checkpoint",
    "shared/suspects": "the neighbour",
    "roles/spec": "the first agent",
    "roles/nodes": "the node's agent",
    "roles/processes": "the agent of the process",
    "roles/map": "any agent",
    "roles/result": "any agent, or a command",
}
"""Writers of keys whose table does not say it, by the first words. A key with a node id is written by that node."""

_STRUCTS = ("msgspec.Struct", "_Reason")
_PARTS = ("agent/core/bounds.py", "agent/core/failures.py", "agent/core/records.py")
"""Modules that define what records are made of."""
_TYPES = ("agent/core/reasons.py",)
"""Modules that define types of fields, and others."""


def etcd_keys_page() -> str:
    """The keys of a job."""
    records = {each.name: each for source in record_sources() for each in source.classes}
    parts = [
        (
            "All keys of a job are under `/elastic-agent/{job_id}/`. A key with a lease disappears when its agent can "
            "no longer renew the lease. [records.md](records.md) has the fields of each record.\n"
        )
    ]
    tables = sorted(_key_tables(), key=_is_about_servers)
    for rows in tables:
        title = "Jobs with parameter servers" if _is_about_servers(rows) else "Jobs of ranks"
        header = ("key", "lease", "record", "written by", "what it is")
        parts += [f"## {title}\n", table(header, (_key_row(row, records) for row in rows))]
    return page("Keys in etcd", *parts)


def _key_tables() -> list[list[dict[str, str]]]:
    """The tables of keys in the docstrings of modules."""
    return [rows for source in sources_in("agent") if (rows := _rows_of(source.doc))]


def _is_about_servers(rows: list[dict[str, str]]) -> bool:
    return next(iter(rows[0].values())).startswith("`roles/")


def _rows_of(doc: str) -> list[dict[str, str]]:
    """The rows of a docstring's table of keys, each by column; empty: it has none."""
    lines = [line.strip("| ") for line in doc.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    has_keys = bool(cells) and cells[0][0].startswith("key") and "record" in cells[0]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]] if has_keys else []


def _key_row(row: dict[str, str], records: dict[str, ast.ClassDef]) -> tuple[str, ...]:
    key, lease, record, *_ = row.values()
    word = key.strip("`").partition("/{")[0]
    written_by = row.get("written by") or _WRITTEN_BY.get(word, "the node's agent" if "{node_id}" in key else "—")
    name = record.strip("`")
    doc = (ast.get_docstring(records[name]) or "").partition("\n\n")[0] if name in records else ""
    link = f"[`{name}`](records.md#{name.lower()})" if name in records else record
    return key, lease, link, written_by, cell(doc)


def record_sources() -> list[Source]:
    """The modules that define records of etcd."""
    names = {row["record"].strip("`") for rows in _key_tables() for row in rows}
    sources = sources_in("agent")
    return [
        each
        for each in sources
        if each.place in (*_PARTS, *_TYPES) or any(found.name in names for found in each.classes)
    ]


def _is_record(node: ast.ClassDef) -> bool:
    is_private = node.name.startswith("_")
    return not is_private and any(base in _STRUCTS or base.endswith("Record") for base in _bases(node))


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base) for base in node.bases]


def records_page() -> str:
    """The fields of all records."""
    parts = [
        (
            "Values in etcd are JSON objects. `v` is the version of a record's form. A record with an unknown field or "
            "a wrong type is refused. [etcd-keys.md](etcd-keys.md) has the keys.\n"
        )
    ]
    used = _names_in_records()
    for source in record_sources():
        parts += [f"## {source.place}\n", _types_of(source, used)]
        for each in source.classes:
            if not _is_record(each) or (source.place in _TYPES and each.name not in used):
                continue
            inherited = [f"[`{base}`](#{base.lower()})" for base in _bases(each) if base.endswith("Record")]
            parts += [f"### {each.name}\n", f"{ast.get_docstring(each) or ''}\n"]
            parts += [f"It also has the fields of {', '.join(inherited)}.\n"] if inherited else []
            rows = [
                (
                    code_cell(field.name),
                    code_cell(field.annotation),
                    code_cell(field.value) if field.value else "—",
                    cell(field.doc),
                )
                for field in fields_of(each.body)
                if field.annotation and not field.annotation.startswith("ClassVar")
            ]
            kind = next((ast.unparse(each.value) for each in each.keywords if each.arg == "tag"), "")
            rows = (
                [(code_cell("kind"), code_cell("str"), code_cell(kind), "Always this value."), *rows] if kind else rows
            )
            parts += [table(("field", "type", "default", "meaning"), rows)] if rows else []
    return page("Records", *(part for part in parts if part))


def _names_in_records() -> set[str]:
    """The names of types that fields of records have, directly or within other types."""
    types: dict[str, str] = {}
    found: list[str] = []
    for source in record_sources():
        for each in source.classes:
            types[each.name] = " ".join(field.annotation for field in fields_of(each.body))
            found += [each.name] * (source.place not in _TYPES)
        types |= {each.name: each.value for each in source.constants}
    used = set(found)
    for name in found:  # the loop appends to the list
        for inner in re.findall(r"\w+", types[name]):
            if inner in types and inner not in used:
                used.add(inner)
                found.append(inner)
    return used


def _types_of(source: Source, used: set[str]) -> str:
    """The types with a name that the module's fields use."""
    rows = [
        (code_cell(each.name), code_cell(each.value), cell(each.doc))
        for each in source.constants
        if each.name in used and (each.value.startswith(("Annotated[", "Literal[", "tuple[")) or " | " in each.value)
    ]
    return table(("type", "definition", "meaning"), rows) if rows else ""
