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
    lines: list[tuple[int, str]] = [(0, "")]
    blocks = [True]  # of each open parenthesis and CASE: whether its clauses stand on lines of their own
    between = False

    def new_line() -> None:
        if lines[-1][1].strip():
            lines.append((sum(blocks) - 1, ""))
        else:
            lines[-1] = (sum(blocks) - 1, "")

    previous = ""
    for place, token in enumerate(tokens):
        following = next((one for one in tokens[place + 1 :] if one != " "), "")
        if token in ("(", "CASE"):
            lines[-1] = (lines[-1][0], lines[-1][1] + token)
            blocks.append(token == "(" and following in STATEMENT)
            if blocks[-1]:
                new_line()
        elif token in (")", "END"):
            if blocks.pop():
                new_line()
            lines[-1] = (lines[-1][0], lines[-1][1] + token)
        else:
            joined = f"{previous} {token}" in ("CROSS JOIN", "LOCKED ON")
            if token in CLAUSES and blocks[-1] and not joined and not (between and token == "AND"):
                new_line()
            if token in ("BETWEEN", "AND"):
                between = token == "BETWEEN"
            lines[-1] = (lines[-1][0], lines[-1][1] + token)
        previous = previous if token == " " else token
    return "\n".join(_wrapped(depth, text.strip()) for depth, text in lines if text.strip())


def _wrapped(depth: int, text: str) -> str:
    indent = "    " * depth
    return textwrap.fill(
        text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
