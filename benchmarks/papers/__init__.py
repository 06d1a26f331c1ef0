"""Published tables and formulas of DisagMoE, Piper and MoEBlaze, recomputed. ``python -m benchmarks.papers``."""
