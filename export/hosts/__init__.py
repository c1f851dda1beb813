"""Bundles on several hosts: a router's bundle, and one for each host of its plan."""
