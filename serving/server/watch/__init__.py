"""Watch a running tritonserver: its process, its models and their release files."""
