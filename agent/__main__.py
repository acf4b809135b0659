"""`python -m agent` is `elastic-agent`."""

from agent.cli.command_line import main

if __name__ == "__main__":
    main()
