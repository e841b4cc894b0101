//! The name of a model, as requests and workers say it.

use xxhash_rust::xxh3::xxh3_64;

/// By its hash: compared, and shown by nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelName(u64);

impl ModelName {
    pub fn new(name: &str) -> Self {
        Self(xxh3_64(name.as_bytes()))
    }
}
