"""Load for a long time, and more load than there is capacity."""
