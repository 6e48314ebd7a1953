"""A CloudFormation template as it is deployed, with resolved references and policies as plain statements."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Statement", "Template"]

_PSEUDO = {"AWS::Partition": "aws", "AWS::Region": "us-east-1", "AWS::AccountId": "123456789012"}
_ARNS = {
    "AWS::S3::Bucket": ("s3:::", "BucketName"),
    "AWS::SQS::Queue": ("sqs:us-east-1:123456789012:", "QueueName"),
    "AWS::Lambda::Function": ("lambda:us-east-1:123456789012:function:", "FunctionName"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One statement of a policy; fields that may be one text or a list are lists."""

    effect: str
    actions: tuple[str, ...]
    resources: tuple[str, ...]
    principal: Any
    condition: Any


class Template:
    """A template.

    Attributes:
        text: text of the file.
        resources: logical id → resource, resolved.
    """

    def __init__(self, file: Path) -> None:
        self.text = file.read_text()
        document = json.loads(self.text)
        self._raw: dict[str, Any] = document["Resources"]
        self.resources: dict[str, Any] = {name: self.resolved(resource) for name, resource in self._raw.items()}

    def of_type(self, kind: str) -> dict[str, Any]:
        """Return the properties of the resources of a type."""
        return {name: each.get("Properties", {}) for name, each in self.resources.items() if each["Type"] == kind}

    def resolved(self, value: Any) -> Any:
        """Return a value with its references resolved; values that only AWS knows are replaced by the logical id."""
        if isinstance(value, list):
            return [self.resolved(each) for each in value]
        if not isinstance(value, Mapping):
            return value
        if set(value) == {"Ref"}:
            return self._named(value["Ref"])
        if set(value) == {"Fn::GetAtt"}:
            return self._named(".".join(value["Fn::GetAtt"]))
        if set(value) == {"Fn::Sub"}:
            return re.sub(r"\$\{([\w:.]+)\}", lambda match: self._named(match[1]), value["Fn::Sub"])
        if set(value) == {"Fn::Join"}:
            separator, parts = value["Fn::Join"]
            return separator.join(self.resolved(parts))
        return {name: self.resolved(each) for name, each in value.items()}

    def _named(self, name: str) -> str:
        if name in _PSEUDO:
            return _PSEUDO[name]
        logical, _, attribute = name.partition(".")
        resource = self._raw[logical]  # an undefined reference is an error here
        prefix, named_by = _ARNS.get(resource["Type"], ("", ""))
        own_name = resource.get("Properties", {}).get(named_by, logical)
        return f"arn:aws:{prefix}{own_name}" if attribute == "Arn" and prefix else str(own_name if prefix else logical)

    def statements(self, kinds: tuple[str, ...] = ()) -> Iterator[tuple[str, Statement]]:
        """Yield every policy statement with the logical id of its resource, for all types of resources or only some."""
        for name, resource in self.resources.items():
            if kinds and resource["Type"] not in kinds:
                continue
            properties = resource.get("Properties", {})
            documents = [policy["PolicyDocument"] for policy in properties.get("Policies", ())]
            documents += [properties["PolicyDocument"]] if "PolicyDocument" in properties else []
            for document in documents:
                yield from ((name, _statement(each)) for each in document["Statement"])


def _statement(fields: Mapping[str, Any]) -> Statement:
    return Statement(
        effect=fields["Effect"],
        actions=_several(fields["Action"]),
        resources=_several(fields.get("Resource", ())),
        principal=fields.get("Principal"),
        condition=fields.get("Condition"),
    )


def _several(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
