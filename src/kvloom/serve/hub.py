"""Checkpoints that lie at the hub: whether it can be asked for them at all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

from kvloom.types.errors import ConfigError
from kvloom.types.spec import ModelSpec

CONFIG: Final = "config.json"
HUB_SECONDS: Final = 5.0


def require_hub(models: Iterable[ModelSpec]) -> None:
    """Raises ConfigError for a model that is neither here nor to be had. The loaders would find that out too,
    after half a minute of asking again; what the hub answers is left to them."""
    for model in models:
        if Path(model.path).is_dir():
            continue
        try:
            known = isinstance(try_to_load_from_cache(model.path, CONFIG), str)
        except ValueError as error:  # It is no id of the hub, and was meant to be a folder.
            raise ConfigError(
                f"models.{model.name}: {model.path}: there is no such folder; a checkpoint's folder, or an "
                "id of the hub, is right"
            ) from error
        if known:
            continue
        try:
            get_hf_file_metadata(hf_hub_url(model.path, CONFIG), timeout=HUB_SECONDS)
        except HfHubHTTPError:
            continue  # it answers
        except Exception as error:  # whatever its HTTP client makes of a network
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ConfigError(
                f"models.{model.name}: {model.path}: the hub at {constants.ENDPOINT} cannot be reached "
                f"({reason}); a network, or the path of a checkpoint directory, is right"
            ) from error
