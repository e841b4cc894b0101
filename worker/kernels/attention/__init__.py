"""Attention over the paged KV cache.

Decode: `mla_decode` and `gqa_decode` walk over the equal parts of a `decode_schedule`, as `decode_parts` has
it, in tiles that `decode_tiling` chooses, and `merge_parts` joins what several parts have of one request.
`absorb` has the products before and after MLA's, `rope_absorb` the first of them together with the write to
the cache.
Prefill: `mla_prefill` and grouped queries' are `ragged_attention` over the chunks of a `prefill_work`, which has a kernel of
its own for Hopper;
`merge_states` joins what several passes computed.
"""
