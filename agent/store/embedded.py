"""Former name of `python -m agent.local_etcd.embedded`; `python -m agent.store.embedded` still runs it."""

import runpy

if __name__ == "__main__":
    runpy.run_module("agent.local_etcd.embedded", run_name="__main__")
