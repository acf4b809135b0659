"""The options of `elastic-agent run`, by the topics of `elastic-agent help`."""

from __future__ import annotations

from dataclasses import dataclass

import click

from agent.cli.foreign_options import FOREIGN_OPTIONS
from agent.cli.options import (
    CONFIG,
    DEFAULT_CTRL_PORT,
    ELASTIC_SERVER,
    ETCD_ACCESS,
    JOB_ID,
    NP,
    STORE_TIMEOUT,
    Decorator,
    drop_empty,
    keep_empty,
    option,
)
from agent.console import ConsoleConfig


@dataclass(frozen=True)
class Topic:
    """Options that are explained together."""

    name: str
    """Argument of `elastic-agent help`."""
    title: str
    options: tuple[Decorator, ...]


_POSITIVE = click.IntRange(min=1)
_PORT = click.IntRange(1, 65535)

TOPICS = (
    Topic(
        "job",
        "The job, its nodes and its script",
        (
            JOB_ID,
            NP,
            option(
                "nproc_per_node",
                env=("PET_NPROC_PER_NODE", "PADDLE_NPROC_PER_NODE"),
                metavar="N|gpu|cpu|auto",
                default_text="one per GPU, else 1",
                help="Number of ranks on this node.",
            ),
            option(
                "ips",
                env=("PADDLE_IPS",),
                metavar="IP,…",
                help="All machines of a job without an etcd. Give the same list on each machine; up to three "
                "of them run one for the job.",
            ),
            option(
                "standalone",
                env=("PET_STANDALONE",),
                is_flag=True,
                help="One machine: the agent starts a private etcd for a job of its own.",
            ),
            option("node_id", callback=drop_empty, metavar="ID", default_text="host name", help="Name of this node."),
            option(
                "fault_domain",
                callback=drop_empty,
                metavar="NAME",
                default_text="none; under Slurm, the switch that it names",
                help="What this node shares with nodes that fail together, such as a rack: their ranks follow each "
                "other, and copies of snapshots go to nodes of another one.",
            ),
            option(
                "elastic_timeout",
                type=float,
                env=("PADDLE_ELASTIC_TIMEOUT",),
                metavar="SECONDS",
                default_text="no limit",
                help="How long to wait for missing nodes before the job ends with code 75.",
            ),
            option(
                "fresh",
                is_flag=True,
                help="Start a finished job over from step 0; ignore checkpoints of earlier runs.",
            ),
            option("module", "-m", env=("PET_MODULE",), is_flag=True, help="SCRIPT is a module, as in `python -m`."),
            option("no_python", env=("PET_NO_PYTHON",), is_flag=True, help="SCRIPT is a program that is run directly."),
        ),
    ),
    Topic(
        "recovery",
        "Recovery: detecting failures, and restarting",
        (
            option(
                "max_restarts",
                env=("PET_MAX_RESTARTS", "PADDLE_MAX_RESTART"),
                type=int,
                default=10,
                metavar="N",
                help="Restarts after failed workers before the job fails. Progress resets the count.",
            ),
            option(
                "progress_window",
                type=float,
                default=60.0,
                metavar="SECONDS",
                help="Progress is as many new steps as usually take this long.",
            ),
            option(
                "standby",
                type=click.Choice(["off", "torch", "learned", "hot"]),
                default="learned",
                help="Keep a process ready for the next restart of each rank, server or worker. torch: it has imported "
                "torch. learned: it has imported what the script imported last time. hot: it has also run the script "
                "up to state.run().",
            ),
            option(
                "detect_within",
                type=float,
                default=5.0,
                metavar="SECONDS",
                help="A node that vanishes is noticed within this time. --lease, --link_heartbeat and --settle derive "
                "from it.",
            ),
            option(
                "lease",
                type=float,
                metavar="SECONDS",
                default_text="4, derived from --detect_within",
                help="Lease length: a node that cannot renew for this long is removed. Whole seconds.",
            ),
            option(
                "link_heartbeat",
                type=float,
                metavar="SECONDS",
                default_text="0.5, derived from --detect_within",
                help="Heartbeat interval between neighbouring agents. A neighbour is silent after three missed ones.",
            ),
            option(
                "settle",
                type=float,
                metavar="SECONDS",
                default_text="1, derived from --detect_within",
                help="How long a job with fewer than MAX nodes waits for more nodes before it forms a group.",
            ),
            option(
                "hang_timeout",
                type=float,
                metavar="SECONDS",
                default_text="only for ranks that commit steps, by the next three options",
                help="A rank of any program is suspected of hanging after this long without a step and without output. "
                "0: hangs are not detected.",
            ),
            option(
                "hang_floor",
                type=float,
                default=60.0,
                metavar="SECONDS",
                help="A step that takes less than this is never suspected of hanging.",
            ),
            option(
                "hang_factor",
                type=float,
                default=50.0,
                metavar="N",
                help="A step is suspected of hanging after N usual step times. At twice that time it hangs.",
            ),
            option(
                "hang_first",
                type=float,
                default=3600.0,
                metavar="SECONDS",
                help="Takes the place of --hang_floor for the first steps of a group.",
            ),
            option(
                "health_check",
                metavar="COMMAND",
                help="Command that checks this node before it joins and after a worker failed. The node is left out "
                "while its exit code is not 0.",
            ),
            option(
                "health_timeout",
                type=float,
                default=60.0,
                metavar="SECONDS",
                help="Time limit of --health_check.",
            ),
            option(
                "preemption_notice",
                metavar="COMMAND",
                help="Command, run without a shell, that is repeated until it exits with code 0: this machine is to be "
                "preempted. The node then leaves as after SIGTERM.",
            ),
            option(
                "handoff_timeout",
                type=float,
                default=20.0,
                metavar="SECONDS",
                help="How long a node that was asked to leave waits until all ranks have stopped after the same step "
                "and saved it.",
            ),
            option(
                "handoff_wait",
                type=float,
                default=1.0,
                metavar="SECONDS",
                help="How long ranks that have stopped and saved wait for the next group before they train on.",
            ),
            option(
                "stop_grace",
                type=float,
                default=15.0,
                metavar="SECONDS",
                help="Time between SIGTERM and SIGKILL when workers are stopped for a planned change.",
            ),
            option(
                "kill_timeout",
                type=float,
                default=10.0,
                metavar="SECONDS",
                help="A node is left out if a worker survives SIGKILL for this long.",
            ),
        ),
    ),
    Topic(
        "checkpoints",
        "Checkpoints and snapshots",
        (
            option(
                "checkpoint_dir",
                metavar="DIR|URL",
                default_text="checkpoints/JOB_ID",
                help="Directory for checkpoints, which all nodes must see; or an object store, as s3://bucket/name.",
            ),
            option(
                "snapshot_overhead",
                type=float,
                default=1.0,
                metavar="PERCENT",
                help="Share of the training time that snapshots in memory may take. 0: no snapshots.",
            ),
            option(
                "snapshot_memory",
                metavar="BYTES",
                default_text="half of the free memory",
                help="Memory that snapshots may take on this node, for example 8G.",
            ),
        ),
    ),
    Topic(
        "etcd",
        "etcd",
        (
            ELASTIC_SERVER,
            STORE_TIMEOUT,
            *ETCD_ACCESS,
            option(
                "ctrl_port",
                type=click.IntRange(1, 65534),
                metavar="PORT",
                default_text=str(DEFAULT_CTRL_PORT),
                help="Port of the etcd that --ips brings. Its members talk to each other on the next port.",
            ),
        ),
    ),
    Topic(
        "network",
        "Network, web page and security",
        (
            option(
                "address",
                "--local_addr",
                env=("POD_IP", "PET_LOCAL_ADDR"),
                callback=drop_empty,
                metavar="IP",
                default_text="detected",
                help="Address at which other nodes reach this one.",
            ),
            option(
                "http",
                metavar="[HOST:]PORT",
                default_text="off; HOST: 127.0.0.1",
                help="Serve a web page, metrics and probes here.",
            ),
            option(
                "http_token_file",
                metavar="FILE",
                default_text="a token derived from the job's secret; `elastic-agent page` prints it",
                help="File with the access token of the web page (16 characters or more).",
            ),
            option(
                "tls_cert",
                metavar="FILE",
                default_text="links between agents: made at the start; web page and parameter servers: no encryption",
                help="PEM file with this node's certificate for its links, its web page (then https) and its parameter "
                "servers.",
            ),
            option(
                "tls_key", metavar="FILE", help="PEM file with the private key of --tls_cert, without a passphrase."
            ),
            option(
                "tls_ca",
                metavar="FILE",
                help="PEM file with the CA of these certificates. Other nodes must then present one, too.",
            ),
        ),
    ),
    Topic(
        "output",
        "Logs and console",
        (
            option(
                "log_dir",
                env=("PET_LOG_DIR", "PADDLE_LOG_DIR"),
                default="log",
                metavar="DIR",
                help="Directory for the output of the ranks, one file per rank and group.",
            ),
            option(
                "console_ranks",
                metavar="0,1|all|none",
                default_text="0; all with --local_ranks_filter",
                help="Ranks whose output is shown on the console.",
            ),
            option(
                "tee",
                "-t",
                env=("PET_TEE",),
                metavar="0-3|RANK:0-3,…",
                help="As in torchrun: streams of local ranks that are shown as well. 1: stdout, 2: stderr, 3: both.",
            ),
            option(
                "redirects",
                "-r",
                env=("PET_REDIRECTS",),
                metavar="0-3|RANK:0-3,…",
                help="As in torchrun: streams of local ranks that are not shown.",
            ),
            option(
                "local_ranks_filter",
                env=("PET_LOCAL_RANKS_FILTER",),
                metavar="0,1",
                help="As in torchrun: show only these local ranks.",
            ),
            option(
                "log_line_prefix_template",
                env=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "PET_LOG_LINE_PREFIX_TEMPLATE"),
                callback=keep_empty,
                default=ConsoleConfig.prefix,
                metavar="TEXT",
                help="Prefix of each line on the console; may be empty. ${role_name} and ${local_rank} are replaced, "
                "too.",
            ),
            option(
                "stdin_rank",
                type=click.IntRange(min=0),
                metavar="RANK",
                default_text="rank 0 if it is the only one, else none",
                help="Rank that reads the agent's standard input.",
            ),
            option(
                "events",
                metavar="FILE",
                help="Append the job's events to this file, one JSON object per line. -: standard output.",
            ),
            option(
                "banner",
                is_flag=True,
                default_text="on with options of Paddle's launcher",
                help="Print the configuration and the environment of the first rank, as Paddle's launcher does.",
            ),
        ),
    ),
    Topic(
        "devices",
        "GPUs and CPUs",
        (
            option(
                "gpus",
                "--devices",
                env=("PADDLE_DEVICES",),
                metavar="0,1",
                default_text="all",
                help="GPUs to use, of those in CUDA_VISIBLE_DEVICES if that is set.",
            ),
            option(
                "numa_binding",
                env=("PET_NUMA_BINDING",),
                type=click.Choice(["node", "socket", "exclusive", "core-complex"]),
                default_text="no binding",
                help="As in torchrun: bind each rank to CPUs near its GPU.",
            ),
        ),
    ),
    Topic(
        "servers",
        "Parameter servers",
        (
            option("server_num", type=_POSITIVE, metavar="N", help="Number of parameter servers, all on this machine."),
            option(
                "worker_num",
                "--trainer_num",
                type=_POSITIVE,
                metavar="N",
                help="Number of their workers, all on this machine.",
            ),
            option(
                "heter_worker_num",
                type=_POSITIVE,
                metavar="N",
                help="Number of workers that get the GPUs, all on this machine.",
            ),
            option(
                "servers",
                metavar="IP:PORT,…",
                help="Parameter servers on several machines. Give the same list on each machine.",
            ),
            option("workers", "--trainers", metavar="IP[:PORT],…", help="Their workers, by machine."),
            option("heter_workers", metavar="IP[:PORT],…", help="Workers that get the GPUs, by machine."),
            option("heter_devices", metavar="KIND", default_text="gpu", help="Device that the --heter_workers have."),
            option(
                "ps_replicas",
                type=click.IntRange(0, 1),
                metavar="N",
                default_text="0",
                help="Replicas of each server's rows on another server. With 1, either server may be lost.",
            ),
            option(
                "http_port",
                "--gloo_port",
                type=_PORT,
                metavar="PORT",
                help="Port on which the workers meet in a process group, if the script makes one.",
            ),
        ),
    ),
    Topic("config", "A configuration file", (CONFIG,)),
    Topic(
        "launchers",
        "Options of other launchers",
        (
            option(
                "role", env=("PET_ROLE",), default="default", metavar="NAME", help="Value of ROLE_NAME in the ranks."
            ),
            option(
                "fault_tolerance_level",
                type=click.Choice(["0", "1", "2"]),
                env=("PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL", "PADDLE_ELASTIC_FAULT_TOLERANCE_LEVEL"),
                help="As in Paddle. 0: the job fails at its first failure. 1 and 2: it restarts; --np says whether it "
                "is elastic.",
            ),
        ),
    ),
)

RUN_OPTIONS = (*(each for topic in TOPICS for each in topic.options), *FOREIGN_OPTIONS)

FOR_RANKS = (
    *("np", "ips", "nproc_per_node", "numa_binding", "role", "console_ranks", "tee", "redirects"),
    *("log_line_prefix_template", "stdin_rank"),
    *("local_ranks_filter", "http", "http_token_file", "events", "health_check", "health_timeout", "elastic_timeout"),
    *("link_heartbeat", "settle", "handoff_timeout", "handoff_wait", "kill_timeout", "hang_timeout", "hang_floor"),
    *("hang_factor", "hang_first", "snapshot_overhead", "snapshot_memory"),
)
"""Names of the options that a job with parameter servers refuses."""
