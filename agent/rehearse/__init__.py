"""Jobs of several nodes on one machine, with faults injected: for rehearsals, the demo and the tests."""
