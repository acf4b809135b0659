"""The options of `elastic-agent run`: what a node brings to its job, and how the job is to behave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from agent.cli.foreign_options import FOREIGN_OPTIONS
from agent.cli.options import (
    DEFAULT_CTRL_PORT,
    ELASTIC_SERVER,
    ETCD_ACCESS,
    JOB_ID,
    NP,
    STORE_TIMEOUT,
    drop_empty,
    keep_empty,
    option,
)
from agent.console import ConsoleConfig

RUN_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    ELASTIC_SERVER,
    *ETCD_ACCESS,
    JOB_ID,
    NP,
    option(
        "gpus", "--devices", metavar="0,1", help="The GPUs to use, of those in CUDA_VISIBLE_DEVICES.  [default: all]"
    ),
    option(
        "nproc_per_node",
        env=("PET_NPROC_PER_NODE",),
        metavar="N|gpu|cpu|auto",
        help="Rank processes on this node.  [default: one for each GPU, else 1]",
    ),
    option(
        "ips",
        metavar="IP,IP",
        help="All machines of the job, the same list on each. It then needs no etcd: the first three bring one.",
    ),
    option("server_num", type=click.IntRange(min=1), metavar="N", help="Parameter servers, all on this machine."),
    option("worker_num", type=click.IntRange(min=1), metavar="N", help="Their workers, all on this machine."),
    option("heter_worker_num", type=click.IntRange(min=1), metavar="N", help="Workers that have the GPUs, likewise."),
    option("servers", metavar="IP:PORT,…", help="Parameter servers on several machines: give the same list on each."),
    option("workers", metavar="IP[:PORT],…", help="Their workers, each by its machine."),
    option("heter_workers", metavar="IP[:PORT],…", help="Workers that have the GPUs, likewise."),
    option(
        "ps_replicas",
        type=click.IntRange(0, 1),
        metavar="N",
        help="Copies of each server's rows on another one, so that either may be lost.  [default: 0]",
    ),
    option("heter_devices", metavar="KIND", help="What those have.  [default: gpu]"),
    option(
        "http_port",
        type=click.IntRange(1, 65535),
        metavar="PORT",
        help="Where the workers meet in a process group, if the script makes one.",
    ),
    option(
        "ctrl_port",
        type=click.IntRange(1, 65534),
        metavar="PORT",
        help=f"Where that etcd listens; its members meet at the next one.  [default: {DEFAULT_CTRL_PORT}]",
    ),
    option("node_id", callback=drop_empty, metavar="ID", help="This node's stable name.  [default: host name]"),
    option(
        "address",
        "--local_addr",
        env=("POD_IP", "PET_LOCAL_ADDR"),
        callback=drop_empty,
        metavar="IP",
        help="Where other nodes reach this one.  [default: found out]",
    ),
    option(
        "log_dir",
        env=("PET_LOG_DIR",),
        default="log",
        show_default=True,
        metavar="DIR",
        help="One file per rank and group goes here.",
    ),
    option(
        "checkpoint_dir",
        metavar="DIR",
        help="Given to the workers; all nodes must see it.  [default: checkpoints/JOB_ID]",
    ),
    option(
        "console_ranks",
        metavar="0,1|all|none",
        help="Ranks whose output is shown on the console.  [default: 0; all with --local_ranks_filter]",
    ),
    option(
        "tee",
        "-t",
        env=("PET_TEE",),
        metavar="0-3|RANK:0-3,…",
        help="As in torchrun: shown too, of each local rank: 1 stdout, 2 stderr, 3 both.",
    ),
    option("redirects", "-r", env=("PET_REDIRECTS",), metavar="0-3|RANK:0-3,…", help="The same: not shown."),
    option("local_ranks_filter", env=("PET_LOCAL_RANKS_FILTER",), metavar="0,1", help="The same: shown only."),
    option(
        "log_line_prefix_template",
        env=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "PET_LOG_LINE_PREFIX_TEMPLATE"),
        callback=keep_empty,
        default=ConsoleConfig.prefix,
        show_default=True,
        metavar="TEXT",
        help="What stands before each line there, or nothing; ${role_name} and ${local_rank} may be in it, too.",
    ),
    option(
        "stdin_rank",
        type=click.IntRange(min=0),
        metavar="RANK",
        help="The rank that reads this agent's standard input.  [default: the only one; of several, none]",
    ),
    option(
        "numa_binding",
        env=("PET_NUMA_BINDING",),
        type=click.Choice(["node", "socket", "exclusive", "core-complex"]),
        help="As in torchrun: keep each rank on CPUs near its GPU.  [default: the system chooses]",
    ),
    option("http", metavar="[HOST:]PORT", help="Serve a web page, metrics and probes here.  [HOST: 127.0.0.1]"),
    option(
        "http_token_file",
        metavar="FILE",
        help="What lets in there, 16 characters or more.  [default: what `elastic-agent page` tells]",
    ),
    option(
        "tls_cert",
        metavar="FILE",
        help="PEM: this node's certificate, for its links, its web page (https then) and its parameter servers.  "
        "[default: links: made at the start; the others are not encrypted]",
    ),
    option("tls_key", metavar="FILE", help="PEM: the key of --tls_cert, without a passphrase."),
    option("tls_ca", metavar="FILE", help="PEM: who signs these certificates: other nodes must then show one, too."),
    option("events", metavar="FILE", help="Append what happens to the job, a line of JSON each.  [-: standard output]"),
    option("role", env=("PET_ROLE",), default="default", help="What ROLE_NAME says to the ranks."),
    option(
        "max_restarts",
        env=("PET_MAX_RESTARTS",),
        type=int,
        default=10,
        show_default=True,
        metavar="N",
        help="Worker failures in a row, without progress, that are answered with a restart.",
    ),
    option(
        "progress_window",
        type=float,
        default=60.0,
        show_default=True,
        metavar="S",
        help="What counts as progress: as many new steps as are usual in this time.",
    ),
    option(
        "health_check",
        metavar="COMMAND",
        help="Must end with code 0 before this node joins, and after a worker's failure; else the node is left out.",
    ),
    option(
        "health_timeout",
        type=float,
        default=60.0,
        show_default=True,
        metavar="S",
        help="How long --health_check may take.",
    ),
    option(
        "elastic_timeout",
        type=float,
        env=("PADDLE_ELASTIC_TIMEOUT",),
        metavar="S",
        help="How long to wait for missing nodes.  [default: without end]",
    ),
    option(
        "detect_within",
        type=float,
        default=5.0,
        show_default=True,
        metavar="S",
        help="A node that vanishes is noticed within this time. The next three derive from it.",
    ),
    option("lease", type=float, metavar="S", help="How long a node keeps its place unheard.  [default: derived, 4]"),
    option("link_heartbeat", type=float, metavar="S", help="Between neighbours' signs of life.  [default: 0.5]"),
    option("settle", type=float, metavar="S", help="How long to wait for more nodes below MAX.  [default: 1]"),
    option(
        "stop_grace",
        type=float,
        default=15.0,
        show_default=True,
        metavar="S",
        help="Between SIGTERM and SIGKILL when workers are stopped for a planned change.",
    ),
    option(
        "handoff_timeout",
        type=float,
        default=20.0,
        show_default=True,
        metavar="S",
        help="How long a node that was asked to leave waits for all ranks to stop at one step and save it.",
    ),
    option(
        "handoff_wait",
        type=float,
        default=1.0,
        show_default=True,
        metavar="S",
        help="How long ranks that stopped and saved wait for the next group before they train on.",
    ),
    option(
        "kill_timeout",
        type=float,
        default=10.0,
        show_default=True,
        metavar="S",
        help="A node on which a worker outlives SIGKILL for so long is left out.",
    ),
    option(
        "hang_timeout",
        type=float,
        metavar="S",
        help="Any program is suspected to hang after so long without a step and without output. 0: nothing is.  "
        "[default: by the next three, and only those that commit steps]",
    ),
    option(
        "hang_floor",
        type=float,
        default=60.0,
        show_default=True,
        metavar="S",
        help="No step that takes less than this is suspicious.",
    ),
    option(
        "hang_factor",
        type=float,
        default=50.0,
        show_default=True,
        metavar="N",
        help="A step that takes so many usual ones is; at twice that it is taken for a hang.",
    ),
    option(
        "hang_first",
        type=float,
        default=3600.0,
        show_default=True,
        metavar="S",
        help="As --hang_floor, for the first steps.",
    ),
    option(
        "standby",
        type=click.Choice(["off", "torch", "learned"]),
        default="learned",
        show_default=True,
        help="Have a process for each rank, server or worker wait for the next restart, with torch imported, or with "
        "what the script imported last time.",
    ),
    option(
        "snapshot_overhead",
        type=float,
        default=1.0,
        show_default=True,
        metavar="PERCENT",
        help="How much of the training's time its copies in memory may take. 0: none are made.",
    ),
    option(
        "snapshot_memory",
        metavar="BYTES",
        help="How much memory they may take on this node, as 8G.  [default: half of what is free]",
    ),
    STORE_TIMEOUT,
    option(
        "fault_tolerance_level",
        type=click.Choice(["0", "1", "2"]),
        env=("PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL", "PADDLE_ELASTIC_FAULT_TOLERANCE_LEVEL"),
        help="As in Paddle: 0 ends the job at its first failure; 1 and 2 restart (np says whether it is elastic).",
    ),
    option("fresh", is_flag=True, help="Start a finished job over; use no checkpoint of an earlier run."),
    option(
        "standalone",
        env=("PET_STANDALONE",),
        is_flag=True,
        help="One machine, no etcd: a private one, and a job of its own.",
    ),
    option("module", "-m", env=("PET_MODULE",), is_flag=True, help="What is run is a Python module, as in python -m."),
    option("no_python", env=("PET_NO_PYTHON",), is_flag=True, help="What is run is a program, not a Python script."),
    option(
        "banner",
        is_flag=True,
        help="Print the configuration and what the first rank is told, as Paddle's launcher does: the default for "
        "those who come by its names.",
    ),
    *FOREIGN_OPTIONS,
)

FOR_RANKS = (
    *("np", "ips", "nproc_per_node", "numa_binding", "role", "console_ranks", "tee", "redirects"),
    *("log_line_prefix_template", "stdin_rank"),
    *("local_ranks_filter", "http", "http_token_file", "events", "health_check", "health_timeout", "elastic_timeout"),
    *("link_heartbeat", "settle", "handoff_timeout", "handoff_wait", "kill_timeout", "hang_timeout", "hang_floor"),
    *("hang_factor", "hang_first", "snapshot_overhead", "snapshot_memory"),
)
"""What means nothing in a job with parameter servers."""
