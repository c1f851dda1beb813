"""The commands of `tbe-export`, and the options that several of them share."""
