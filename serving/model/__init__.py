"""The parts of a served model that all its versions share: settings, config.pbtxt and model.py."""
