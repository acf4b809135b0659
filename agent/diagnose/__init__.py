"""What is wrong with a rank or a node: hangs, stack traces, causes of an exit, health."""
