"""Numbers and shares as text for people. Standard library only."""

from __future__ import annotations


def format_number(value: float) -> str:
    """Return a number with its thousands apart; a fraction below 1,000 has three digits."""
    is_small_fraction = isinstance(value, float) and abs(value) < 1000
    return f"{value:.3g}" if is_small_fraction else f"{value:,.0f}"


def format_percent(share: float) -> str:
    """Return a share (0 to 1) as a percentage; a share just below 1 does not become 100 %."""
    text = f"{share * 100:.2f}".rstrip("0").rstrip(".")
    return "> 99.99 %" if text == "100" and share < 1 else f"{text} %"
