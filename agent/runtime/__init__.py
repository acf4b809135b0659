"""The runtime of an agent: the event loop, and the parts that it drives, for both kinds of job."""
