"""`python -m agent.elastic … scale` changes the number of nodes, as with Paddle."""

from agent.cli.command_line import main

if __name__ == "__main__":
    main()
