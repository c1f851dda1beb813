"""A router and hosts on machines of their own, and what networks and roll-outs do to them. Needs root."""
