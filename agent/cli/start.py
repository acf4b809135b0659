"""The start of an agent: its etcd, if it brings one, and the wait for it; then the daemon, to the exit code."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace

from agent.cli.standalone import note_finished
from agent.config import LEASE_SLACK_S, AgentConfig
from agent.core import effects as fx
from agent.core import events as ev
from agent.core.model import Result
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
from agent.observe import banner
from agent.observe.log import configure, log
from agent.observe.stderr import standard_error
from agent.roles.daemon import RoleDaemon
from agent.roles.store import RoleKeys
from agent.runtime import node_facts
from agent.runtime.children import keep_children_going
from agent.runtime.daemon import SIGNALS, Daemon
from agent.runtime.loop import Inbox
from agent.store.api import KeyRange
from agent.store.etcd import EtcdStore
from agent.store.keys import ROOT, JobKeys, decode, jobs_in
from agent.web.page_process import watched
from agent.workers.open_files import raise_limit

_TRY_AGAIN_S = 0.1
_TELL_EVERY_S = 5.0
_MEANS: dict[int, int] = {signal.SIGQUIT: signal.SIGTERM}
"""Container engines and torchrun's users also send this one to ask a job to leave."""


def run_standalone(config: AgentConfig, environ: dict[str, str]) -> int:
    """Run an agent with a private etcd that lives as long as it does."""
    configure(config.node.node_id)
    inbox = Inbox()
    with EmbeddedEtcd(on_given_up=lambda reason: inbox.put(fx.Exit(EXIT_STORE, reason))) as etcd:
        config = replace(config, endpoints=(etcd.endpoint,))
        code = run_agent(config, environ, inbox, brings_etcd=True)
        if code == 0 and _has_succeeded(config):
            note_finished(config.job.job_id)
        return code


def _has_succeeded(config: AgentConfig) -> bool:
    """Whether the job is over; its agent may also have been asked to leave."""
    keys = JobKeys(config.job.job_id)
    with (
        suppress(ElasticAgentError),
        closing(EtcdStore(config.endpoints, config.credentials, home=keys.prefix)) as store,
    ):
        return any(decode(item, Result).value.succeeded for item in store.read((KeyRange(keys.result),)).items)
    return False


def run_agent(
    config: AgentConfig, environ: dict[str, str], inbox: Inbox | None = None, *, brings_etcd: bool = False
) -> int:
    """Run an agent until its job or its part in it has ended; return its exit code.

    Args:
        config: of the agent.
        environ: of its workers.
        inbox: what it has been told already is in there.
        brings_etcd: its etcd ends with it.

    Raises:
        StoreUnavailable: etcd could not be reached within `store_timeout_s`.
        StoreRefused: etcd answers, and does not let this user in.
    """
    configure(config.node.node_id)
    raise_limit()
    keep_children_going()
    inbox = inbox or Inbox()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
            signal.signal(number, lambda number, _frame: inbox.put(ev.StopAsked(_MEANS.get(number, number))))
    timing = config.timing
    leave_within_s = timing.handoff_timeout_s + timing.lease_ttl_s + timing.stop_grace_s + timing.kill_timeout_s
    troubles = _EtcdTroubles(config, inbox)
    keys = (RoleKeys if config.roles else JobKeys)(config.job.job_id)
    with (
        watched(config, environ) as page,
        run_member(config.ensemble, troubles.tell, keys, leave_within_s=leave_within_s) as join,
        closing(EtcdStore(config.endpoints, config.credentials, home=JobKeys(config.job.job_id).prefix)) as store,
    ):
        if config.ensemble is not None:
            log.info(config.ensemble.summary)
        ended = _wait_for_store(store, config, inbox)
        if ended is not None:
            log.log(logging.ERROR if ended.code else logging.INFO, ended.sentence)
            return ended.code
        troubles.has_met = True
        daemon = (RoleDaemon if config.roles else Daemon)(config, environ, store, inbox, page)
        join()
        _warn_of_loopback(config)
        if config.given:
            standard_error().write(banner.arguments(dict(config.given)))
        threading.Thread(target=_look_around, args=(config, environ), name="doctor", daemon=True).start()
        if not brings_etcd and config.ensemble is None:
            return daemon.run()
        with keep_records(config) as codes:
            codes.append(daemon.run())
        return codes[-1]


class _EtcdTroubles:
    """What becomes of an etcd that was brought along and cannot be kept alive: the others have theirs, if there are."""

    def __init__(self, config: AgentConfig, inbox: Inbox) -> None:
        self._ensemble = config.ensemble
        self._inbox = inbox
        self.has_met = False
        """The job's etcd has answered."""

    def tell(self, reason: str) -> None:
        """On another thread."""
        log.error("this machine's member of the job's etcd cannot be kept alive", reason=reason)
        if not self.has_met or (self._ensemble is not None and len(self._ensemble.members) == 1):
            self._inbox.put(fx.Exit(EXIT_STORE, reason))


