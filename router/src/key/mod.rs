//! The routing key: the prompt of a request in the order in which the engine reads it.
//!
//! Model, adapter, cache salt and extra key form the root. Below it come the tools, then role and content of each
//! message, or the bare prompt. They are cut into blocks of 64 bytes, or of 16 token ids, and the hash of each
//! block covers all blocks before it. So two requests share exactly the blocks of their common prefix. The body is
//! scanned in place and forwarded unchanged.

mod blocks;
pub(crate) mod json;
mod prompt;

use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

pub use blocks::BLOCK_BYTES;
use blocks::Blocks;
use json::{Cursor, Text};
use prompt::Kind;

use crate::names::ModelName;

/// Maximum number of completions that the load of a request counts. Engines refuse requests with as many.
const MAX_ANSWERS: u32 = 1 << 12;

/// Tokens in a block: exact for token ids, four bytes a token for text.
pub const BLOCK_TOKENS: u32 = 16;

/// The place of the prompt in the body, by endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    ChatCompletions,
    Completions,
    Generate,
    Responses,
    Messages,
    Other,
}

/// The routing key of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts of one body")]
pub struct RouteKey {
    /// Hash of model, adapter, cache salt and extra key. The hashes of the blocks cover it.
    pub root: u64,
    /// Chained hashes of the blocks.
    pub blocks: Vec<u64>,
    /// Whether `stream` is true.
    pub stream: bool,
    /// Whether `stream` is neither true nor false, such as `1`. Engines differ on such values.
    pub stream_unclear: bool,
    /// Whether the body has the field `continuation`, which only a router may add.
    pub continues: bool,
    /// Whether the body has the field `stream_options`.
    pub has_stream_options: bool,
    /// Number of completions minus one: `n` for each prompt of a batch.
    pub more_answers: u32,
    /// Hash of the client's session: the body's `user`. The header `x-mla-session` replaces it.
    pub session: Option<u64>,
    /// Length of the prompt in bytes of decoded text, or in token ids; summed over a batch.
    pub prompt_len: usize,
    /// Estimated length of the prompt in tokens.
    pub prompt_tokens: u64,
    /// Quality of this estimate.
    pub measure: Measure,
}

/// The quality of an estimated prompt length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Measure {
    /// Four bytes a token.
    #[default]
    Text,
    /// Exact: counted token ids.
    Ids,
    /// Not comparable with the count of a worker: a batch, images, or text that the body only refers to.
    Unknown,
}

/// Why a body has no key. The request is forwarded anyway: the worker validates it.
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

/// The raw values of the fields for the key; `null` counts as absent.
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
    system: Option<&'a [u8]>,
    messages: Option<&'a [u8]>,
    prompt: Option<&'a [u8]>,
    text: Option<&'a [u8]>,
    input_ids: Option<&'a [u8]>,
    images: Option<&'a [u8]>,
    videos: Option<&'a [u8]>,
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
                b"system" => &mut fields.system,
                b"messages" => &mut fields.messages,
                b"prompt" => &mut fields.prompt,
                b"text" => &mut fields.text,
                b"input_ids" => &mut fields.input_ids,
                b"image_data" => &mut fields.images,
                b"video_data" => &mut fields.videos,
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
            // The last of several fields of one name counts, as in Python's parser.
            *slot = Some(value).filter(|value| *value != b"null");
            Ok(())
        })?;
        Ok(fields)
    }

    /// Number of completions of `prompts` prompts, minus one.
    fn more_answers(&self, prompts: usize) -> u32 {
        let n = self.n.and_then(|n| str::from_utf8(n).ok()?.parse::<u32>().ok()).unwrap_or(1);
        let prompts = u32::try_from(prompts).unwrap_or(u32::MAX);
        n.max(1).saturating_mul(prompts).min(MAX_ANSWERS) - 1
    }

    fn root(&self, kind: Kind) -> Result<u64, KeyError> {
        prompt::root(kind, &[self.model, self.adapter, self.salt, self.extra_key])
    }

    /// The tools that the engine puts into the prompt.
    fn prompt_tools(&self) -> Option<&'a [u8]> {
        self.tools.filter(|_| self.choice != Some(b"\"none\""))
    }

    /// Fields by which the Responses API refers to text that the engine puts before the input.
    fn references(&self) -> [Option<&'a [u8]>; 3] {
        [self.previous, self.conversation, self.prompt]
    }

    /// The root of a request with a bare prompt. Only the engine's model knows the places of its images in the text, so
    /// prompts with other images share nothing.
    fn root_of_plain(&self, kind: Kind) -> Result<u64, KeyError> {
        let mut parts = vec![self.model, self.adapter, self.salt, self.extra_key];
        if self.has_media() {
            parts.extend([self.images, self.videos]);
        }
        prompt::root(kind, &parts)
    }

    fn has_media(&self) -> bool {
        self.images.is_some() || self.videos.is_some()
    }

    /// The root of a request to the Responses API. Without references it equals the root of the same chat.
    fn root_of_responses(&self) -> Result<u64, KeyError> {
        let mut parts = vec![self.model, self.adapter, self.salt, self.extra_key];
        if self.references().iter().any(Option::is_some) {
            parts.extend(self.references());
        }
        prompt::root(Kind::Text, &parts)
    }
}

