"""The job's web page, metrics, events and probes, served by a process beside the agent.

That process (`__main__.py`) reads etcd as `elastic-agent status` does, and asks the agents over their links for the
state of their ranks (`rank_poller.py`). It changes one thing only: np, in the same way as `elastic-agent scale`. The
agent's own process neither parses HTTP nor waits for a browser, so a flood of requests or a fault here cannot affect
training. The agent opens the listening socket and the event file, restarts the process if it ends, and ends it
(`page_process.py`).

Pure functions make the output from records and from the answers of agents: `page_data.py`, `metrics.py`, `events.py`,
`traces.py`.
"""
