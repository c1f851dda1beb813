"""Measure a served model: make requests, send them, check the answers, and report."""
