"""How both programs read options and speak to a person."""
