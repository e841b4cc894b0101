//! The information that a worker reports about itself.

use serde::{Deserialize, Serialize};

use super::vllm;
use crate::names::ModelName;

/// The engine of a worker, recognised by its answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Runtime {
    /// A worker of this project.
    Mla,
    Sglang,
    Vllm,
}

/// The fields of `/get_server_info` and `/v1/models` that the router uses. Every field is optional: other engines
/// lack some.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct WorkerInfo {
    /// Random id of the process. Another id means an empty prefix cache.
    pub boot_id: Option<String>,
    /// Size of the KV cache in tokens. It bounds the worker's share of the tree.
    pub max_total_num_tokens: Option<u64>,
    /// Whether the engine computes a prefix once for all requests in its queue.
    #[serde(default)]
    pub in_batch_prefix_sharing: bool,
    /// Number of data-parallel ranks; each has a KV cache of that size.
    pub dp_size: Option<u32>,
    /// Number of workers that launch each step together, this one included.
    #[serde(default)]
    attn_dp_size: u32,
    /// `None` for an unknown engine.
    #[serde(skip)]
    pub runtime: Option<Runtime>,
    /// Names of its models; empty if it reports none.
    #[serde(skip)]
    pub models: Vec<String>,
    /// Hashes of these names.
    #[serde(skip)]
    names: Vec<ModelName>,
}

impl WorkerInfo {
    /// Parses a body of `/get_server_info`. For a malformed body all fields are empty.
    pub fn parse(body: &[u8]) -> Self {
        let mut info: Self = serde_json::from_slice(body).unwrap_or_default();
        info.runtime = match (&info.boot_id, info.max_total_num_tokens) {
            (Some(_), _) => Some(Runtime::Mla),
            (None, Some(_)) => Some(Runtime::Sglang),
            (None, None) => None,
        };
        info
    }

    /// Whether a step lasts as long as the longest one of a group of workers (DP attention).
    pub fn shares_steps(&self) -> bool {
        self.attn_dp_size > 1
    }

    /// Adds the size of the KV cache from a page of vLLM's `/metrics`. Other pages change nothing.
    #[must_use]
    pub fn with_metrics(mut self, page: &[u8]) -> Self {
        if vllm::is_vllm(page) {
            self.runtime = Some(Runtime::Vllm);
            self.max_total_num_tokens = vllm::cache_tokens(page);
        }
        self
    }

    /// Adds the model names from a body of `/v1/models`.
    #[must_use]
    pub fn with_models(mut self, body: &[u8]) -> Self {
        let list: ModelList = serde_json::from_slice(body).unwrap_or_default();
        self.models = list.data.into_iter().map(|model| model.id).collect();
        self.names = self.models.iter().map(|name| ModelName::new(name)).collect();
        self
    }

    /// Whether some request could go to both workers: they share a model, or one of them reports none.
    pub fn shares_model(&self, other: &Self) -> bool {
        let (names, others) = (&self.names, &other.names);
        names.is_empty() || others.is_empty() || names.iter().any(|name| others.contains(name))
    }

    /// Whether the worker reports this model.
    pub fn serves(&self, model: ModelName) -> bool {
        self.names.contains(&model)
    }
}

#[derive(Default, Deserialize)]
struct ModelList {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_malformed_body_has_no_fields() {
        let ours = WorkerInfo::parse(br#"{"boot_id":"a","max_total_num_tokens":9,"x":[]}"#);
        assert_eq!((ours.boot_id.as_deref(), ours.max_total_num_tokens), (Some("a"), Some(9)));
        for body in [&b""[..], b"{}", b"[]", b"not json", br#"{"boot_id":1}"#] {
            assert_eq!(WorkerInfo::parse(body).with_models(body), WorkerInfo::default());
        }
    }

    #[test]
    fn the_engine_is_recognised_by_its_fields() {
        let of = |info: &str, metrics: &str| {
            WorkerInfo::parse(info.as_bytes()).with_metrics(metrics.as_bytes()).runtime
        };
        assert_eq!(of(r#"{"boot_id":"a","max_total_num_tokens":9}"#, ""), Some(Runtime::Mla));
        assert_eq!(of(r#"{"max_total_num_tokens":9}"#, ""), Some(Runtime::Sglang));
        assert_eq!(of("", "# HELP\nvllm:num_requests_running 0\n"), Some(Runtime::Vllm));
        assert_eq!(of("{}", "up 1\n"), None);
    }

    #[test]
    fn dp_ranks_share_their_steps() {
        let of = |size: &str| {
            let body = format!(r#"{{"boot_id":"a","max_total_num_tokens":9{size}}}"#);
            WorkerInfo::parse(body.as_bytes()).shares_steps()
        };
        assert_eq!(
            ["", r#","attn_dp_size":1"#, r#","attn_dp_size":8"#].map(of),
            [false, false, true]
        );
    }

    #[test]
    fn every_listed_name_is_a_model() {
        let list = br#"{"object":"list","data":[{"id":"m","object":"model"},{"id":"m-lora"}]}"#;
        let info = WorkerInfo::default().with_models(list);
        assert_eq!(info.models, ["m", "m-lora"]);
        assert!(info.serves(ModelName::new("m-lora")));
        assert!(!info.serves(ModelName::new("n")));
    }
}
