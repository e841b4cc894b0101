//! Reads the prompt of a body in the order in which the engine reads it.
//!
//! The router does not know the chat template, and does not need it: two prompts share a prefix under any template
//! if they share tools and leading messages. Control characters mark the places where the template writes its own
//! text, so that text cannot move from one role to another without a change of the hash.

use memchr::memchr_iter;
use xxhash_rust::xxh3::Xxh3;

use super::{
    KeyError,
    blocks::Blocks,
    json::{Cursor, Text, canonical},
};

/// The name of a body field, for errors.
type Name = &'static str;

const MESSAGES: Name = "messages";
const INPUT: Name = "input";
const INSTRUCTIONS: Name = "instructions";
const SYSTEM: Name = "system";

const TOOLS: &[u8] = b"\x1d";
const ROLE: &[u8] = b"\x1e";
const CONTENT: &[u8] = b"\x1f";
const CALLS: &[u8] = b"\x1c";
const MEDIA: &[u8] = b"\x1b";

/// Separator of the parts of the root. UTF-8 text never has this byte.
const SEPARATOR: &[u8] = b"\xff";

/// Pushes tools and messages.
pub(super) fn chat(
    tools: Option<&[u8]>,
    messages: &[u8],
    blocks: &mut Blocks,
) -> Result<(), KeyError> {
    self::messages(tools, None, messages, blocks)
}

/// Pushes tools, system prompt and messages of the Messages API, with the same result as for the same chat.
pub(super) fn messages(
    tools: Option<&[u8]>,
    system: Option<&[u8]>,
    messages: &[u8],
    blocks: &mut Blocks,
) -> Result<(), KeyError> {
    push_tools(tools, blocks)?;
    if let Some(system) = system {
        push_role(b"system", blocks);
        content(system, SYSTEM, blocks)?;
    }
    opening(messages, b'[', MESSAGES)?.array(|item| message(item, MESSAGES, blocks))
}

/// Pushes tools, instructions and input of the Responses API, with the same result as for the same chat.
pub(super) fn responses(
    tools: Option<&[u8]>,
    instructions: Option<&[u8]>,
    input: &[u8],
    blocks: &mut Blocks,
) -> Result<(), KeyError> {
    push_tools(tools, blocks)?;
    if let Some(instructions) = instructions {
        push_role(b"system", blocks);
        content(instructions, INSTRUCTIONS, blocks)?;
    }
    if input[0] == b'"' {
        push_role(b"user", blocks);
        return text(input, INPUT, blocks);
    }
    opening(input, b'[', INPUT)?.array(|item| message(item, INPUT, blocks))
}

fn push_tools(tools: Option<&[u8]>, blocks: &mut Blocks) -> Result<(), KeyError> {
    let Some(tools) = tools else {
        return Ok(());
    };
    blocks.push(TOOLS);
    canonical(tools, |bytes| blocks.push(bytes))
}

/// Pushes the role of a message without a name.
fn push_role(role: &[u8], blocks: &mut Blocks) {
    blocks.push(ROLE);
    blocks.push(role);
    blocks.push(ROLE);
    blocks.push(CONTENT);
}

/// Pushes a message of a chat, or an item of the input of the Responses API, which may also be a tool call or its
/// output, without a role.
fn message(item: &mut Cursor<'_>, field: Name, blocks: &mut Blocks) -> Result<(), KeyError> {
    if item.peek() != Some(b'{') {
        return Err(KeyError::Unreadable(field));
    }
    let start = item.at();
    let (mut role, mut name, mut words, mut calls) = (None, None, None, None);
    item.object(|field, value| {
        let slot = match field {
            b"role" => &mut role,
            b"name" => &mut name,
            b"content" => &mut words,
            b"tool_calls" => &mut calls,
            _ => return Ok(()),
        };
        *slot = Some(value).filter(|value| *value != b"null");
        Ok(())
    })?;
    if role.is_none() && words.is_none() && calls.is_none() {
        blocks.push(CALLS);
        return canonical(item.since(start), |bytes| blocks.push(bytes));
    }
    for value in [role, name] {
        blocks.push(ROLE);
        if let Some(value) = value {
            text(value, field, blocks)?;
        }
    }
    blocks.push(CONTENT);
    if let Some(value) = words {
        content(value, field, blocks)?;
    }
    if let Some(value) = calls {
        blocks.push(CALLS);
        canonical(value, |bytes| blocks.push(bytes))?;
    }
    Ok(())
}

/// Pushes content: text, or a list of parts.
fn content(value: &[u8], field: Name, blocks: &mut Blocks) -> Result<(), KeyError> {
    match value[0] {
        b'"' => text(value, field, blocks),
        _ => opening(value, b'[', field)?.array(|item| part(item.value()?, field, blocks)),
    }
}

