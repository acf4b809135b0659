"""`elastic-agent doctor`: finds what would keep a job from starting, on this machine, at etcd, and between machines."""
