"""Attention over the paged KV cache.

Decode: `mla_decode` and `gqa_decode` walk over the equal parts of a `decode_schedule` (`decode_parts`), in tiles of
`decode_tiling`. `merge_parts` merges the partial results of a request. `absorb` has the products before and after
MLA's attention, and `rope_absorb` joins the first of them with the write to the cache.
Prefill: `mla_prefill` and grouped-query prefill are `ragged_attention` over the chunks of a `prefill_work`.
`merge_states` merges the results of several passes.
"""
