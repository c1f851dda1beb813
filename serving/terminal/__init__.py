"""The command lines of `tbe-serve` and `tbe-export`: how options are read, and errors printed."""
