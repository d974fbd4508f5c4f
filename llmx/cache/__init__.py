"""KV memory: which block holds what (`blocks`, no torch), what the blocks are made of (`pools`)."""
