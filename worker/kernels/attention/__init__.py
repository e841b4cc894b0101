"""Attention over the paged KV cache.

Decode: `mla_decode` and `gqa_decode` walk over the equal parts of a `decode_schedule`, cut as
`decode_tiling` says, and `decode_parts` has what they share. `absorb` has the products before and after MLA's.
Prefill: `mla_prefill` and grouped queries' are `ragged_attention` over the chunks of a `prefill_work`;
`merge_states` joins what several passes computed.
"""
