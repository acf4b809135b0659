"""Parameter-server jobs: processes of different roles, each supervised for itself."""
