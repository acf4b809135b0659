"""`python -m agent.launch … train.py`: Paddle's ways to start, by `fleetrun` and by module."""

from agent.cli.command_line import main

if __name__ == "__main__":
    main()
