//! The tokens of an answer that the client has received. Another worker needs them to continue the answer.
//!
//! A worker with a continuable stream puts comment lines before the data of an event, one for each choice with new
//! tokens: `:mla <choice> <id>,<id>,...[ <finish reason>]`. The ids may be missing if there is only a finish
//! reason.

use memchr::memchr;
use smallvec::SmallVec;

/// The start of such a line.
const LINE_PREFIX: &[u8] = b":mla ";

/// Maximum number of ids in a transcript: 4 MB.
const MAX_IDS: usize = 1 << 20;

/// Maximum number of choices: more than any engine accepts.
const MAX_CHOICES: usize = 1024;

/// The token ids delivered so far, by choice.
#[derive(Debug, Default)]
pub(crate) struct Transcript {
    choices: SmallVec<[Choice; 1]>,
    ids: usize,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Choice {
    token_ids: Vec<u32>,
    finish_reason: Option<Box<str>>,
}

/// A malformed line, or too many ids. The stream can no longer be continued.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unusable;

/// Returns the router's lines at the start of an event, without mark and line end, and their length in bytes. The
/// rest of the event is for the client.
pub(crate) fn split(event: &[u8]) -> (impl Iterator<Item = &[u8]>, usize) {
    let mut length = 0;
    while event[length..].starts_with(LINE_PREFIX) {
        length = memchr(b'\n', &event[length..]).map_or(event.len(), |end| length + end + 1);
    }
    let lines = event[..length].split_inclusive(|byte| *byte == b'\n');
    (lines.map(|line| line[LINE_PREFIX.len()..].trim_ascii_end()), length)
}

impl Transcript {
    /// Adds one line. Fails if it is malformed or the transcript is full.
    pub(crate) fn add(&mut self, line: &[u8]) -> Result<(), Unusable> {
        let mut words = line.split(|byte| *byte == b' ');
        let choice = words.next().and_then(number).ok_or(Unusable)? as usize;
        let (ids, reason) = (words.next().unwrap_or_default(), words.next());
        if choice >= MAX_CHOICES || words.next().is_some() {
            return Err(Unusable);
        }
        if choice >= self.choices.len() {
            self.choices.resize_with(choice + 1, Choice::default);
        }
        let choice = &mut self.choices[choice];
        if !ids.is_empty() {
            for id in ids.split(|byte| *byte == b',') {
                choice.token_ids.push(number(id).ok_or(Unusable)?);
                self.ids += 1;
            }
        }
        if let Some(reason) = reason {
            choice.finish_reason = Some(name(reason).ok_or(Unusable)?.into());
        }
        if self.ids > MAX_IDS { Err(Unusable) } else { Ok(()) }
    }

    /// Appends the choices to `out` as a JSON array, in the order of their index.
    pub(crate) fn write_json(&self, out: &mut Vec<u8>) {
        out.push(b'[');
        for (index, choice) in self.choices.iter().enumerate() {
            if index > 0 {
                out.push(b',');
            }
            out.extend_from_slice(b"{\"token_ids\":[");
            for (place, id) in choice.token_ids.iter().enumerate() {
                if place > 0 {
                    out.push(b',');
                }
                out.extend_from_slice(id.to_string().as_bytes());
            }
            out.extend_from_slice(b"],\"finish_reason\":");
            match &choice.finish_reason {
                Some(reason) => out.extend_from_slice(format!("\"{reason}\"").as_bytes()),
                None => out.extend_from_slice(b"null"),
            }
            out.push(b'}');
        }
        out.push(b']');
    }
}

fn number(digits: &[u8]) -> Option<u32> {
    if digits.is_empty() || digits.len() > 10 {
        return None;
    }
    let mut value = 0_u64;
    for digit in digits {
        value = value * 10 + u64::from(char::from(*digit).to_digit(10)?);
    }
    u32::try_from(value).ok()
}

/// Returns a name that needs no escapes in JSON.
fn name(word: &[u8]) -> Option<&str> {
    let plain = word.iter().all(|byte| byte.is_ascii_lowercase() || *byte == b'_');
    std::str::from_utf8(word).ok().filter(|_| plain && (1..=32).contains(&word.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The transcript of a stream, event by event, as JSON.
    fn json(events: &[&str]) -> Result<String, Unusable> {
        let mut transcript = Transcript::default();
        for event in events {
            for line in split(event.as_bytes()).0 {
                transcript.add(line)?;
            }
        }
        let mut out = Vec::new();
        transcript.write_json(&mut out);
        Ok(String::from_utf8(out).expect("ASCII"))
    }

    #[test]
    fn token_ids_are_collected_for_each_choice() {
        assert_eq!(json(&["data: {}\n\n"]).as_deref(), Ok("[]"));
        assert_eq!(
            json(&[
                ":mla 1 7\ndata: {}\n\n",
                ":mla 0 1,2\r\n:mla 1 4294967295 stop\r\ndata: {}\r\n\r\n",
                ":mla 0 3\ndata: {}\n\n",
                ":mla 0  length\ndata: {}\n\n",
            ])
            .as_deref(),
            Ok(concat!(
                r#"[{"token_ids":[1,2,3],"finish_reason":"length"},"#,
                r#"{"token_ids":[7,4294967295],"finish_reason":"stop"}]"#
            ))
        );
        // A choice without tokens so far is empty.
        assert_eq!(
            json(&[":mla 1 5\n"]).as_deref(),
            Ok(concat!(
                r#"[{"token_ids":[],"finish_reason":null},"#,
                r#"{"token_ids":[5],"finish_reason":null}]"#
            ))
        );
    }

    #[test]
    fn the_rest_of_an_event_is_for_the_client() {
        for (event, for_client) in [
            (":mla 0 1\ndata: x\n\n", "data: x\n\n"),
            (":mla 0 1\r\n:mla 1 2\r\ndata: x\r\n\r\n", "data: x\r\n\r\n"),
            ("data: x\n\n", "data: x\n\n"),
            (": ping\n\n", ": ping\n\n"),
            ("data: x\n:mla 0 1\n\n", "data: x\n:mla 0 1\n\n"),
        ] {
            assert_eq!(&event[split(event.as_bytes()).1..], for_client, "{event}");
        }
    }

    #[test]
    fn a_malformed_line_is_refused() {
        for line in [
            "",
            "0 a",
            "x 1",
            "0 1,",
            "0 ,1",
            "0 1 stop more",
            "0 1 \"",
            "0 4294967296",
            "1024 1",
            "0 1 ",
            "-1 1",
            "0 99999999999",
        ] {
            assert_eq!(Transcript::default().add(line.as_bytes()), Err(Unusable), "{line}");
        }
    }

    #[test]
    fn its_size_is_bounded() {
        let mut transcript = Transcript::default();
        let line = format!("0 {}", ["1"; 1000].join(","));
        let lines = (0..2000).map(|_| transcript.add(line.as_bytes()));
        assert_eq!(lines.take_while(Result::is_ok).count() * 1000, MAX_IDS / 1000 * 1000);
    }
}
