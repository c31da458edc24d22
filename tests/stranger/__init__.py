"""The stranger's test: the built wheel in a fresh project, in a fresh environment, by the words of README and tutorial.

Everything promised outside is tested outside: only the documentation's own blocks are typed, nothing is patched in.
``python -m tests.stranger`` runs it; a plain ``pytest`` leaves it out.
"""
