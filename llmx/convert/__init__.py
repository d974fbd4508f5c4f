"""From one kind of model file to another."""
