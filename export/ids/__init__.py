"""Id maps, from TorchRec's managed collision modules to a file of the bundle: which row a raw id reads."""
