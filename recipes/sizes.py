"""Sizes of a network are at least 1: torch builds some of the others, and fails in a layer that nobody named."""

from __future__ import annotations


def at_least_one(**sizes: int) -> None:
    """Refuse sizes below 1.

    Args:
        **sizes: Arguments of a network, by name.

    Raises:
        ValueError: With the first that is too small.

    Example:
        >>> at_least_one(depth=2, num_heads=0)
        Traceback (most recent call last):
        ValueError: num_heads=0 must be at least 1.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1.")
