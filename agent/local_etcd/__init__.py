"""Optional: the etcd that agents start themselves, where none is provided."""
