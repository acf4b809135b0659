"""`python -m agent.store.embedded`: the former name of `python -m agent.local_etcd.embedded`, which it runs."""

import runpy

if __name__ == "__main__":
    runpy.run_module("agent.local_etcd.embedded", run_name="__main__")
