//! The description of a worker by its source: the command line, a file, a cluster or a client.

use serde::Deserialize;

use crate::{config::ApiKey, names::WorkerUrl};

/// A worker to register.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerSpec {
    pub url: WorkerUrl,
    /// Key for requests to this worker; `--worker-api-key` if not given.
    #[serde(default)]
    pub api_key: Option<ApiKey>,
}

impl From<WorkerUrl> for WorkerSpec {
    fn from(url: WorkerUrl) -> Self {
        Self { url, api_key: None }
    }
}
