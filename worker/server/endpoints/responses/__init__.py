"""/v1/responses, OpenAI's newer form of a conversation: a translation to a chat and back.

Nothing is stored: `store` is ignored, and whatever refers to an earlier response is refused.
"""
