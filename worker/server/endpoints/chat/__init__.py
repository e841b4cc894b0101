"""Conversations: messages and tools become a prompt, and generated text becomes an assistant's message."""
