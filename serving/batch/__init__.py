"""Score Parquet files: what is read, what is written, and how a run that was interrupted goes on."""
