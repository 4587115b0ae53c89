"""Write src/plait/model/known_keys.json: which config.json keys each transformers class knows, and their defaults.

Every registered family that has a class there is in it. Run it by hand when a family is added or the pinned
transformers changes: `python tools/make_known_keys.py`. The loader uses the table to tell a key that it must obey or
refuse from one that nobody reads.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig, __version__

from plait.model.families import families

TARGET = Path(__file__).parents[1] / "src/plait/model/known_keys.json"


def keys_of(model_type: str) -> dict[str, Any]:
    """Field name -> default of the class itself; fields of the common base are left out."""
    base = {f.name for f in dataclasses.fields(PreTrainedConfig)}
    own = {}
    for f in dataclasses.fields(CONFIG_MAPPING[families()[model_type].written_as]):
        value = f.default if f.default is not dataclasses.MISSING else None
        if f.name not in base or f.name in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
            own[f.name] = value
    return own


def main() -> None:
    model_types = {name: keys_of(name) for name, family in families().items() if not family.is_own}
    table = {"transformers": __version__, "model_types": model_types}
    TARGET.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{TARGET}: {len(model_types)} model types, transformers {__version__}")


if __name__ == "__main__":
    main()
