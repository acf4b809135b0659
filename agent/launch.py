"""`python -m agent.launch … train.py`: the seeds' ways to start, by `fleetrun` and by module."""

from agent.cli import main

if __name__ == "__main__":
    main()
