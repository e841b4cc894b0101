//! What a worker says of itself.

use serde::{Deserialize, Serialize};

use crate::{fleet::cache_config, names::ModelName};

/// The server behind a worker's URL, as far as its answers tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Runtime {
    /// A worker of this project, which says more than the others.
    Mla,
    Sglang,
    Vllm,
}

/// What `/get_server_info` and `/v1/models` say that the router uses. Every field is optional: other
/// engines lack some.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct WorkerInfo {
    /// Random per process start: another one means an empty prefix cache.
    pub boot_id: Option<String>,
    /// Size of the worker's KV cache, and so of its share of the tree.
    pub max_total_num_tokens: Option<u64>,
    /// A prefix that several requests in its queue need is computed once.
    #[serde(default)]
    pub in_batch_prefix_sharing: bool,
    /// `None` if it is none of those that the router knows.
    #[serde(skip)]
    pub runtime: Option<Runtime>,
    /// The names under which it serves models; empty if it does not say.
    #[serde(skip)]
    pub models: Vec<String>,
    /// The same, to be compared.
    #[serde(skip)]
    names: Vec<ModelName>,
}

impl WorkerInfo {
    /// Reads an answer of `/get_server_info`. What cannot be read counts as not said.
    pub fn parse(body: &[u8]) -> Self {
        let mut info: Self = serde_json::from_slice(body).unwrap_or_default();
        info.runtime = match (&info.boot_id, info.max_total_num_tokens) {
            (Some(_), _) => Some(Runtime::Mla),
            (None, Some(_)) => Some(Runtime::Sglang),
            (None, None) => None,
        };
        info
    }

    /// With what vLLM's `/metrics` say of its KV cache.
    #[must_use]
    pub fn with_metrics(mut self, page: &[u8]) -> Self {
        if cache_config::is_vllm(page) {
            self.runtime = Some(Runtime::Vllm);
            self.max_total_num_tokens = cache_config::vllm_tokens(page);
        }
        self
    }

    /// With the names in an answer of `/v1/models`.
    #[must_use]
    pub fn with_models(mut self, body: &[u8]) -> Self {
        let list: ModelList = serde_json::from_slice(body).unwrap_or_default();
        self.models = list.data.into_iter().map(|model| model.id).collect();
        self.names = self.models.iter().map(|name| ModelName::new(name)).collect();
        self
    }

    /// Whether some request could go to either of two workers, as far as they say.
    pub fn shares_model(&self, other: &Self) -> bool {
        let (names, others) = (&self.names, &other.names);
        names.is_empty() || others.is_empty() || names.iter().any(|name| others.contains(name))
    }

    /// Whether it says so.
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
    fn what_is_not_said_is_not_known() {
        let ours = WorkerInfo::parse(br#"{"boot_id":"a","max_total_num_tokens":9,"x":[]}"#);
        assert_eq!((ours.boot_id.as_deref(), ours.max_total_num_tokens), (Some("a"), Some(9)));
        for body in [&b""[..], b"{}", b"[]", b"not json", br#"{"boot_id":1}"#] {
            assert_eq!(WorkerInfo::parse(body).with_models(body), WorkerInfo::default());
        }
    }

    #[test]
    fn the_runtime_is_known_by_what_it_says() {
        let of = |info: &str, metrics: &str| {
            WorkerInfo::parse(info.as_bytes()).with_metrics(metrics.as_bytes()).runtime
        };
        assert_eq!(of(r#"{"boot_id":"a","max_total_num_tokens":9}"#, ""), Some(Runtime::Mla));
        assert_eq!(of(r#"{"max_total_num_tokens":9}"#, ""), Some(Runtime::Sglang));
        assert_eq!(of("", "# HELP\nvllm:num_requests_running 0\n"), Some(Runtime::Vllm));
        assert_eq!(of("{}", "up 1\n"), None);
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
