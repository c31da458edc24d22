"""One statement per clause and line, so that a person can read it and a diff shows what changed."""

import re
import textwrap

WIDTH = 110
TOKEN = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|%\(\w+\)s|\w+|\s+|.", re.DOTALL)
STATEMENT = {"SELECT", "WITH", "INSERT", "UPDATE", "DELETE"}
CLAUSES = {
    "SELECT", "FROM", "WHERE", "AND", "ORDER", "GROUP", "HAVING", "LIMIT", "RETURNING", "SET", "VALUES", "ON", "UNION",
    "CROSS", "JOIN", "FOR", "WITH",
}  # fmt: skip


def laid_out(sql: str) -> str:
    """Return ``sql`` with one clause per line, subqueries indented."""
    tokens = [" " if token.isspace() else token for token in TOKEN.findall(" ".join(sql.split()))]
    lines: list[tuple[int, list[str]]] = [(0, [])]  # how deep each line stands, and its tokens
    blocks = [True]  # of each open parenthesis and CASE: whether its clauses stand on lines of their own
    between, previous = False, ""
    for place, token in enumerate(tokens):
        following = next((one for one in tokens[place + 1 :] if one != " "), "")
        joined = f"{previous} {token}" in ("CROSS JOIN", "LOCKED ON") or (between and token == "AND")
        closes = token in (")", "END") and blocks.pop()
        if closes or (token in CLAUSES and blocks[-1] and not joined):
            lines.append((sum(blocks) - 1, []))
        lines[-1][1].append(token)
        if token in ("(", "CASE"):
            blocks.append(token == "(" and following in STATEMENT)
            if blocks[-1]:
                lines.append((sum(blocks) - 1, []))
        elif token in ("BETWEEN", "AND"):
            between = token == "BETWEEN"
        previous = previous if token == " " else token
    texts = [(depth, "".join(parts).strip()) for depth, parts in lines]
    return "\n".join(_wrapped(depth, text) for depth, text in texts if text)


def _wrapped(depth: int, text: str) -> str:
    indent = "    " * depth
    return textwrap.fill(
        text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
