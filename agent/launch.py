"""`python -m agent.launch … train.py` starts an agent, as Paddle's `fleetrun` and its launch module do."""

from agent.cli.command_line import main

if __name__ == "__main__":
    main()
