"""One data-parallel worker: an HTTP server process and a scheduler process that owns the device."""
