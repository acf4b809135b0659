"""Commands on a job, from any machine that can reach its etcd."""
