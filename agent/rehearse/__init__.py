"""A job of several nodes on one machine, to break on purpose: for the demo, the tests, and rehearsals."""
