"""Options of other launchers that mean nothing here, and what to use instead: docs/migrating has the whole tables.

Those with a like meaning are options of ours under both names (`agent/run_options.py`). None is taken and then
ignored: who relies on one should hear that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_MEET = "agents meet in etcd: give --elastic_server and --job_id, or --ips with all machines and no etcd"

_INSTEAD = {
    # Paddle's launcher, by its older and newer names
    "cluster_node_ips": "use --ips",
    "selected_gpus": "use --gpus",
    "node_ip": "use --address",
    "host": "use --address",
    "use_paddlecloud": "leave it out: POD_IP and the PADDLE_ELASTIC_ variables are read anyway",
    "started_port": "leave it out: free ports are taken; --ctrl_port is for the etcd that --ips brings",
    "start_port": "leave it out: free ports are taken; --ctrl_port is for the etcd that --ips brings",
    "log_level": "leave it out: a line is printed for what happens, once",
    "print_config": "leave it out: the configuration is printed at the start",
    "elastic_level": "use --fault_tolerance_level",
    "master": f"leave it out: {_MEET}",
    "rank": "use --node_id: ranks are given out by the job, by age",
    # torchrun
    "rdzv_backend": f"leave it out: {_MEET}",
    "rdzv_endpoint": f"leave it out: {_MEET}",
    "rdzv_conf": "use --elastic_timeout, --settle and --detect_within for its time-outs",
    "node_rank": f"leave it out: ranks are given out by the job, by age; {_MEET}",
    "master_addr": f"leave it out: rank 0's node is the master; {_MEET}",
    "master_port": "leave it out: a free one is taken for each group",
    "monitor_interval": "leave it out: a worker's end is noticed at once, nothing is polled",
    "start_method": "leave it out: each rank is a process of its own, as with spawn",
    "run_path": "leave it out: a script is run as __main__ anyway",
    "event_log_handler": "leave it out: elastic-agent history has the events",
    "logs_specs": "use --log_dir, --redirects and --tee",
    "duplicate_stdout_filters": "use elastic-agent logs, and grep",
    "duplicate_stderr_filters": "use elastic-agent logs, and grep",
    "signals_to_handle": "leave it out: SIGTERM, SIGINT and SIGHUP ask the node to leave",
    "shutdown_timeout": "use --stop_grace",
    "virtual_local_rank": "leave it out: the script picks its GPU by LOCAL_RANK",
}


def unused(environ: Iterable[str]) -> Iterator[str]:
    """What to say of torchrun's variables that are set and mean nothing here: often somebody else has set them."""
    for name in sorted(environ):
        instead = advice(name.removeprefix("PET_").lower()) if name.startswith("PET_") else None
        if instead is not None:
            yield f"{name} is set, and not used; as for its option, {instead}"


def advice(option: str) -> str | None:
    """What to do instead of giving this option, whichever way it is spelled; None: nobody's option is called so."""
    return _INSTEAD.get(option.lstrip("-").replace("-", "_"))
