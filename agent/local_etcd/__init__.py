"""Optional: the etcd that agents start themselves, where nobody runs one."""
