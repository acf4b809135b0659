"""`python -m agent.elastic … scale`: the seeds' way to change the number of nodes."""

from agent.cli import main

if __name__ == "__main__":
    main()
