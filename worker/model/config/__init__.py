"""What a model is: its shapes and rules, read from the config.json of a Hugging Face folder.

Everything that could differ between checkpoints of a family is decided here, once, so that the
model files have no `if` about where a checkpoint comes from. What cannot be served is refused here
with the reason.
"""
