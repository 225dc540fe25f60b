"""Bodies as structs: each kind of wrong value is told in one sentence that names place, limit and value."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct

from cbatch.server.http_errors import HttpProblemError
from cbatch.server.typed_bodies import Filled, read_body, unknown_in


class Circle(Struct, tag="circle"):
    radius: Annotated[int, Meta(ge=1)]


class Square(Struct, tag="square"):
    side: Annotated[int, Meta(ge=1, le=9)] = 1

    def __post_init__(self) -> None:
        if self.side == 4:
            raise ValueError("has a side of 4: take another")


class Drawing(Struct):
    shapes: Annotated[list[Circle | Square], Meta(min_length=1, max_length=3)]
    title: Filled | None = None
    unit: Literal["mm", "cm"] = "mm"
    is_open: bool = False
    code: Annotated[str, Meta(pattern=r"^[a-z]+\Z", description="small letters")] = "a"
    notes: str | list[str] = ""
    marks: dict[Annotated[str, Meta(max_length=2)], Annotated[str, Meta(max_length=3)]] = {}


GOOD: dict[str, Any] = {"shapes": [{"type": "circle", "radius": 1}]}


WRONG: dict[str, dict[str, Any]] = {
    "shapes is missing: it must be a list of 1 … 3 items": {"shapes": None},
    "shapes must be a list of 1 … 3 items, not 3": {"shapes": 3},
    "shapes must be a list of 1 … 3 items, not 4": {"shapes": [{"type": "square"}] * 4},
    "shapes must be a list of 1 … 3 items, not []": {"shapes": []},
    "shapes[0] must be an object, not 3": {"shapes": [3]},
    "shapes[0].type is missing: it must be circle or square": {"shapes": [{"type": None}]},
    "shapes[0].type must be circle or square, not 'x'": {"shapes": [{"type": "x"}]},
    "shapes[0].radius is missing: it must be a whole number of at least 1": {
        "shapes": [{"type": "circle"}]
    },
    "shapes[0].side must be a whole number of 1 … 9, not 10": {
        "shapes": [{"type": "square", "side": 10}]
    },
    "shapes[0] has a side of 4: take another": {"shapes": [{"type": "square", "side": 4}]},
    "title must be a string that is not empty, not ''": {"title": ""},
    "unit must be cm or mm, not 'km'": {"unit": "km"},
    "is_open must be true or false, not 1": {"is_open": 1},
    "code must be small letters, not 'A'": {"code": "A"},
    "notes[0] must be a string, not 1": {"notes": [1]},
    "notes must be a string or a list, not 1": {"notes": 1},
    "marks must be an object, not []": {"marks": []},
    "each name in marks must be a string of at most 2 characters": {"marks": {"abc": ""}},
    "each value in marks must be a string of at most 3 characters": {"marks": {"a": "long"}},
}


def test_wrong_value_is_told_with_its_place_and_limit() -> None:
    for sentence, more in WRONG.items():
        with pytest.raises(HttpProblemError) as told:
            read_body(Drawing, {**GOOD, **more})
        (field,) = more
        assert (told.value.status, told.value.param, told.value.message) == (400, field, sentence)


def test_places_may_have_dots() -> None:
    with pytest.raises(HttpProblemError, match=r"shapes\.1 must be an object, not 5"):
        read_body(Drawing, {"shapes": [{"type": "square"}, 5]}, has_dots=True)


def test_null_is_not_given_and_names_that_nobody_reads_are_told() -> None:
    body = {**GOOD, "title": None, "unit": None, "colour": "red", "gone": None}
    assert read_body(Drawing, body) == Drawing([Circle(1)])
    assert unknown_in(body, Drawing) == ["colour"]
    assert unknown_in({"type": "square", "size": 3}, Square) == ["size"]
