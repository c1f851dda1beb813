"""Publish a version by one rename, and remove old versions."""
