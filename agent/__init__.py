"""elastic-agent: the daemon that runs on every node of a PyTorch training job."""

__version__ = "0.1.0"
