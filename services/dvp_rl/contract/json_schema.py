"""Whether an object is a JSON schema, as far as its keywords nest."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


TypeName = Literal["array", "boolean", "integer", "null", "number", "object", "string"]
Parts = dict[str, "JsonSchema"]


class JsonSchema(BaseModel):
    """Keywords of drafts 7 to 2020-12. All others are allowed and not checked."""

    model_config = ConfigDict(strict=True, extra="ignore", alias_generator=to_camel)

    type: Annotated[list[TypeName], BeforeValidator(_as_list)] = []
    enum: list[Any] = []
    required: list[str] = []
    properties: Parts = {}
    additional_properties: JsonSchema | None = None
    items: Annotated[list[JsonSchema], BeforeValidator(_as_list)] = []
    prefix_items: list[JsonSchema] = []
    any_of: list[JsonSchema] = []
    one_of: list[JsonSchema] = []
    all_of: list[JsonSchema] = []
    defs: Parts = Field(default={}, alias="$defs")
    definitions: Parts = {}

    @model_validator(mode="before")
    @classmethod
    def _anything_or_nothing(cls, schema: Any) -> Any:
        """True and false are schemas, too."""
        return {} if isinstance(schema, bool) else schema


def check_object_schema(schema: Any) -> None:
    """Raises ValueError if it is not the schema of an object. The error names the first part that is no schema."""
    try:
        types = JsonSchema.model_validate(schema).type
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if types != ["object"]:
        raise ValueError('"type" must be "object"')
