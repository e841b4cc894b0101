//! The routing key of a request body.

use thiserror::Error;

/// What the endpoint says about where the prompt lies in the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    ChatCompletions,
    Completions,
    Generate,
    Other,
}

/// The prompt as chained block hashes below a root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteKey {
    pub root: u64,
    pub blocks: Vec<u64>,
    pub block_tokens: u32,
    pub stream: bool,
    pub prompt_len: usize,
}

/// Why a body has no key.
#[derive(Debug, Error)]
pub enum KeyError {
    #[error("this endpoint has no prompt")]
    NoPrompt,
}

impl RouteKey {
    pub fn extract(_route: Route, _body: &[u8]) -> Result<Self, KeyError> {
        Err(KeyError::NoPrompt)
    }
}
