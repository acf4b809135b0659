"""What keeps a job from starting, found before it is waited for: on this machine, at etcd, on the way to the others."""
