"""Links between agents: a dead agent is noticed within a tenth of a second, long before its lease runs out.

When an agent is killed, its kernel closes its sockets, and whoever is connected to it notices at once. That is what a
link is for; it carries no orders and no data. `Links` (pool.py) is the whole interface. By the way it compares the two
agents' wall clocks (clocks.py), so that it can be told which of two failures on two nodes came first.

At the same port an agent shows the logs on its node to readers (log_server.py; log_reader.py is their end), who are no
agents and prove that they know the secret in a role of their own. Nothing of theirs holds up a heartbeat: logs are read
on other threads, one part at a time and only when asked for, and readers are few.

Who says what of whom
    Each agent dials each of its peers (dialler.py) and judges a peer only by the link that it dialled. The accepting
    end (listener.py) answers and keeps nothing that a judgement needs, so nobody has to agree on which of two
    connections counts, or on who dials: two neighbours that hold each other have two connections, each judged by one
    side.

    up      It proved that it is this very incarnation, and answered a heartbeat. Heartbeats are answered only while the
            agent's loop turns.
    silent  No heartbeat was answered for three of them. It may be slow, paused, hung or cut off: nothing but its lease
            can tell.
    lost    The connection was closed without a goodbye, and could not be opened again: it was refused twice, another
            agent answered there, or nobody proved to be this one within 0.3 s. A peer whose connection is merely cut,
            by a proxy say, is linked again in that time and never reported.

    A silent peer is dialled anew beside its connection, which is replaced if that succeeds: where the way was cut, TCP
    would notice late that it is whole again.

    A peer that was never linked is never lost, only silent: its port may be behind a firewall. One that was linked
    before, and is held again, is lost if it refuses twice or if another agent answers there; mere silence to a first
    call proves nothing. A lost or silent peer is dialled at each heartbeat for as long as it is held.

    A peer that says goodbye leaves in order. Nothing is reported, and it is not dialled again until it is held anew.

    What is counted are heartbeats that came and went, and time in which this process could run: after a pause of its
    own an agent blames nobody.

Who may speak
    Both ends prove that they know the job's secret, by an HMAC over both nonces, their roles and both identities
    (frames.py): nothing can be replayed or reflected, and the secret never crosses the wire. Somebody who cannot prove
    it learns the nonces and that this port speaks the protocol; somebody who sits at a peer's address also learns the
    two names, since the dialler proves itself first. Callers that have not proved themselves are few and short-lived.

    All of this goes through TLS, with the certificate of the agent that is called
    (agent/runtime/agent_certificates.py). Its fingerprint is in the agent's record in etcd; whoever calls compares it
    before saying anything. An authority, if one is given, must also have signed it, and then agents that call must show
    one of the same authority. Readers need none.

What this does not give
    Somebody *on the path* can cut a link, as any TCP connection.
    A peer that leaves in order in the same instant in which its connection was cut for another reason counts as lost.
    A child of the agent that was forked and never became another program would keep its sockets open: the agent starts
    its children as programs, and its sockets are closed on exec.
"""
