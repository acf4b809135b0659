"""What an operator asks of a job, from anywhere that reaches its etcd."""
