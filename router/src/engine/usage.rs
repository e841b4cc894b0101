//! The token counts of an answer, found without parsing the answer: prompt tokens, and cached prompt tokens.
//!
//! The counts are in OpenAI's `usage` (SGLang, vLLM, this project) or in the `meta_info` of SGLang's `/generate`.
//! Generated text cannot contain these names with their quotes: a quote within a JSON string has a backslash before it.

use std::sync::LazyLock;

use memchr::memmem::{self, Finder};

use crate::{correct::Usage, key::json::Cursor};

static USAGE: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"\"usage\""));
static META_INFO: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"\"meta_info\""));

/// Returns the `usage` of an event or of a whole body.
pub(crate) fn of_openai(json: &[u8]) -> Option<Usage> {
    // Before the last chunk, `usage` is null or missing.
    USAGE.find_iter(json).find_map(|at| object_after(&json[at + USAGE.needle().len()..]))
}

/// Returns the `meta_info` of an event or of a whole body. For the body of a batch it is the sum over the prompts. For
/// an event of a batch it is `None`: the event concerns one prompt only.
pub(crate) fn of_generate(json: &[u8]) -> Option<Usage> {
    let batch = json.trim_ascii_start().first() == Some(&b'[');
    let mut sum: Option<Usage> = None;
    for at in META_INFO.find_iter(json) {
        let rest = &json[at + META_INFO.needle().len()..];
        let usage = object_after(rest)?;
        if !batch {
            return is_single(rest).then_some(usage);
        }
        sum = Some(match sum {
            None => usage,
            Some(sum) => Usage {
                prompt_tokens: plus(sum.prompt_tokens, usage.prompt_tokens),
                cached_tokens: plus(sum.cached_tokens, usage.cached_tokens),
            },
        });
    }
    sum
}

/// Adds two counts. `None` if one is unknown.
fn plus(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    one.zip(other).map(|(one, other)| one + other)
}

/// Reads the object that follows a name and its colon.
fn object_after(rest: &[u8]) -> Option<Usage> {
    let value = rest.trim_ascii_start().strip_prefix(b":")?;
    let (mut prompt, mut cached) = (None, None);
    let (mut from_cache, mut to_cache) = (None, None);
    let read = Cursor::new(value).object(|name, value| {
        match name {
            // The Responses API has other names.
            b"prompt_tokens" | b"input_tokens" => prompt = Cursor::new(value).id(),
            b"cached_tokens" => cached = Cursor::new(value).id(),
            // The Messages API counts these apart from its input_tokens.
            b"cache_read_input_tokens" => from_cache = Cursor::new(value).id(),
            b"cache_creation_input_tokens" => to_cache = Cursor::new(value).id(),
            b"prompt_tokens_details" | b"input_tokens_details" if value.starts_with(b"{") => {
                Cursor::new(value).object(|name, value| {
                    if name == b"cached_tokens" {
                        cached = Cursor::new(value).id();
                    }
                    Ok(())
                })?;
            }
            _ => {}
        }
        Ok(())
    });
    read.ok()?;
    if let Some(tokens) = from_cache {
        cached = from_cache;
        prompt = prompt.map(|prompt: u32| prompt.saturating_add(tokens));
    }
    prompt = prompt.map(|prompt| prompt.saturating_add(to_cache.unwrap_or(0)));
    let usage =
        Usage { prompt_tokens: prompt.map(u64::from), cached_tokens: cached.map(u64::from) };
    (usage != Usage::default()).then_some(usage)
}

/// Whether an event of `/generate` concerns the whole request. Events of a batch have an index after the `meta_info`.
fn is_single(rest: &[u8]) -> bool {
    memmem::find(rest, b"\"index\":").is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage_of(prompt_tokens: u64, cached_tokens: impl Into<Option<u64>>) -> Usage {
        Usage { prompt_tokens: Some(prompt_tokens), cached_tokens: cached_tokens.into() }
    }

    #[test]
    fn usage_of_every_engine() {
        for (answer, usage) in [
            // SGLang 0.5, a body and the last chunk with --enable-cache-report
            (
                r#"{"id":"x","choices":[],"usage":{"prompt_tokens":31,"total_tokens":41,"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":16},"reasoning_tokens":0},"metadata":{"weight_version":"default"}}"#,
                Some(usage_of(31, 16)),
            ),
            // and without
            (
                r#"data: {"choices":[],"usage":{"prompt_tokens":31,"total_tokens":41,"completion_tokens":10,"prompt_tokens_details":null}}"#,
                Some(usage_of(31, None)),
            ),
            // vLLM, with spaces as another encoder might have them
            (
                r#"{"usage" : { "prompt_tokens" : 7, "prompt_tokens_details" : { "audio_tokens": null, "cached_tokens" : 0 } }, "prompt_logprobs":null}"#,
                Some(usage_of(7, 0)),
            ),
            (r#"data: {"choices":[{"delta":{"content":"a"}}],"usage":null}"#, None),
            (r#"data: {"choices":[{"delta":{"content":"a"}}]}"#, None),
            // the Responses API
            (
                r#"data: {"type":"response.completed","response":{"id":"x","usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4},"output_tokens":2}}}"#,
                Some(usage_of(9, 4)),
            ),
            // the Messages API, whose input_tokens are not cached
            (
                r#"event: message_start
data: {"type":"message_start","message":{"id":"msg_1","usage":{"input_tokens":5,"cache_read_input_tokens":4,"cache_creation_input_tokens":2,"output_tokens":0}}}"#,
                Some(usage_of(11, 4)),
            ),
            (
                r#"{"type":"message","usage":{"input_tokens":5,"cache_read_input_tokens":null,"output_tokens":3}}"#,
                Some(usage_of(5, None)),
            ),
            // text of a model
            (
                r#"{"content":"{\"usage\":{\"prompt_tokens\":1}}","usage":{"prompt_tokens":2}}"#,
                Some(usage_of(2, None)),
            ),
            // a chunk before the last
            (r#"{"usage":null,"x":{"usage":{"prompt_tokens":2}}}"#, Some(usage_of(2, None))),
            // cut off, or not numbers
            (r#"{"usage":{"prompt_tokens":2"#, None),
            (r#"{"usage":{"prompt_tokens":-1}}"#, None),
            (r#"{"usage":{"prompt_tokens":1e3}}"#, None),
            (r#"{"usage":{"completion_tokens":3}}"#, None),
            (r#"{"usage""#, None),
        ] {
            assert_eq!(of_openai(answer.as_bytes()), usage, "{answer}");
        }
    }

    #[test]
    fn meta_info_of_one_prompt_and_of_several() {
        let one = r#"{"text":"\"meta_info\"","meta_info":{"id":"x","finish_reason":{"type":"stop","matched":"{"},"prompt_tokens":5,"completion_tokens":2,"cached_tokens":3,"e2e_latency":0.1}}"#;
        assert_eq!(of_generate(one.as_bytes()), Some(usage_of(5, 3)));
        let event = format!("data: {one}");
        assert_eq!(of_generate(event.as_bytes()), Some(usage_of(5, 3)));
        assert_eq!(of_generate(format!("[{one}, {one}]").as_bytes()), Some(usage_of(10, 6)));
        let second = event.replace("}}", "},\"index\":1}");
        assert_eq!(of_generate(second.as_bytes()), None, "one prompt of a batch");
        assert_eq!(of_generate(br#"{"text":"x"}"#), None);
    }
}
