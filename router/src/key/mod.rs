//! The routing key: a request's prompt in the order in which the engine will see it.
//!
//! Model, adapter, cache salt and extra key are the root; below it come the tools, then each message's role
//! and content (or the bare prompt), cut in blocks of 64 bytes (token ids: of 16), each block
//! hashed with all before it. Two requests share exactly the blocks of the prefix that they share.
//! The body is read in place and forwarded as it came.

mod blocks;
pub(crate) mod json;
mod prompt;

use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

pub use blocks::BLOCK_BYTES;
use blocks::Blocks;
use json::Cursor;
use prompt::Kind;

use crate::names::ModelName;

/// More answers than one request is thought to ask for; engines refuse that many.
const MOST_ANSWERS: u32 = 1 << 12;

/// Tokens of a block: exact for ids, the usual four bytes a token for text.
pub const BLOCK_TOKENS: u32 = 16;

/// What the endpoint says about where the prompt lies in the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    ChatCompletions,
    Completions,
    Generate,
    Responses,
    Other,
}

/// The prompt as chained block hashes below a root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts of one body")]
pub struct RouteKey {
    /// Hash of model, adapter, cache salt and extra key. The first block's hash covers it, too.
    pub root: u64,
    pub blocks: Vec<u64>,
    /// What the body's `stream` says.
    pub stream: bool,
    /// It is neither true nor false, as `1` is: some engines take that for true, some refuse it.
    pub stream_unclear: bool,
    /// It has the field `continuation`, which only a router may add.
    pub continues: bool,
    /// It has the field `stream_options`, whatever that says.
    pub has_stream_options: bool,
    /// Answers that are asked for beyond the first: of each prompt of a batch, and of each as many as
    /// the body's `n` says.
    pub more_answers: u32,
    /// Hash of what names the client's session: the body's `user`, unless the request's head says
    /// something better.
    pub session: Option<u64>,
    /// Bytes of decoded text, or token ids; over all prompts of a batch.
    pub prompt_len: usize,
    /// The prompt's length in tokens, as near as a router without a tokenizer can tell,
    pub prompt_tokens: u64,
    /// and how near that is.
    pub measure: Measure,
}

/// What the router can tell of a prompt's length in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Measure {
    /// Four bytes to a token, as is usual.
    #[default]
    Text,
    /// Token ids, counted.
    Ids,
    /// A batch, images and the like among the text, or text that the body only names: not to be compared to what a worker
    /// counts.
    Unknown,
}

/// Why a body has no key. The request is still forwarded: validation is the worker's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum KeyError {
    #[error("the body is not a JSON object (byte {at})")]
    Malformed { at: usize },
    #[error("the body has a string with an invalid escape")]
    Escape,
    #[error("the body has no `{0}`")]
    Missing(&'static str),
    #[error("`{0}` holds neither text nor token ids")]
    Unreadable(&'static str),
    #[error("this endpoint has no prompt")]
    NoPrompt,
}

/// The fields that matter, as they stand in the body; `null` counts as absent.
#[derive(Default)]
struct Fields<'a> {
    model: Option<&'a [u8]>,
    adapter: Option<&'a [u8]>,
    salt: Option<&'a [u8]>,
    extra_key: Option<&'a [u8]>,
    stream: Option<&'a [u8]>,
    n: Option<&'a [u8]>,
    tools: Option<&'a [u8]>,
    choice: Option<&'a [u8]>,
    messages: Option<&'a [u8]>,
    prompt: Option<&'a [u8]>,
    text: Option<&'a [u8]>,
    input_ids: Option<&'a [u8]>,
    input: Option<&'a [u8]>,
    instructions: Option<&'a [u8]>,
    previous: Option<&'a [u8]>,
    conversation: Option<&'a [u8]>,
    user: Option<&'a [u8]>,
    continuation: Option<&'a [u8]>,
    has_stream_options: bool,
}

impl<'a> Fields<'a> {
    fn scan(body: &'a [u8]) -> Result<Self, KeyError> {
        let mut fields = Self::default();
        Cursor::new(body).object(|name, value| {
            let slot = match name {
                b"model" => &mut fields.model,
                b"lora_path" | b"lora" => &mut fields.adapter,
                b"cache_salt" => &mut fields.salt,
                b"extra_key" => &mut fields.extra_key,
                b"stream" => &mut fields.stream,
                b"n" => &mut fields.n,
                b"tools" => &mut fields.tools,
                b"tool_choice" => &mut fields.choice,
                b"messages" => &mut fields.messages,
                b"prompt" => &mut fields.prompt,
                b"text" => &mut fields.text,
                b"input_ids" => &mut fields.input_ids,
                b"input" => &mut fields.input,
                b"instructions" => &mut fields.instructions,
                b"previous_response_id" => &mut fields.previous,
                b"conversation" => &mut fields.conversation,
                b"user" => &mut fields.user,
                b"continuation" => &mut fields.continuation,
                b"stream_options" => {
                    fields.has_stream_options = true;
                    return Ok(());
                }
                _ => return Ok(()),
            };
            // The last of several fields of one name wins, as in Python's parser.
            *slot = Some(value).filter(|value| *value != b"null");
            Ok(())
        })?;
        Ok(fields)
    }

