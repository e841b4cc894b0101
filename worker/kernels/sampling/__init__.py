"""From logits to tokens: `sample` draws with the computed `noise`, above what `top_threshold` leaves."""
