"""One file for each architecture, read top-down; beside it the loading of weights and their formats."""
