"""What goes wrong around a server, done to a real one; each fault is a function that returns what it saw."""
