"""One call of a model, as torch.export takes it: what of it a request brings, and the graph of what follows."""
