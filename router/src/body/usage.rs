//! Finds in an answer how long its prompt was and how much of it was cached, without parsing the answer.
//!
//! OpenAI's `usage` (SGLang, vLLM, ours) and the `meta_info` of SGLang's `/generate`. In generated text
//! the names cannot be mistaken for these: a quote within a JSON string has a backslash before it.

use std::sync::LazyLock;

use http::HeaderMap;
use memchr::memmem::{self, Finder};

use crate::{
    correct::Usage,
    endpoint::Endpoint,
    fleet::worker::Booking,
    key::json::Cursor,
    proxy::Job,
    wire::headers::{CACHED_TOKENS, PROMPT_TOKENS},
};

/// The requests of all routers that the worker has.
const REQUESTS: &str = "x-mla-requests";

/// Where an answer says it.
type Find = fn(&[u8]) -> Option<Usage>;

/// Reads one answer until it has told what the router wants to know.
#[derive(Debug, Default)]
pub struct Reader {
    find: Option<Find>,
}

impl Reader {
    /// Begins with the head of the response.
    pub fn new(job: &Job, headers: &HeaderMap, booking: &mut Booking) -> Self {
        let number = |name| headers.get(name)?.to_str().ok()?.parse::<u64>().ok();
        if let Some(requests) = number(REQUESTS) {
            booking.worker().has_requests(u32::try_from(requests).unwrap_or(u32::MAX));
        }
        let find: Find = match job.endpoint {
            _ if job.key.is_none() => return Self::default(),
            Endpoint::Generate => of_generate,
            _ => of_openai,
        };
        let mut reader = Self { find: Some(find) };
        let told =
            Usage { prompt_tokens: number(PROMPT_TOKENS), cached_tokens: number(CACHED_TOKENS) };
        if told.cached_tokens.is_some() {
            reader.tell(job, booking, told);
        }
        reader
    }

    /// Looks at an event, or at a whole body.
    pub fn look(&mut self, job: &Job, booking: &mut Booking, json: &[u8]) {
        if let Some(told) = self.find.and_then(|find| find(json)) {
            self.tell(job, booking, told);
        }
    }

    /// The answer is whole.
    pub fn ends(&mut self, booking: &Booking) {
        if self.find.take().is_some() {
            booking.worker().counters.unreported.increment();
        }
    }

    /// What comes from now on is another worker's.
    pub fn close(&mut self) {
        self.find = None;
    }

    fn tell(&mut self, job: &Job, booking: &mut Booking, told: Usage) {
        if let Some(key) = &job.key {
            job.router.learn(key, booking, told);
        }
        if let Some(journal) = &job.journal {
            journal.usage(told.prompt_tokens, told.cached_tokens);
        }
        if told.cached_tokens.is_some() {
            self.close();
        }
    }
}

static USAGE: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"\"usage\""));
static META_INFO: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"\"meta_info\""));

/// The `usage` of an event or of a whole body.
pub fn of_openai(json: &[u8]) -> Option<Usage> {
    // A chunk of vLLM's or SGLang's may say `null` or leave it out; the last one says it.
    USAGE.find_iter(json).find_map(|at| object_after(&json[at + USAGE.needle().len()..]))
}

/// The `meta_info` of an event or of a whole body; of a batch's body their sum. An event of a batch
/// tells of one prompt alone, which is no word on the request.
pub fn of_generate(json: &[u8]) -> Option<Usage> {
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

/// Nothing, unless both are known.
fn plus(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    one.zip(other).map(|(one, other)| one + other)
}

/// Reads the object behind a name and its colon.
fn object_after(rest: &[u8]) -> Option<Usage> {
    let value = rest.trim_ascii_start().strip_prefix(b":")?;
    let (mut prompt, mut cached) = (None, None);
    let read = Cursor::new(value).object(|name, value| {
        match name {
            // The Responses API has names of its own.
            b"prompt_tokens" | b"input_tokens" => prompt = Cursor::new(value).id(),
            b"cached_tokens" => cached = Cursor::new(value).id(),
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
    let usage =
        Usage { prompt_tokens: prompt.map(u64::from), cached_tokens: cached.map(u64::from) };
    (usage != Usage::default()).then_some(usage)
}

/// Whether an event of `/generate` stands for the whole request: those of a batch carry an index,
/// which comes after the `meta_info`.
fn is_single(rest: &[u8]) -> bool {
    memmem::find(rest, b"\"index\":").is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(prompt_tokens: u64, cached_tokens: impl Into<Option<u64>>) -> Usage {
        Usage { prompt_tokens: Some(prompt_tokens), cached_tokens: cached_tokens.into() }
    }

    #[test]
    fn usage_of_every_engine() {
        for (answer, usage) in [
            // SGLang 0.5, a body and the last chunk with --enable-cache-report
            (
                r#"{"id":"x","choices":[],"usage":{"prompt_tokens":31,"total_tokens":41,"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":16},"reasoning_tokens":0},"metadata":{"weight_version":"default"}}"#,
                Some(told(31, 16)),
            ),
            // and without
            (
                r#"data: {"choices":[],"usage":{"prompt_tokens":31,"total_tokens":41,"completion_tokens":10,"prompt_tokens_details":null}}"#,
                Some(told(31, None)),
            ),
            // vLLM, with spaces as another encoder might have them
            (
                r#"{"usage" : { "prompt_tokens" : 7, "prompt_tokens_details" : { "audio_tokens": null, "cached_tokens" : 0 } }, "prompt_logprobs":null}"#,
                Some(told(7, 0)),
            ),
            (r#"data: {"choices":[{"delta":{"content":"a"}}],"usage":null}"#, None),
            (r#"data: {"choices":[{"delta":{"content":"a"}}]}"#, None),
            // the Responses API
            (
                r#"data: {"type":"response.completed","response":{"id":"x","usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4},"output_tokens":2}}}"#,
                Some(told(9, 4)),
            ),
            // what a model writes
            (
                r#"{"content":"{\"usage\":{\"prompt_tokens\":1}}","usage":{"prompt_tokens":2}}"#,
                Some(told(2, None)),
            ),
            // a chunk before the last
            (r#"{"usage":null,"x":{"usage":{"prompt_tokens":2}}}"#, Some(told(2, None))),
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
        assert_eq!(of_generate(one.as_bytes()), Some(told(5, 3)));
        let event = format!("data: {one}");
        assert_eq!(of_generate(event.as_bytes()), Some(told(5, 3)));
        assert_eq!(of_generate(format!("[{one}, {one}]").as_bytes()), Some(told(10, 6)));
        let second = event.replace("}}", "},\"index\":1}");
        assert_eq!(of_generate(second.as_bytes()), None, "one prompt of a batch");
        assert_eq!(of_generate(br#"{"text":"x"}"#), None);
    }
}
