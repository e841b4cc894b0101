"""The requests that clients may send, as types; msgspec checks a body while it parses it.

Fields that would change the answer and that this version cannot honour are refused by name
(`unsupported.py`): ignoring them would answer another question. Fields that are not listed are ignored,
as OpenAI-compatible servers do; those of OpenAI, SGLang and vLLM among them change no answer.
"""
