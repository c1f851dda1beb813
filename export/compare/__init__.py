"""The study of shardings and dtypes: place the same tables in every way, measure, recommend."""
