"""One op a file: its definition in plain torch and, where it has one, the Triton kernel of the same signature.

Here are the ops that any layer may have, and what all launches share: which of the two an op takes
(`dispatch.py`), starting before the last kernel has ended (`pdl.py`), a second stream (`beside.py`).
"""
