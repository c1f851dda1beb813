"""DLRM-v2's tables on four hosts, none of which could hold all."""
