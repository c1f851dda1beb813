"""Serve exported embedding tables: open a bundle and answer KJT requests, in this process or behind Triton."""

from serving.torch_libraries import share_cpuinfo

share_cpuinfo()
