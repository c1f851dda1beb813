"""The commands of `tbe-export`, a file each."""
