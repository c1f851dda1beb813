"""Maps of ids: which rows raw ids read, from TorchRec's managed collision modules to a file of the bundle."""
