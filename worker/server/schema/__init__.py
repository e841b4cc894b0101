"""The requests that clients may send, as types; msgspec checks a body while it parses it.

Fields that are not listed are ignored, as OpenAI-compatible servers do. Fields that would change
the answer and that this version cannot honour are listed as `Any` and refused by name unless they
hold a value that means "off" (`unsupported.NEUTRAL`): ignoring them would answer another question.
"""
