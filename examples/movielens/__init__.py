"""MovieLens-100k: train a small ranking model with TorchRec, export its tables, serve them, look them up."""
