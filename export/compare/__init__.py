"""The study of shardings and dtypes: place the same tables in several ways, measure, and recommend."""
