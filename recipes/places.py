"""Where results go and where a network computes: what cannot be is refused at once, not when the work is done.

It leaves out what is in a place already, which every program judges by itself.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from recipes.config import ConfigError


def check_writable(key: str, path: Path) -> None:
    """Refuse a path below which nothing can be written, as read-only file systems and permissions have it.

    Args:
        key: What chose it, for the error.
        path: A file or directory, there or still to be made, with all directories above it.

    Raises:
        ConfigError: With the part of the path that is in the way.

    Example:
        >>> check_writable("output", Path("/dev/null/samples"))
        Traceback (most recent call last):
        recipes.config.ConfigError: output=/dev/null/samples: /dev/null is no directory. Write output=PATH...
    """
    there = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if there == path and path.is_file():
        there = path.parent
    why = "" if there.is_dir() else "is no directory"
    if not why:
        try:
            tempfile.TemporaryDirectory(prefix=".trial", dir=there).cleanup()  # permissions do not tell all
        except OSError:
            why = "cannot be written to"
    if why:
        raise ConfigError(f"{key}={path}: {there} {why}. Write {key}=PATH, with a path that can.")


def device_of(given: str | None) -> torch.device:
    """The device that `device=` names; null: cuda if there is one.

    Raises:
        ConfigError: If nothing can be computed there.

    Example:
        >>> device_of("cpu")
        device(type='cpu')
    """
    try:
        device = torch.device(given or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={given} cannot be used: {error} Write device=cpu, or leave it out.") from error
    return device
