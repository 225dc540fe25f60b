"""llama-server's `samplers`: which of them run, as options that leave out the others.

Source: llama.cpp common/sampling.cpp, common_sampler_types_from_names and common_sampler_type_to_chr.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from cbatch.server.http_errors import bad_request, refused
from cbatch.support.checks import shown

SAMPLERS: Mapping[str, Mapping[str, float]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0},
}
"""Samplers in the order in which they run, and the options that leave each out."""

_ORDER = (*SAMPLERS,)
_LETTERS = dict(zip("edskypmxt", _ORDER, strict=True))
_NAMES = {
    **{name.replace("_", sign): name for name in _ORDER for sign in ("_", "-", "")},
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
}


def left_out(said: Any) -> dict[str, tuple[str, Any]]:
    """Return the options that leave out the samplers which a request does not name, each with the field it is from.

    Args:
        said: names, or a string of letters.

    Raises:
        HttpProblemError: an unknown sampler, or another order than that in which they run.
    """
    names = [_LETTERS.get(letter, letter) for letter in said] if isinstance(said, str) else said
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        words = "a list of names, or a string of llama-server's letters"
        raise bad_request(f"samplers must be {words}, not {shown(said)}", "samplers")
    unknown = next((name for name in names if name.lower() not in _NAMES), None)
    if unknown is not None:
        raise refused("samplers", f"{shown(unknown)} is none of {', '.join(_ORDER)}")
    places = [_ORDER.index(_NAMES[name.lower()]) for name in names]
    if any(before >= after for before, after in pairwise(places)):
        raise refused("samplers", f"they run once each, in this order: {', '.join(_ORDER)}")
    absent = [name for i, name in enumerate(_ORDER) if i not in places]
    return {option: ("samplers", v) for name in absent for option, v in SAMPLERS[name].items()}
