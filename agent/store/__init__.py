"""Where agents meet: etcd, its in-memory twin for tests, the layout of keys and the codec of records."""
