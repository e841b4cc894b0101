"""The types of the request bodies. msgspec checks a body while it parses it.

Unsupported fields that would change the answer are refused by name (`unsupported.py`). Unknown fields are ignored, as
in other OpenAI-compatible servers, except misspelt ones (`unknown.py`); the fields of OpenAI, SGLang and vLLM among them
change no answer.
"""
