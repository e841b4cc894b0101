//! The size of vLLM's KV cache. vLLM reports it only as labels of a metric.

const CACHE_CONFIG: &str = "vllm:cache_config_info{";

/// Whether a page of `/metrics` comes from vLLM.
pub(super) fn is_vllm(page: &[u8]) -> bool {
    page.split(|byte| *byte == b'\n').any(|line| line.starts_with(b"vllm:"))
}

/// Size of the KV cache in tokens, summed over the ranks. `None` if the page does not have it.
pub(super) fn cache_tokens(page: &[u8]) -> Option<u64> {
    let page = String::from_utf8_lossy(page);
    let configs = page.lines().filter_map(|line| line.strip_prefix(CACHE_CONFIG));
    configs
        .filter_map(|labels| {
            let number = |name| label(labels, name)?.parse::<u64>().ok();
            number("num_gpu_blocks")?.checked_mul(number("block_size")?)
        })
        .reduce(u64::saturating_add)
}

/// Returns the value of the label `wanted`.
fn label<'a>(mut labels: &'a str, wanted: &str) -> Option<&'a str> {
    loop {
        let (name, rest) = labels.split_once("=\"")?;
        let (value, rest) = rest.split_once('"')?;
        if name.trim() == wanted {
            return Some(value);
        }
        labels = rest.trim_start_matches([',', ' ']);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line of vLLM 0.10, shortened.
    const LINE: &str = r#"vllm:cache_config_info{block_size="16",cache_dtype="auto",cpu_offload_gb="0",engine="0",num_cpu_blocks="None",num_gpu_blocks="27420",num_gpu_blocks_override="None",sliding_window="None"} 1.0"#;

    #[test]
    fn blocks_times_their_size() {
        let page = format!("# TYPE vllm:cache_config_info gauge\n{LINE}\nvllm:x 1\n");
        assert!(is_vllm(page.as_bytes()));
        assert_eq!(cache_tokens(page.as_bytes()), Some(27_420 * 16));
        let two = format!("{LINE}\n{}\n", LINE.replace("engine=\"0\"", "engine=\"1\""));
        assert_eq!(cache_tokens(two.as_bytes()), Some(2 * 27_420 * 16), "two ranks");
    }

    #[test]
    fn a_page_without_the_size_gives_none() {
        let unknown = LINE.replace("\"27420\"", "\"None\"");
        let huge = LINE.replace("27420", "18446744073709551615");
        for page in ["", "vllm:num_requests_running 0", &unknown, &huge, CACHE_CONFIG] {
            assert_eq!(cache_tokens(page.as_bytes()), None, "{page}");
        }
        assert!(!is_vllm(b"sglang:num_running_reqs 1\n# vllm:\n"));
    }
}
