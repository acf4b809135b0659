"""Starts an agent: its etcd, if it brings one; the wait until etcd answers; then the daemon, until its exit code."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from agent import node_facts
from agent.children import keep_children_going
from agent.cli.standalone import note_finished
from agent.config import LEASE_SLACK_S, AgentConfig
from agent.core import effects as fx
from agent.core import events as ev
from agent.core.model import Result
from agent.core.reasons import JobOver
from agent.doctor import local_checks
from agent.errors import (
    EXIT_STORE,
    ConfigError,
    ElasticAgentError,
    NotInTime,
    StoreRefused,
    StoreUnavailable,
)
from agent.local_etcd.embedded import EmbeddedEtcd
from agent.local_etcd.etcd_members import run_member
from agent.local_etcd.kept_records import keep_records
from agent.local_etcd.known_jobs import KnownJob
from agent.observe import banner
from agent.observe.log import configure, log
from agent.observe.messages import describe_exit
from agent.observe.stderr import standard_error
from agent.roles.store import RoleKeys
from agent.runtime.collective import CollectiveRuntime
from agent.runtime.loop import Inbox
from agent.runtime.parameter_servers import ParameterServerRuntime
from agent.runtime.runtime import SIGNALS
from agent.runtime.stop_requests import StopRequests, noticing_preemption
from agent.store.api import KeyRange
from agent.store.etcd import EtcdStore
from agent.store.keys import ROOT, JobKeys, decode, jobs_in
from agent.web.page_process import watched
from agent.workers.process import raise_open_files_limit

_RETRY_S = 0.1
_LOG_EVERY_S = 5.0


def run_standalone(config: AgentConfig, environ: dict[str, str]) -> int:
    """Run an agent with a private etcd that lives as long as it does."""
    configure(config.node.node_id)
    inbox = Inbox[Any]()
    with EmbeddedEtcd(on_given_up=lambda reason: inbox.put(fx.Exit(EXIT_STORE, reason))) as etcd:
        config = replace(config, endpoints=(etcd.endpoint,))
        code = run_agent(config, environ, inbox, brings_etcd=True)
        if code == 0 and _has_succeeded(config):
            note_finished(config.job.job_id)
        return code


def _has_succeeded(config: AgentConfig) -> bool:
    """Whether the job has succeeded. Exit code 0 alone may also mean that the agent was asked to leave."""
    keys = JobKeys(config.job.job_id)
    with (
        suppress(ElasticAgentError),
        closing(EtcdStore(config.endpoints, config.credentials, home=keys.prefix)) as store,
    ):
        return any(decode(item, Result).value.succeeded for item in store.read((KeyRange(keys.result),)).items)
    return False


def run_agent(
    config: AgentConfig, environ: dict[str, str], inbox: Inbox[Any] | None = None, *, brings_etcd: bool = False
) -> int:
    """Run an agent until its job has ended or the agent has left it; return the exit code.

    Args:
        config: of the agent.
        environ: the environment of its workers.
        inbox: with the events that have arrived already. None: there are none.
        brings_etcd: whether etcd ends with the agent.

    Raises:
        StoreUnavailable: etcd could not be reached within `store_timeout_s`.
        StoreRefused: etcd answers, but refuses this user.
    """
    configure(config.node.node_id)
    raise_open_files_limit()
    keep_children_going()
    inbox = inbox or Inbox[Any]()
    requests = StopRequests(inbox.put)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
            signal.signal(number, lambda number, _frame: requests.on_signal(number))
    timing = config.timing
    leave_within_s = timing.handoff_timeout_s + timing.lease_ttl_s + timing.stop_grace_s + timing.kill_timeout_s
    member_failure = _EtcdMemberFailure(config, inbox)
    keys = (RoleKeys if config.roles else JobKeys)(config.job.job_id)
    with (
        noticing_preemption(config.preemption_notice, environ, requests.on_notice),
        watched(config, environ) as page,
        run_member(config.ensemble, member_failure.report, keys, leave_within_s=leave_within_s) as join,
        closing(EtcdStore(config.endpoints, config.credentials, home=JobKeys(config.job.job_id).prefix)) as store,
    ):
        if config.ensemble is not None:
            log.info(config.ensemble.summary)
        ended = _wait_for_store(store, config, inbox)
        if ended is not None:
            log.log(logging.ERROR if ended.code else logging.INFO, describe_exit(ended))
            return ended.code
        member_failure.has_reached_etcd = True
        daemon = (ParameterServerRuntime if config.roles else CollectiveRuntime)(config, environ, store, inbox, page)
        join()
        _warn_of_loopback(config)
        if config.shown_options:
            standard_error().write(banner.arguments(dict(config.shown_options)))
        threading.Thread(target=_check_machine, args=(config, environ), name="doctor", daemon=True).start()
        if not brings_etcd and config.ensemble is None:
            code = daemon.run()
            if isinstance(daemon.end, JobOver) and daemon.end.state == "failed" and not daemon.end.was_over:
                log.info("elastic-agent reset lets the job continue from its newest checkpoint, if any")
            return code
        with keep_records(_known_job(config), config.credentials) as codes:
            codes.append(daemon.run())
        return codes[-1]


def _known_job(config: AgentConfig) -> KnownJob:
    """Return what commands on this machine need to know of a job that has an etcd of its own."""
    return KnownJob(
        job_id=config.job.job_id,
        endpoints=tuple(config.endpoints),
        is_private=config.ensemble is None,
        has_secret=config.ensemble is not None and config.ensemble.tls is not None,
        directory=str(config.workers.cwd),
        log_dir=str(config.workers.log_dir),
        began_at=time.time(),
    )


class _EtcdMemberFailure:
    """Handles the failure of this machine's etcd member. The agent ends if no other member can serve the job."""

    def __init__(self, config: AgentConfig, inbox: Inbox[Any]) -> None:
        self._ensemble = config.ensemble
        self._inbox = inbox
        self.has_reached_etcd = False
        """Whether the job's etcd has answered this agent."""

    def report(self, reason: str) -> None:
        """Log the failure, and end the agent if it must end. Called from another thread."""
        log.error("this machine's member of the job's etcd cannot be kept alive", reason=reason)
        if not self.has_reached_etcd or (self._ensemble is not None and len(self._ensemble.members) == 1):
            self._inbox.put(fx.Exit(EXIT_STORE, reason))


