"""The job's web page, metrics, events and probes, by a process beside the agent.

That process (`__main__.py`) reads etcd as `status` does, and asks the agents over their links how their ranks are
(`rank_poller.py`). It gives no orders but one: np, changed as `elastic-agent scale` changes it. The agent's own process
neither parses HTTP nor waits for a browser: a flood of requests, or a fault here, cannot touch the training. It opens
what is listened at and written to, starts the process again should it end (`page_process.py`), and ends it.

What is sent is made by pure functions from records and pulses: `page_data.py`, `metrics.py`, `events.py`, `traces.py`.
"""
