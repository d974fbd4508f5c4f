"""Ranks that compute one model together: the collectives that layers call. engine/ranks starts them."""
