"""OpenAI's `prediction`: a text that much of the answer is expected to equal. Its tokens are drafts."""

from __future__ import annotations

from mla_router.worker.generation import MAX_PREDICTION
from mla_router.worker.server.errors import InvalidField, InvalidRequest
from mla_router.worker.server.schema.chat import Prediction
from mla_router.worker.server.state import Service

FIELD = "prediction.content"


async def prediction_tokens(
    service: Service, prediction: Prediction | None, *, continues: bool
) -> list[int] | None:
    """Returns the token ids; None without a prediction. Raises InvalidField, also if this worker takes no predictions and
    the request does not continue the answer of another one."""
    if prediction is None:
        return None
    if service.config.speculative_algorithm != "NGRAM" and not continues:
        raise InvalidField(
            "prediction",
            "not supported by this worker, which runs without --speculative-algorithm NGRAM; leave it out",
            code="unsupported_parameter",
        )
    text, content = "", prediction.content
    if isinstance(content, str):
        text = content
    else:
        for part in content:
            if part.type != "text" or part.text is None:
                raise InvalidField(FIELD, "only parts of the type text, with a text")
            text += part.text
    limit = min(MAX_PREDICTION, service.limits.context_length)
    try:
        tokens = await service.tokenizer.encode(
            text, context_length=service.limits.context_length, add_special_tokens=False
        )
    except InvalidRequest as error:
        raise InvalidField(FIELD, f"longer than {limit} tokens") from error
    if len(tokens) > limit:
        raise InvalidField(FIELD, f"{len(tokens)} tokens are more than {limit}")
    return tokens
