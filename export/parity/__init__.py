"""How far each table's numbers move on the way to an answer: float, stored, sharded, scripted, reloaded, trained."""
