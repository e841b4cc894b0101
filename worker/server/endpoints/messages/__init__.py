"""/v1/messages, Anthropic's API: requests are translated to chats, and answers back."""