/// Pushes one part of a content list: text as it is, so that it equals the same content as a string, and media
/// (image, video, audio) by the hash of their data.
fn part(value: &[u8], field: Name, blocks: &mut Blocks) -> Result<(), KeyError> {
    if value[0] == b'"' {
        return text(value, field, blocks);
    }
    let (mut words, mut media) = (None, 0_u64);
    opening(value, b'{', field)?.object(|field, value| {
        match field {
            b"text" => words = Some(value).filter(|value| *value != b"null"),
            b"type" | b"cache_control" => {}
            _ => {
                let mut hasher = Xxh3::new();
                hasher.update(field);
                canonical(value, |bytes| hasher.update(bytes))?;
                // A sum, so that the order of the fields does not matter.
                media = media.wrapping_add(hasher.digest());
            }
        }
        Ok(())
    })?;
    if let Some(value) = words {
        return text(value, field, blocks);
    }
    blocks.push(MEDIA);
    blocks.push_media(media);
    Ok(())
}

/// The kind of a prompt. It is part of the root: text and ids never share blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Ids,
}

impl Kind {
    /// Bytes of one unit, a byte or an id, in a block.
    pub(super) fn unit(self) -> usize {
        match self {
            Self::Text => 1,
            Self::Ids => 4,
        }
    }
}

/// A prompt that is not a chat: text, token ids, or a batch of either.
pub(super) struct Plain<'a> {
    pub(super) kind: Kind,
    /// The prompt, or the first one of a batch. A batch goes to one worker, and its prompts share a prefix with the
    /// first one.
    pub(super) first: &'a [u8],
    /// Length of the other prompts of a batch: bytes of text, with escapes, or ids.
    pub(super) others: usize,
    /// Number of prompts.
    pub(super) prompts: usize,
}

/// Determines the kind of the prompt `value` of the field `field`. Fails if it is neither text nor ids.
pub(super) fn plain<'a>(value: &'a [u8], field: Name) -> Result<Plain<'a>, KeyError> {
    let one = |kind, first| Plain { kind, first, others: 0, prompts: 1 };
    match (value[0], Cursor::new(&value[1..]).peek()) {
        (b'"', _) => return Ok(one(Kind::Text, value)),
        (b'[', Some(b'0'..=b'9')) => return Ok(one(Kind::Ids, value)),
        (b'[', Some(b'"' | b'[')) => {}
        _ => return Err(KeyError::Unreadable(field)),
    }
    let mut prompt: Option<Plain<'a>> = None;
    Cursor::new(value).array(|item| {
        let is_text = item.peek() == Some(b'"');
        let value = item.value()?;
        if let Some(prompt) = &mut prompt {
            prompt.prompts += 1;
            prompt.others += match prompt.kind {
                Kind::Text => value.len(),
                Kind::Ids => memchr_iter(b',', value).count() + 1,
            };
        } else {
            let kind = if is_text { Kind::Text } else { Kind::Ids };
            prompt = Some(one(kind, value));
        }
        Ok(())
    })?;
    prompt.ok_or(KeyError::Unreadable(field))
}

/// Pushes the decoded text of a string.
pub(super) fn text(value: &[u8], field: Name, blocks: &mut Blocks) -> Result<(), KeyError> {
    let text = Text::of(value).ok_or(KeyError::Unreadable(field))?;
    text.decode(|bytes| blocks.push(bytes))
}

/// Pushes each token id as four bytes.
pub(super) fn ids(value: &[u8], field: Name, blocks: &mut Blocks) -> Result<(), KeyError> {
    opening(value, b'[', field)?.array(|item| {
        let id = item.id().ok_or(KeyError::Unreadable(field))?;
        blocks.push_id(id);
        Ok(())
    })
}

/// Returns a cursor on `value`. Fails unless it starts with `byte`.
fn opening(value: &[u8], byte: u8, field: Name) -> Result<Cursor<'_>, KeyError> {
    match value.first() {
        Some(first) if *first == byte => Ok(Cursor::new(value)),
        _ => Err(KeyError::Unreadable(field)),
    }
}

/// Hash of everything except the prompt that must be equal for two requests to share cached blocks.
pub(super) fn root(kind: Kind, parts: &[Option<&[u8]>]) -> Result<u64, KeyError> {
    let mut hasher = Xxh3::new();
    hasher.update(match kind {
        Kind::Ids => b"ids".as_slice(),
        Kind::Text => b"text",
    });
    for part in parts {
        hasher.update(SEPARATOR);
        canonical(part.unwrap_or_default(), |bytes| hasher.update(bytes))?;
    }
    Ok(hasher.digest())
}
