"""The ranks of this process: a bundle's program, the threads that run it, and the buffers of its answers."""
