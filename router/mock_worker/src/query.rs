//! Parses requests of the three generating endpoints into one form.

use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

use crate::{settings::Flavour, tokens::encode};

/// Opens a message; text cannot have it.
const MESSAGE: &str = "\x1e\x1e\x1e\x1e";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Completions,
    Generate,
}

/// A parsed request.
#[derive(Debug)]
pub struct Query {
    pub endpoint: Endpoint,
    pub model: String,
    pub prompts: Vec<Vec<u32>>,
    /// Whether `prompts` was written as one prompt and not as a list of one.
    pub single: bool,
    /// Hash of cache salt and adapter.
    pub root: u64,
    pub seed: u64,
    /// Token limit of each answer; `None` for its natural end.
    pub max_tokens: Option<usize>,
    pub stream: bool,
    pub wants_usage: bool,
    /// The request id of the client.
    pub name: Option<String>,
    pub continuation: Option<Continuation>,
}

/// The continuation of another worker's stream.
#[derive(Debug, Deserialize)]
pub struct Continuation {
    /// The header `x-mla-replay` of its response.
    pub response: String,
    pub choices: Vec<Begun>,
}

/// The state of one choice.
#[derive(Debug, Default, Deserialize)]
pub struct Begun {
    pub token_ids: Vec<u32>,
    pub finish_reason: Option<String>,
}

#[derive(Debug, Error)]
pub enum QueryError {
    #[error("not JSON of the expected form: {0}")]
    Json(#[from] serde_json::Error),
    #[error("{0}")]
    Invalid(&'static str),
}

#[derive(Deserialize)]
struct Body {
    model: Option<String>,
    messages: Option<Vec<Message>>,
    tools: Option<Value>,
    prompt: Option<Prompts>,
    text: Option<Prompts>,
    input_ids: Option<Prompts>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    seed: Option<u64>,
    sampling_params: Option<Sampling>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    cache_salt: Option<String>,
    lora_path: Option<String>,
    rid: Option<String>,
    continuation: Option<Continuation>,
}

#[derive(Default, Deserialize)]
struct Sampling {
    max_new_tokens: Option<usize>,
    sampling_seed: Option<u64>,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: Option<Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompts {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
    IdLists(Vec<Vec<u32>>),
}

impl Query {
    pub fn read(endpoint: Endpoint, body: &[u8], flavour: Flavour) -> Result<Self, QueryError> {
        let body: Body = serde_json::from_slice(body)?;
        let (prompts, single) = match endpoint {
            Endpoint::Chat => {
                let messages = body.messages.ok_or(QueryError::Invalid("messages: missing"))?;
                (vec![chat(&messages, body.tools.as_ref())], true)
            }
            Endpoint::Completions => list(body.prompt)?,
            Endpoint::Generate => list(body.text.or(body.input_ids))?,
        };
        if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
            return Err(QueryError::Invalid("the prompt is empty"));
        }
        let (max_tokens, seed) = match endpoint {
            Endpoint::Chat => (body.max_completion_tokens.or(body.max_tokens), body.seed),
            Endpoint::Completions => (body.max_tokens.or(Some(16)), body.seed),
            Endpoint::Generate => {
                let sampling = body.sampling_params.unwrap_or_default();
                (sampling.max_new_tokens.or(Some(128)), sampling.sampling_seed)
            }
        };
        if max_tokens == Some(0) {
            return Err(QueryError::Invalid("max_tokens: at least 1"));
        }
        let continuation = body.continuation.filter(|_| flavour == Flavour::Mla);
        if continuation.as_ref().is_some_and(|begun| begun.choices.len() > prompts.len()) {
            return Err(QueryError::Invalid("continuation: more choices than prompts"));
        }
        let separate = (body.cache_salt, body.lora_path);
        Ok(Self {
            endpoint,
            model: body.model.unwrap_or_default(),
            prompts,
            single,
            root: match separate {
                (None, None) => 0,
                _ => xxh3_64(format!("{separate:?}").as_bytes()),
            },
            seed: seed.unwrap_or(0),
            max_tokens,
            stream: body.stream.unwrap_or(false),
            wants_usage: body.stream_options.and_then(|o| o.include_usage).unwrap_or(false),
            name: body.rid,
            continuation,
        })
    }
}

/// The chat template: a token for each role, and contents padded to whole tokens, so that an answer has the same
/// tokens when it comes back as a message.
fn chat(messages: &[Message], tools: Option<&Value>) -> Vec<u32> {
    let mut tokens = Vec::new();
    if let Some(tools) = tools {
        tokens.extend(encode(&tools.to_string()));
    }
    for message in messages {
        tokens.extend(role(&message.role));
        match &message.content {
            Some(Value::String(text)) => tokens.extend(encode(text)),
            Some(Value::Array(parts)) => {
                for part in parts {
                    match &part["text"] {
                        Value::String(text) => tokens.extend(encode(text)),
                        _ => tokens.extend(encode(&part.to_string())),
                    }
                }
            }
            _ => {}
        }
    }
    tokens.extend(role("assistant"));
    tokens
}

fn role(name: &str) -> impl Iterator<Item = u32> + '_ {
    encode(MESSAGE).chain(encode(name))
}

fn list(prompts: Option<Prompts>) -> Result<(Vec<Vec<u32>>, bool), QueryError> {
    let prompts = prompts.ok_or(QueryError::Invalid("the prompt is missing"))?;
    Ok(match prompts {
        Prompts::Text(text) => (vec![encode(&text).collect()], true),
        Prompts::Ids(ids) => (vec![ids], true),
        Prompts::Texts(texts) => (texts.iter().map(|text| encode(text).collect()).collect(), false),
        Prompts::IdLists(lists) => (lists, false),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(endpoint: Endpoint, body: &str) -> Result<Query, QueryError> {
        Query::read(endpoint, body.as_bytes(), Flavour::Mla)
    }

    #[test]
    fn a_chat_begins_with_the_chat_before_it_and_its_answer() {
        let first = r#"{"messages": [{"role": "user", "content": "hello"}]}"#;
        let first = read(Endpoint::Chat, first).expect("valid").prompts.remove(0);
        let second = r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": "abc def "}, {"role": "user", "content": "more"}]}"#;
        let second = read(Endpoint::Chat, second).expect("valid").prompts.remove(0);
        let history = [first, encode("abc def ").collect()].concat();
        assert_eq!(second[..history.len()], history);
    }

    #[test]
    fn prompts_are_text_or_ids_alone_or_in_lists() {
        for (prompt, count, single) in [
            (r#""abcdefgh""#, 1, true),
            ("[7, 8]", 1, true),
            (r#"["abcd", "efgh"]"#, 2, false),
            ("[[7], [8]]", 2, false),
        ] {
            let body = format!(r#"{{"prompt": {prompt}}}"#);
            let query = read(Endpoint::Completions, &body).expect("valid");
            assert_eq!((query.prompts.len(), query.single), (count, single), "{prompt}");
        }
        for body in ["{}", r#"{"prompt": ""}"#, r#"{"prompt": []}"#, "{", r#"{"prompt": {}}"#] {
            assert!(read(Endpoint::Completions, body).is_err(), "{body}");
        }
    }

    #[test]
    fn salt_separates_caches() {
        let plain = read(Endpoint::Generate, r#"{"text": "abcd"}"#).expect("valid");
        let salted = read(Endpoint::Generate, r#"{"text": "abcd", "cache_salt": "a"}"#);
        assert_ne!(plain.root, salted.expect("valid").root);
        assert_eq!(plain.root, 0);
    }
}
