"""GGUF's block types that C++ reads and writes."""

from __future__ import annotations

# Kind -> (its number in pack.cpp, inputs in a block, its bytes)
KINDS = {
    "Q4_0": (0, 32, 18),
    "Q4_1": (1, 32, 20),
    "Q5_0": (2, 32, 22),
    "Q5_1": (3, 32, 24),
    "Q8_0": (4, 32, 34),
    "IQ4_NL": (5, 32, 18),
    "Q2_K": (6, 256, 84),
    "Q3_K": (7, 256, 110),
    "Q4_K": (8, 256, 144),
    "Q5_K": (9, 256, 176),
    "Q6_K": (10, 256, 210),
    "IQ4_XS": (11, 256, 136),
}