/// The model in a body. `None` if the body is not an object or has no model.
pub fn model_of(body: &[u8]) -> Option<ModelName> {
    let name: String = serde_json::from_slice(Fields::scan(body).ok()?.model?).ok()?;
    Some(ModelName::new(&name))
}

/// The hash of a session name. An empty name is not a session, because all requests with it would share one.
pub fn session_of(name: &[u8]) -> Option<u64> {
    (!name.is_empty()).then(|| xxh3_64(name))
}

/// The session of the field `user`. The same name in the header gives the same session.
fn session_of_user(user: &[u8]) -> Option<u64> {
    let Some(text) = Text::of(user) else {
        return session_of(user);
    };
    let mut name = Vec::new();
    text.decode(|bytes| name.extend_from_slice(bytes)).ok()?;
    session_of(&name)
}

impl RouteKey {
    /// Reads the key of `body`. Fails if the body has no readable prompt.
    pub fn extract(route: Route, body: &[u8]) -> Result<Self, KeyError> {
        let fields = Fields::scan(body)?;
        let (value, name) = match route {
            Route::ChatCompletions => return Self::of_chat(&fields),
            Route::Responses => return Self::of_responses(&fields),
            Route::Messages => return Self::of_messages(&fields),
            Route::Completions => (fields.prompt, "prompt"),
            Route::Generate if fields.input_ids.is_some() => (fields.input_ids, "input_ids"),
            Route::Generate => (fields.text, "text"),
            Route::Other => return Err(KeyError::NoPrompt),
        };
        let plain = prompt::plain(value.ok_or(KeyError::Missing(name))?, name)?;
        let root = fields.root_of_plain(plain.kind)?;
        let mut blocks = Blocks::new(root, plain.first.len());
        match plain.kind {
            Kind::Text => prompt::text(plain.first, name, &mut blocks)?,
            Kind::Ids => prompt::ids(plain.first, name, &mut blocks)?,
        }
        let mut key = Self::new(&fields, root, blocks, plain.kind.unit());
        if plain.kind == Kind::Ids {
            key.measure = Measure::Ids;
        }
        if fields.has_media() {
            key.measure = Measure::Unknown;
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
        prompt::chat(fields.prompt_tools(), messages, &mut blocks)?;
        Ok(Self::new(fields, root, blocks, 1))
    }

    fn of_messages(fields: &Fields<'_>) -> Result<Self, KeyError> {
        let messages = fields.messages.ok_or(KeyError::Missing("messages"))?;
        let root = fields.root(Kind::Text)?;
        let mut blocks = Blocks::new(root, messages.len());
        prompt::messages(fields.prompt_tools(), fields.system, messages, &mut blocks)?;
        Ok(Self::new(fields, root, blocks, 1))
    }

    fn of_responses(fields: &Fields<'_>) -> Result<Self, KeyError> {
        let input = fields.input.ok_or(KeyError::Missing("input"))?;
        let root = fields.root_of_responses()?;
        let mut blocks = Blocks::new(root, input.len());
        prompt::responses(fields.prompt_tools(), fields.instructions, input, &mut blocks)?;
        let mut key = Self::new(fields, root, blocks, 1);
        if fields.references().iter().any(Option::is_some) {
            key.measure = Measure::Unknown;
        }
        Ok(key)
    }

    /// Builds the key of a prompt whose units, bytes or ids, have `unit` bytes.
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

/// Number of tokens of `bytes` bytes of blocks.
fn tokens(bytes: usize) -> u64 {
    (bytes * BLOCK_TOKENS as usize / BLOCK_BYTES) as u64
}
