"""From logits to tokens: `sample` draws with `noise` among the tokens that `top_threshold` keeps."""
