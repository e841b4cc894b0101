"""The machines that share the ranks of a worker: how they meet, and how each learns of the other's end
(docs/design/ranks.md)."""
