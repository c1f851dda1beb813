"""The commands of `tbe-serve`, a file each."""
