"""Rewriting of JSON schemas into keywords that xgrammar enforces.

`rewrite.py` walks the schema. It turns what combines schemas (`allOf`, `if`, `not`, `dependentRequired`,
keywords beside `anyOf` or `$ref`) into alternatives without these keywords, by `merge.py` and `negate.py`.
`settle.py` then simplifies each alternative: `values.py` filters lists of values, `arrays.py` enumerates arrays.

A rewritten schema allows what the original allows, within the strict mode of `json_schema.prepare`, and
nothing more. Where that cannot be had, `Inexact` says which keyword is the reason.
"""
