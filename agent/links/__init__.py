"""Links between agents: a dead agent is noticed within 0.1 s, long before its lease expires.

When an agent is killed, its kernel closes its sockets, and every process connected to it notices at once. Links exist
for that purpose; they carry neither orders nor training data. `LinkPool` (pool.py) is the interface. A link also
measures the offset between the two agents' wall clocks (clocks.py), so that failures on two nodes can be put in order.

At the same port an agent serves queries of readers: the logs on its node and the state of its ranks (queries.py,
log_server.py, log_reader.py). Readers are not agents; they prove that they know the secret in a role of their own.
They cannot delay heartbeats: logs are read on other threads, one chunk at a time and only on request, and the number
of readers is limited.

Judging a peer
    Each agent dials each of its peers (dialler.py) and judges a peer only by the link that it dialled. The accepting
    end (listener.py) answers and keeps no state that a judgement needs. So the agents need not agree on which of two
    connections counts, or on who dials: two neighbours that hold links to each other have two connections, and each
    side judges one of them.

    up      The peer proved that it is this incarnation, and answered a heartbeat. It answers heartbeats only while its
            agent's loop completes turns.
    silent  Three heartbeats in a row were not answered. The peer may be slow, paused, hung or cut off; only its lease
            can tell.
    lost    The connection was closed without a goodbye and could not be opened again: it was refused twice, another
            agent answered at that port, or nobody proved to be this peer within 0.3 s. If only the connection is cut,
            by a proxy for example, it is open again in that time, and nothing is reported.

    A silent peer is dialled again while its connection stays open, and the new connection replaces the old one if it
    succeeds: where the network was cut, TCP would notice only late that it works again.

    A peer that was never linked cannot become lost, only silent: its port may be behind a firewall. A peer that was
    linked before, and is held again, is lost if it refuses twice or if another agent answers there; silence to the
    first attempt proves nothing. A lost or silent peer is dialled at each heartbeat for as long as it is held.

    A peer that says goodbye leaves in order. Nothing is reported, and it is not dialled until it is held again.

    The agent counts heartbeats that were sent and answered, and time during which its own process could run. After a
    pause of its own it therefore blames no peer.

Authentication
    Both ends prove that they know the job's secret, by an HMAC over both nonces, the role and both identities
    (handshake.py). Nothing can be replayed or reflected, and the secret is never transmitted. A caller that cannot
    prove it learns the nonces, and that this port speaks the protocol. An attacker who holds a peer's address also
    learns the two names, because the dialler proves itself first. Callers that have not proved themselves are limited
    in number and in time.

    Everything goes through TLS, with the certificate of the agent that is called
    (agent/runtime/agent_certificates.py). The fingerprint of the certificate is in the agent's record in etcd, and the
    dialler compares it before it sends anything. If a certificate authority is given, it must also have signed the
    certificate, and agents that call must show a certificate of the same authority. Readers need none.

Limits
    An attacker *on the path* can cut a link, like any TCP connection.
    A peer that leaves in order at the moment at which its connection is cut for another reason counts as lost.
    A child of the agent that was forked and did not exec another program would keep the agent's sockets open. The
    agent starts its children by exec, which closes the sockets.
"""
