"""The HTTP server of a worker, in front of its scheduler. docs/design/server.md describes its folders."""
