"""The commands of `tbe-serve`, and the options that several of them share."""
