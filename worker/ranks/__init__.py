"""The ranks of a tensor-parallel worker: rank 0 tells the others each call of its engine (docs/design/ranks.md)."""
