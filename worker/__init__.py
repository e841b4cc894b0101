"""One data-parallel worker: HTTP server processes and a scheduler process that owns the device."""
