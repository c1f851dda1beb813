"""How far the numbers of tables are off at each step: float, quantized, sharded, scripted, reloaded, trained."""
