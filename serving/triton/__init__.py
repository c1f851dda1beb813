"""What depends on tritonserver itself: a table of its releases, and a file for each subject they share."""
