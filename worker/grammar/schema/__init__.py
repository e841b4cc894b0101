"""Rewrites JSON schemas into keywords that xgrammar enforces.

`rewrite.py` walks the schema. It converts the keywords that combine schemas (`allOf`, `if`, `not`, `dependentRequired`,
keywords beside `anyOf` or `$ref`) into alternatives without these keywords, by `merge.py` and `negate.py`. `settle.py`
then simplifies each alternative: `values.py` filters lists of values, `arrays.py` enumerates arrays.

A rewritten schema allows the same values as the original, within the strict mode of `json_schema.prepare`. If this is
not possible, `Inexact` names the keyword.
"""
