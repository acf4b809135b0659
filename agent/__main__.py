"""`python -m agent` is `elastic-agent`."""

from agent.cli import main

if __name__ == "__main__":
    main()
