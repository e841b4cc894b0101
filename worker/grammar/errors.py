"""What can be wrong with a grammar."""


class GrammarError(Exception):
    """The grammar cannot be used; the message is for the client who sent it."""
