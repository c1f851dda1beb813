"""Start a tritonserver: its process, ports, keys, TLS, private folder, shared memory and run file."""