    /// Those beyond the first of all answers to so many prompts.
    fn more_answers(&self, prompts: usize) -> u32 {
        let n = self.n.and_then(|n| str::from_utf8(n).ok()?.parse::<u32>().ok()).unwrap_or(1);
        let prompts = u32::try_from(prompts).unwrap_or(u32::MAX);
        n.max(1).saturating_mul(prompts).min(MOST_ANSWERS) - 1
    }

    fn root(&self, kind: Kind) -> Result<u64, KeyError> {
        prompt::root(kind, &[self.model, self.adapter, self.salt, self.extra_key])
    }

    /// Those that the engine tells the model of.
    fn told_tools(&self) -> Option<&'a [u8]> {
        self.tools.filter(|_| self.choice != Some(b"\"none\""))
    }

    /// What the Responses API lets the engine put before the input and the body only names.
    fn named(&self) -> [Option<&'a [u8]>; 3] {
        [self.previous, self.conversation, self.prompt]
    }

    /// That of the chat that says the same, if nothing is only named.
    fn root_of_responses(&self) -> Result<u64, KeyError> {
        let mut parts = vec![self.model, self.adapter, self.salt, self.extra_key];
        if self.named().iter().any(Option::is_some) {
            parts.extend(self.named());
        }
        prompt::root(Kind::Text, &parts)
    }
}

/// The model that a body names, if it is an object that names one.
pub fn model_of(body: &[u8]) -> Option<ModelName> {
    let name: String = serde_json::from_slice(Fields::scan(body).ok()?.model?).ok()?;
    Some(ModelName::new(&name))
}

/// The hash of a session's name. Without a name there is no session, or all who send none would
/// share one.
pub fn session_of(name: &[u8]) -> Option<u64> {
    (!name.is_empty()).then(|| xxh3_64(name))
}

/// The session of a body's `user`, which in a request's head would be the same.
fn session_of_user(user: &[u8]) -> Option<u64> {
    if user[0] != b'"' {
        return session_of(user);
    }
    let mut name = Vec::new();
    Cursor::new(user).string().ok()?.decode(|bytes| name.extend_from_slice(bytes)).ok()?;
    session_of(&name)
}

impl RouteKey {
    /// Reads the key of `body`, whose prompt lies where `route` says.
    pub fn extract(route: Route, body: &[u8]) -> Result<Self, KeyError> {
        let fields = Fields::scan(body)?;
        let (value, name) = match route {
            Route::ChatCompletions => return Self::of_chat(&fields),
            Route::Responses => return Self::of_responses(&fields),
            Route::Completions => (fields.prompt, "prompt"),
            Route::Generate if fields.input_ids.is_some() => (fields.input_ids, "input_ids"),
            Route::Generate => (fields.text, "text"),
            Route::Other => return Err(KeyError::NoPrompt),
        };
        let plain = prompt::plain(value.ok_or(KeyError::Missing(name))?, name)?;
        let root = fields.root(plain.kind)?;
        let mut blocks = Blocks::new(root, plain.first.len());
        match plain.kind {
            Kind::Text => prompt::text(plain.first, name, &mut blocks)?,
            Kind::Ids => prompt::ids(plain.first, name, &mut blocks)?,
        }
        let mut key = Self::new(&fields, root, blocks, plain.kind.unit());
        if plain.kind == Kind::Ids {
            key.measure = Measure::Ids;
        }
        if plain.prompts > 1 {
            key.more_answers = fields.more_answers(plain.prompts);
        }
        if plain.others > 0 {
            key.measure = Measure::Unknown;
            key.prompt_len += plain.others;
            key.prompt_tokens = tokens(key.prompt_len * plain.kind.unit());
        }
        Ok(key)
    }

    fn of_chat(fields: &Fields<'_>) -> Result<Self, KeyError> {
        let messages = fields.messages.ok_or(KeyError::Missing("messages"))?;
        let root = fields.root(Kind::Text)?;
        let mut blocks = Blocks::new(root, messages.len());
        prompt::chat(fields.told_tools(), messages, &mut blocks)?;
        Ok(Self::new(fields, root, blocks, 1))
    }

    fn of_responses(fields: &Fields<'_>) -> Result<Self, KeyError> {
        let input = fields.input.ok_or(KeyError::Missing("input"))?;
        let root = fields.root_of_responses()?;
        let mut blocks = Blocks::new(root, input.len());
        prompt::responses(fields.told_tools(), fields.instructions, input, &mut blocks)?;
        let mut key = Self::new(fields, root, blocks, 1);
        if fields.named().iter().any(Option::is_some) {
            key.measure = Measure::Unknown;
        }
        Ok(key)
    }

    /// Of a prompt in units of `unit` bytes.
    fn new(fields: &Fields<'_>, root: u64, blocks: Blocks, unit: usize) -> Self {
        let (blocks, bytes, has_media) = blocks.finish();
        Self {
            root,
            blocks,
            stream: fields.stream == Some(b"true"),
            stream_unclear: fields
                .stream
                .is_some_and(|value| value != b"true" && value != b"false"),
            continues: fields.continuation.is_some(),
            has_stream_options: fields.has_stream_options,
            more_answers: fields.more_answers(1),
            session: fields.user.and_then(session_of_user),
            prompt_len: bytes / unit,
            prompt_tokens: tokens(bytes),
            measure: if has_media { Measure::Unknown } else { Measure::Text },
        }
    }
}

/// Tokens that so many bytes are, going by blocks.
fn tokens(bytes: usize) -> u64 {
    (bytes * BLOCK_TOKENS as usize / BLOCK_BYTES) as u64
}
