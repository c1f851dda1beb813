"""Serve exported embedding tables: open a bundle, answer KJT requests, in this process or behind Triton."""
