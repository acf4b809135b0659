"""`python -m agent.elastic … scale`: Paddle's way to change the number of nodes."""

from agent.cli.command_line import main

if __name__ == "__main__":
    main()
