"""Shapes and rules of a model, read from the config.json of a Hugging Face folder.

All differences between checkpoints of a family are decided here, once, so that model files do not depend on the
origin of a checkpoint. A model that cannot be served is refused with the reason.
"""
