"""The ranks of this process: a bundle's program, the threads that run it, and the buffers of its answers."""

from importlib.util import find_spec

from serving.pins import not_installed

if find_spec("torch") is None:  # an install of the client
    raise not_installed("torch", "engine")
