//! What a worker says of itself.

use serde::Deserialize;

use crate::names::ModelName;

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
    /// The same, to be compared.
    #[serde(skip)]
    names: Vec<ModelName>,
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
    fn every_listed_name_is_a_model() {
        let list = br#"{"object":"list","data":[{"id":"m","object":"model"},{"id":"m-lora"}]}"#;
        let info = WorkerInfo::default().with_models(list);
        assert_eq!(info.models, ["m", "m-lora"]);
        assert!(info.serves(ModelName::new("m-lora")));
        assert!(!info.serves(ModelName::new("n")));
    }
}
