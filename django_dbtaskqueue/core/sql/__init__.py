"""Hand-tuned statements as text, without Django: the only SQL of the project that writes ``status``.

Parameters are named (``%(queue)s``). ``Statements`` renders them for one table and one dialect.
"""
