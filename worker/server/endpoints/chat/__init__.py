"""Conversations: from messages and tools to a prompt, and from text to an assistant's message."""
