"""One op a file: its definition in plain torch and, for most ops, a Triton kernel of the same signature.

This folder has the ops that any layer may use, and the rules of all launches: the choice between torch and kernel
(`dispatch.py`), programmatic dependent launch (`pdl.py`), a second stream (`beside.py`).
"""
