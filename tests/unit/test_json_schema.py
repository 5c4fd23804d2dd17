"""What is taken for a tool's schema is what the standard's own schema takes."""

from __future__ import annotations

import re
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator, SchemaError
from pydantic import BaseModel

from dvp_rl.contract.json_schema import check_object_schema


class Place(BaseModel):
    name: str
    kind: Literal["city", "river"] | None = None
    near: list[Place] = []


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": ["object"]},
        of(),
        of(a={"type": "integer", "minimum": 0}, b={"type": ["string", "null"], "format": "date"}, c=True, d={}),
        of(a={"type": "array", "items": {"type": "array", "prefixItems": [{"type": "number"}], "items": False}}),
        of(a={"enum": ["in", "out", None, 1]}) | {"required": ["a"], "additionalProperties": False},
        of(a={"anyOf": [{"type": "null"}, of(b={"$ref": "#/$defs/b"})]}) | {"$defs": {"b": {"type": "boolean"}}},
        Place.model_json_schema() | {"type": "object"},
    ],
)
def test_schemas(schema: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(schema)
    check_object_schema(schema)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (of(a={"type": 7}), "properties.a.type.0: Input should be 'array', 'boolean', "),
        (of(a={"type": "integr"}), "properties.a.type.0: Input should be 'array', 'boolean', "),
        (of(a={"type": None}), "properties.a.type.0: Input should be"),
        (of(a="integer"), "properties.a: Input should be"),
        (of(a=of(b={"items": "string"})), "properties.a.properties.b.items.0: Input should be"),
        (of(a={"anyOf": {"type": "string"}}), "properties.a.anyOf: Input should be a valid list"),
        (of(a={"allOf": [1]}), "properties.a.allOf.0: Input should be"),
        (of(a={"enum": "in"}), "properties.a.enum: Input should be a valid list"),
        ({"type": "object", "properties": ["a"]}, "properties: Input should be a valid dict"),
        (of() | {"required": 5}, "required: Input should be a valid list"),
        (of(a={"required": True}), "properties.a.required: Input should be a valid list"),
        (of() | {"required": [5]}, "required.0: Input should be a valid string"),
        (of() | {"additionalProperties": "none"}, "additionalProperties: Input should be"),
        (of() | {"$defs": {"a": 1}}, "$defs.a: Input should be"),
    ],
)
def test_what_is_no_schema_is_named(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(SchemaError):
        Draft202012Validator.check_schema(schema)
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        check_object_schema(schema)


@pytest.mark.parametrize("schema", [{}, {"type": "array"}, {"type": ["object", "null"]}, {"properties": {}}])
def test_arguments_are_an_object(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match='"type" must be "object"'):
        check_object_schema(schema)
