"""Speculative decoding: the drafter's contract, verification, and one file per drafter."""
