"""Calls of a client's functions: how models write them, and how to make a model write one.

Each format is a file. Its parser finds calls in text that arrives in pieces; how the text was split
makes no difference to the result, so that an answer can be continued from any token. What does not
keep to the format is content, and so is a call of a function that was not offered. A client never gets
half a call that the model did not begin. No text is lost but the markers, which are not for readers.
"""
