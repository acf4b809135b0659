"""The daemon of one node: its event loop, and the parts that the loop drives."""
