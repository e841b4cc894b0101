//! What a worker says of itself.

use serde::Deserialize;

/// What `/get_server_info` and `/v1/models` say that the router uses. Every field is optional: other
/// engines lack some.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct WorkerInfo {
    /// Random per process start: another one means an empty prefix cache.
    pub boot_id: Option<String>,
    /// Size of the worker's KV cache, and so of its share of the tree.
    pub max_total_num_tokens: Option<u64>,
    /// The names under which it serves models; empty if it does not say.
    #[serde(skip)]
    pub models: Vec<String>,
}

impl WorkerInfo {
    /// What cannot be read counts as not said.
    pub fn parse(body: &[u8]) -> Self {
        serde_json::from_slice(body).unwrap_or_default()
    }

    /// With the names in an answer of `/v1/models`.
    #[must_use]
    pub fn with_models(mut self, body: &[u8]) -> Self {
        let list: ModelList = serde_json::from_slice(body).unwrap_or_default();
        self.models = list.data.into_iter().map(|model| model.id).collect();
        self
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
    fn every_listed_name_is_a_model() {
        let list = br#"{"object":"list","data":[{"id":"m","object":"model"},{"id":"m-lora"}]}"#;
        assert_eq!(WorkerInfo::default().with_models(list).models, ["m", "m-lora"]);
    }
}
