"""/v1/responses, OpenAI's newer API of conversations: a translation to a chat and back.

The server stores nothing: `store` is ignored, and references to earlier responses are refused.
"""
