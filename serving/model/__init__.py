"""What is the same for all versions of a served model: its settings, its config.pbtxt and its model.py."""
