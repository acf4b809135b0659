"""The command line: options, commands, help, and the start of an agent."""
