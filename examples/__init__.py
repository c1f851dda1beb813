"""Worked examples: a real model on real data, from training to lookups."""
