"""A load generator for OpenAI-compatible servers and SGLang's `/generate`; `bench_serving.py` is its
command."""
