"""Choose what takes texts out of records, by the options of a plan."""

from __future__ import annotations

from preprocess.read.messages import MessageFields
from preprocess.read.text_fields import RecordFields, TextFields
from shardprep.format.plan_options import PlanOptions


def text_fields_of(options: PlanOptions) -> TextFields:
    """Return the TextFields of these options. Raises UsageError if a name or the template is invalid."""
    if options.transform_sha256:
        return RecordFields(options)
    return MessageFields(options) if options.record == "chat" else TextFields(options)
