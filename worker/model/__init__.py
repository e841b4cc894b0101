"""One file per architecture, read top-down; weights and their formats beside it."""
