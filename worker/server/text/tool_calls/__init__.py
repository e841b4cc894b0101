"""Formats of tool calls: parsers, and grammars that make a model write calls.

Each format is a file. Its parser finds calls in text that arrives in pieces. The result does not depend on the
boundaries of the pieces, so an answer can be continued from any token. Text that breaks the format is content, and so
is a call of a function that the request does not offer. Only markers are dropped.
"""