def _wait_for_store(store: EtcdStore, config: AgentConfig, inbox: Inbox[Any]) -> fx.Exit | None:
    """Wait until etcd accepts writes. It may answer before: it is full, slow, or has no leader yet.

    Returns:
        None, or how the agent ends instead: it was asked to, or its etcd member cannot be kept alive.
    """
    began_at = time.monotonic()
    elastic_timeout_s = math.inf if config.timing.elastic_timeout_s is None else config.timing.elastic_timeout_s
    give_up_at = began_at + min(config.store_timeout_s, elastic_timeout_s)
    log_at = began_at + _LOG_EVERY_S
    while True:
        try:
            _check_lease(store, config)
            _check_only_job(store, config)
            _check_kind(store, config)
        except StoreRefused:
            raise  # retrying would not help
        except StoreUnavailable as error:
            now = time.monotonic()
            if now >= log_at:
                log_at = now + _LOG_EVERY_S
                log.info(f"waiting for etcd for {now - began_at:.0f} s: {_waiting_reason(config, error)}")
            if now >= give_up_at:
                raise _timeout_error(config, elastic_timeout_s, error) from None
        else:
            return None
        asked = inbox.get(_RETRY_S)  # a pause: some failures are immediate
        if isinstance(asked, fx.Exit):
            return asked
        if isinstance(asked, ev.StopAsked):
            code = config.timing.preempted_code if asked.signal == signal.SIGTERM else 128 + asked.signal
            return fx.Exit(code, "left before the job's etcd was reachable, as asked")


