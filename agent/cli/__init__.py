"""The command line: options, commands, and how a job is found by what was typed."""
