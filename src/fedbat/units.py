"""Figures as people read them."""


def megabytes(num_bytes: float) -> str:
    """Bytes in MB (in kB if there are few), with the digits that matter."""
    value = num_bytes / 1e6
    if value < 0.1:
        return f"{1e3 * value:.3g} kB"
    return f"{value:.3g} MB" if value < 100 else f"{value:,.0f} MB"


def loss(value: float) -> str:
    """A loss with three decimals, or as 4.8e+32."""
    return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.1e}"


def count(number: int, what: str) -> str:
    """A number with its noun: 1 run, 1,000 runs."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
