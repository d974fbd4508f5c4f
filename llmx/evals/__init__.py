"""How good a model is: perplexity, its distance to a reference model, and tasks; by the engine that serves it."""
