"""The paged KV cache [pages, page_size, W], a row of W numbers for each token: what is written and read.

A latent and a rotary key for MLA; for grouped queries what `gqa_rows` says. `rope_kv_write` and
`rope_gqa_write` are all that stands between a layer's projections and its attention; `gather` collects
what prefill reads; `write`, `read` and `paged_rows` are plain torch's.
"""