def _waiting_reason(config: AgentConfig, error: StoreUnavailable) -> str:
    silent = config.ensemble.unreachable_members() if config.ensemble is not None else ()
    if silent:
        verb = "does" if len(silent) == 1 else "do"
        return f"{' and '.join(silent)} {verb} not answer: start the same line there"
    if config.ensemble is None:
        return str(error)
    alike = " (is the secret the same on all machines?)" if config.ensemble.tls else ""
    return f"its members have not found each other yet{alike}"


def _timeout_error(config: AgentConfig, elastic_timeout_s: float, error: StoreUnavailable) -> ElasticAgentError:
    where = ",".join(config.endpoints)
    if elastic_timeout_s < config.store_timeout_s:
        return NotInTime(f"etcd at {where} was not there within --elastic_timeout={elastic_timeout_s:g} ({error})")
    do = (
        "start the same line on all machines"
        if config.ensemble
        else "start it, or give its address with --elastic_server (a job on one machine needs none: --standalone)"
    )
    return StoreUnavailable(f"etcd at {where} could not be reached within {config.store_timeout_s:g} s ({error}): {do}")


def _check_only_job(store: EtcdStore, config: AgentConfig) -> None:
    """Raise `ConfigError` if another job uses the etcd that this job's agents bring: it has the same ports."""
    if config.ensemble is None:
        return
    others = jobs_in(store.read((KeyRange(ROOT, is_prefix=True),))).keys() - {config.job.job_id}
    if others:
        raise ConfigError(
            f"the etcd at {','.join(config.endpoints)} is of job {min(others)}, which runs on these machines: choose "
            "another --ctrl_port for this one, the same on all machines"
        )


def _check_kind(store: EtcdStore, config: AgentConfig) -> None:
    """Raise `ConfigError` if the job has ranks and this agent was started for servers, or the other way round."""
    ranks, servers = JobKeys(config.job.job_id).spec, RoleKeys(config.job.job_id).spec
    if store.read((KeyRange(ranks if config.roles else servers),)).items:
        raise ConfigError(
            f"job {config.job.job_id} is one {'of ranks' if config.roles else 'with parameter servers'}: give another "
            "--job_id"
        )


def _check_lease(store: EtcdStore, config: AgentConfig) -> None:
    """Raise `ConfigError` if etcd grants a longer lease than requested, as it does with a long election timeout."""
    lease = store.grant(config.timing.lease_ttl_s)
    store.revoke(lease.lease_id)
    if lease.ttl_s > config.timing.lease_ttl_s:
        raise ConfigError(
            f"this etcd grants no lease under {lease.ttl_s:g} s (its election timeout is long): --detect_within must "
            f"be at least {lease.ttl_s + LEASE_SLACK_S:g}, not {config.timing.detect_within_s:g}"
        )


def _check_machine(config: AgentConfig, environ: dict[str, str]) -> None:
    """Log what may be wrong with this machine. Runs on a thread, since a DNS that is down must not delay the start."""
    try:
        for finding in local_checks.examine(config.node.address, config.node.ips, environ):
            if not finding.is_fine:
                log.warning(f"{finding.about}: {finding.found}", do=finding.do)
    except Exception as error:  # noqa: BLE001 - training must go on
        log.warning("this machine could not be examined", reason=repr(error))


def _warn_of_loopback(config: AgentConfig) -> None:
    """Warn of an address that other machines cannot reach. /etc/hosts often maps the host name to loopback."""
    if node_facts.is_loopback(config.node.ips) and not any(map(node_facts.is_on_loopback, config.endpoints)):
        log.warning(
            "this node's address is reached from this machine only, but etcd is elsewhere; for several machines give "
            "another --address",
            address=config.node.address,
        )
