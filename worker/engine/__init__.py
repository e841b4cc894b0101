"""One forward step on the device: buffers, page tables, sampling."""
