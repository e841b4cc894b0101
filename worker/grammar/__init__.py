"""Structured outputs: JSON by a schema, regular expressions, EBNF.

Grammars come from clients. Compilation and matching may take unlimited time: with `(a*)*b` each token costs ten times
more than the one before. So each grammar has its own process with limits that the kernel enforces (`limits.py`). An
exceeded limit ends this process and the requests with this grammar, and no others.

    scheduler (`pool.py`) --- fork at start-up ---> fork server (`fork_server.py`): vocabulary, xgrammar
        |                                              |
        |                                              | fork for each grammar: 20 ms, shared memory
        `---- tokens, over a socket of its own ----> grammar worker (`grammar_worker.py`): compile, then masks
"""
