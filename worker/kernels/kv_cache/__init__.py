"""Reads and writes of the paged KV cache [pages, page_size, W], with a row of W numbers for each token.

A row is a latent and a rotary key for MLA, and keys and values for grouped-query attention (`gqa_rows`).
`rope_kv_write` and `rope_gqa_write` are everything between a layer's projections and its attention. `gather` collects
rows for prefill, `out_cache_loc` finds the rows of new tokens. `write`, `read` and `paged_rows` are plain torch.
"""
