"""What is done to a cluster, each by a name, and what has to come of it."""

from __future__ import annotations

from chaos.fault import Fault
from chaos.faults import disks, etcd, machines, networks, nodes

FAULTS = {
    fault.name: fault
    for module in (nodes, networks, etcd, disks, machines)
    for fault in vars(module).values()
    if isinstance(fault, Fault)
}
"""By name."""
