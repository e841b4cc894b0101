"""Output that is a sentence of a grammar: JSON of a schema, a regular expression, an EBNF.

A grammar comes from a client, and neither its compilation nor the matching of tokens against it can
be bounded from within: with `(a*)*b` a token costs ten times more than the one before. So every
grammar lives in a process of its own, under limits that the kernel enforces (`limits.py`). What it
costs too much of, ends it, and with it the requests that came with this grammar, nobody else's.

    scheduler (`pool.py`) --- fork at start-up ---> fork server (`fork_server.py`): vocabulary, xgrammar
        |                                              |
        |                                              | fork for each grammar: 20 ms, shared memory
        `---- tokens, over a socket of its own ----> grammar worker (`grammar_worker.py`): compile, then masks
"""
