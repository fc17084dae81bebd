"""Where models that we fetched ourselves are kept."""

from __future__ import annotations

import os
from pathlib import Path

ROOT_VARIABLE = "PACELINE_CACHE_ROOT"


def models_folder(download_dir: Path | None = None) -> Path:
    """The folder for our own downloads: the one asked for, else below PACELINE_CACHE_ROOT or ~/.cache/paceline."""
    if download_dir is not None:
        return download_dir
    root = os.environ.get(ROOT_VARIABLE)
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "paceline") / "models"