def _wait_for_store(store: EtcdStore, config: AgentConfig, inbox: Inbox) -> fx.Exit | None:
    """Return once etcd can be worked with, or with how to end instead: somebody asks to, or it cannot be kept alive.

    One that answers may take no writes yet: it is full, or slow, or looks for a leader.
    """
    began_at = time.monotonic()
    elastic_timeout_s = math.inf if config.timing.elastic_timeout_s is None else config.timing.elastic_timeout_s
    give_up_at = began_at + min(config.store_timeout_s, elastic_timeout_s)
    tell_at = began_at + _TELL_EVERY_S
    while True:
        try:
            _check_lease(store, config)
            _check_only_job(store, config)
            _check_kind(store, config)
        except StoreRefused:
            raise  # waiting would not help
        except StoreUnavailable as error:
            now = time.monotonic()
            if now >= tell_at:
                tell_at = now + _TELL_EVERY_S
                log.info(f"waiting for etcd since {now - began_at:.0f} s", reason=_why_not(config, error))
            if now >= give_up_at:
                raise _gave_up(config, elastic_timeout_s, error) from None
        else:
            return None
        asked = inbox.get(_TRY_AGAIN_S)  # some failures come at once
        if isinstance(asked, fx.Exit):
            return asked
        if isinstance(asked, ev.StopAsked):
            code = config.timing.preempted_code if asked.signal == signal.SIGTERM else 128 + asked.signal
            return fx.Exit(code, "left before the job's etcd was there, as it was asked to")


def _why_not(config: AgentConfig, error: StoreUnavailable) -> str:
    silent = config.ensemble.unreachable_members() if config.ensemble is not None else ()
    if silent:
        verb = "does" if len(silent) == 1 else "do"
        return f"{' and '.join(silent)} {verb} not answer: start the same line there"
    if config.ensemble is None:
        return str(error)
    alike = " (is the secret the same on all machines?)" if config.ensemble.tls else ""
    return f"its members have not found each other yet{alike}"


def _gave_up(config: AgentConfig, elastic_timeout_s: float, error: StoreUnavailable) -> ElasticAgentError:
    where = ",".join(config.endpoints)
    if elastic_timeout_s < config.store_timeout_s:
        return NotInTime(f"etcd at {where} was not there within --elastic_timeout={elastic_timeout_s:g} ({error})")
    do = (
        "start the same line on all machines"
        if config.ensemble
        else "start it, or give its address with --elastic_server"
    )
    return StoreUnavailable(f"etcd at {where} could not be reached within {config.store_timeout_s:g} s ({error}): {do}")


def _check_only_job(store: EtcdStore, config: AgentConfig) -> None:
    """An etcd that agents bring is for one job. With the same machines and port another one would meet in it."""
    if config.ensemble is None:
        return
    others = jobs_in(store.read((KeyRange(ROOT, is_prefix=True),))).keys() - {config.job.job_id}
    if others:
        raise ConfigError(
            f"the etcd at {','.join(config.endpoints)} is of job {min(others)}, which runs on these machines: choose "
            "another --ctrl_port for this one, the same on all machines"
        )


def _check_kind(store: EtcdStore, config: AgentConfig) -> None:
    """A job has ranks or servers, and all of its agents the same."""
    ranks, servers = JobKeys(config.job.job_id).spec, RoleKeys(config.job.job_id).spec
    if store.read((KeyRange(ranks if config.roles else servers),)).items:
        raise ConfigError(
            f"job {config.job.job_id} is one {'of ranks' if config.roles else 'with parameter servers'}: give another "
            "--job_id"
        )


def _check_lease(store: EtcdStore, config: AgentConfig) -> None:
    """An etcd with a long election timeout grants longer leases than were asked for."""
    lease = store.grant(config.timing.lease_ttl_s)
    store.revoke(lease.lease_id)
    if lease.ttl_s > config.timing.lease_ttl_s:
        raise ConfigError(
            f"this etcd grants no lease under {lease.ttl_s:g} s (its election timeout is long): --detect_within must "
            f"be at least {lease.ttl_s + LEASE_SLACK_S:g}, not {config.timing.detect_within_s:g}"
        )


def _look_around(config: AgentConfig, environ: dict[str, str]) -> None:
    """Say what may be wrong with this machine. On a thread: a dead DNS must not hold up the start."""
    try:
        for finding in local_checks.examine(config.node.address, config.node.ips, environ):
            if not finding.is_fine:
                log.warning(f"{finding.about}: {finding.found}", do=finding.do)
    except Exception as error:  # noqa: BLE001 - no reason not to train
        log.warning("this machine could not be examined", reason=repr(error))


def _warn_of_loopback(config: AgentConfig) -> None:
    """A host name often leads to loopback, by /etc/hosts: fine on one machine, a riddle on two."""
    if node_facts.is_loopback(config.node.ips) and not any(map(node_facts.is_on_loopback, config.endpoints)):
        log.warning(
            "this node's address is reached from this machine only, but etcd is elsewhere; for several machines give "
            "another --address",
            address=config.node.address,
        )
