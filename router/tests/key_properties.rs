//! Property tests of the routing key against its definition: the text of the prompt, rendered here in another way,
//! and JSON in as many spellings as the format allows.

#![forbid(unsafe_code)]

use std::fmt::Write as _;

use mla_router::key::{KeyError, Route, RouteKey};
use proptest::prelude::*;
use serde_json::{Value, json};

fn key(route: Route, body: &Value) -> RouteKey {
    RouteKey::extract(route, body.to_string().as_bytes()).expect("the body has a prompt")
}

fn chat(messages: &[(String, String)]) -> Value {
    let message = |(role, content): &(String, String)| json!({"role": role, "content": content});
    json!({"model": "m", "messages": messages.iter().map(message).collect::<Vec<_>>()})
}

/// The byte stream that is cut into blocks.
fn rendered(messages: &[(String, String)]) -> String {
    let message = |(role, content): &(String, String)| format!("\x1e{role}\x1e\x1f{content}");
    messages.iter().map(message).collect()
}

fn shared<T: PartialEq>(ours: &[T], theirs: &[T]) -> usize {
    ours.iter().zip(theirs).take_while(|(a, b)| a == b).count()
}

/// Text with all characters that JSON must or may escape.
fn text() -> impl Strategy<Value = String> {
    "([a-z \"\\\\/\n\t\u{1}\u{7f}äß漢字😀]|[a-z]{20}){0,30}"
}

fn role() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["system", "user", "assistant", "tool"]).prop_map(str::to_owned)
}

fn messages() -> impl Strategy<Value = Vec<(String, String)>> {
    prop::collection::vec((role(), text()), 0..6)
}

/// Writes `value` as JSON. `roll`s choose white space, escapes and the order of fields.
fn write_json(value: &Value, roll: &mut dyn FnMut() -> u8, out: &mut String) {
    let space = |roll: &mut dyn FnMut() -> u8, out: &mut String| {
        out.push_str(["", "", " ", "\n", "\t \r\n"][roll() as usize % 5]);
    };
    space(roll, out);
    match value {
        Value::String(text) => write_string(text, roll, out),
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                out.push_str(if index > 0 { "," } else { "" });
                write_json(item, roll, out);
            }
            out.push(']');
        }
        Value::Object(fields) => {
            out.push('{');
            let mut fields: Vec<_> = fields.iter().collect();
            let turn = roll() as usize % fields.len().max(1);
            fields.rotate_left(turn);
            for (index, (name, value)) in fields.into_iter().enumerate() {
                out.push_str(if index > 0 { "," } else { "" });
                space(roll, out);
                write_string(name, roll, out);
                space(roll, out);
                out.push(':');
                write_json(value, roll, out);
            }
            out.push('}');
        }
        other => out.push_str(&other.to_string()),
    }
    space(roll, out);
}

fn write_string(text: &str, roll: &mut dyn FnMut() -> u8, out: &mut String) {
    out.push('"');
    for character in text.chars() {
        if roll().is_multiple_of(4) {
            for unit in character.encode_utf16(&mut [0; 2]) {
                write!(out, "\\u{unit:04x}").expect("a string takes all");
            }
        } else if character == '/' && roll().is_multiple_of(2) {
            out.push_str("\\/");
        } else {
            let quoted = Value::from(character.to_string()).to_string();
            out.push_str(&quoted[1..quoted.len() - 1]);
        }
    }
    out.push('"');
}

proptest! {
    #[test]
    fn chats_share_the_blocks_of_their_common_prefix(
        common in messages(),
        ours in messages(),
        theirs in messages(),
    ) {
        let ours = [common.clone(), ours].concat();
        let theirs = [common, theirs].concat();
        let (our_key, their_key) = (
            key(Route::ChatCompletions, &chat(&ours)),
            key(Route::ChatCompletions, &chat(&theirs)),
        );
        let (our_text, their_text) = (rendered(&ours), rendered(&theirs));
        let bytes = shared(our_text.as_bytes(), their_text.as_bytes());
        prop_assert_eq!(shared(&our_key.blocks, &their_key.blocks), bytes / 64);
        prop_assert_eq!((our_key.blocks.len(), our_key.prompt_len), (our_text.len() / 64, our_text.len()));
        prop_assert_eq!(our_key.prompt_tokens, our_text.len() as u64 / 4);
    }

    #[test]
    fn prompts_share_the_blocks_of_their_common_prefix(common in text(), ours in text(), theirs in text()) {
        let (ours, theirs) = (format!("{common}{ours}"), format!("{common}{theirs}"));
        let our_key = key(Route::Completions, &json!({"model": "m", "prompt": ours}));
        let their_key = key(Route::Completions, &json!({"model": "m", "prompt": theirs}));
        let bytes = shared(ours.as_bytes(), theirs.as_bytes());
        prop_assert_eq!(shared(&our_key.blocks, &their_key.blocks), bytes / 64);
        prop_assert_eq!(our_key.blocks.len(), ours.len() / 64);
    }

    #[test]
    fn ids_share_the_blocks_of_their_common_prefix(
        common in prop::collection::vec(any::<u32>(), 0..80),
        // A list without ids is no prompt.
        ours in prop::collection::vec(0..3_u32, 1..80),
        theirs in prop::collection::vec(0..3_u32, 1..80),
    ) {
        let (ours, theirs) = ([common.clone(), ours].concat(), [common, theirs].concat());
        let our_key = key(Route::Generate, &json!({"input_ids": ours}));
        let their_key = key(Route::Generate, &json!({"input_ids": theirs}));
        prop_assert_eq!(shared(&our_key.blocks, &their_key.blocks), shared(&ours, &theirs) / 16);
        prop_assert_eq!((our_key.prompt_len, our_key.prompt_tokens), (ours.len(), ours.len() as u64));
    }

    #[test]
    fn json_spelling_does_not_change_the_key(messages in messages(), dice in prop::collection::vec(any::<u8>(), 0..4000)) {
        let mut body = chat(&messages);
        body["stream"] = true.into();
        body["cache_salt"] = "sältz/1".into();
        body["tools"] = json!([{"function": ["näme", [1, -2.5e3, null, {}]]}]);
        body["unknown"] = json!({"prompt": "]}", "deep": [[["\"[{"]]]});
        let mut written = String::new();
        let mut dice = dice.into_iter();
        write_json(&body, &mut || dice.next().unwrap_or(1), &mut written);
        let parsed: Value = serde_json::from_str(&written).expect("the test writes JSON");
        prop_assert_eq!(&parsed, &body);
        let other = RouteKey::extract(Route::ChatCompletions, written.as_bytes());
        prop_assert_eq!(other, Ok(key(Route::ChatCompletions, &body)));
    }

    #[test]
    fn any_bytes_are_handled(
        route in prop::sample::select(vec![Route::ChatCompletions, Route::Completions, Route::Generate, Route::Other]),
        pieces in prop::collection::vec(prop::sample::select(vec![
            "{", "}", "[", "]", ",", ":", "\"", "\\", "\\u", "d83d", "\\ud83d", "0", "99999999999", "-1", "1e5", "true", "null",
            "\"messages\":", "\"prompt\":", "\"text\":", "\"input_ids\":", "\"content\":", "\"role\"", "\"tools\":", "é", " ", "\n",
            "{\"messages\":[{\"role\":\"user\",\"content\":", "{\"prompt\":[", "{\"input_ids\":[",
        ]), 0..40),
        noise in prop::collection::vec(any::<u8>(), 0..8),
    ) {
        let body = [pieces.concat().into_bytes(), noise].concat();
        // Valid JSON must never be refused.
        let key = RouteKey::extract(route, &body);
        if serde_json::from_slice::<Value>(&body).is_ok() {
            prop_assert!(!matches!(key, Err(KeyError::Malformed { .. })) || body[0] != b'{', "{key:?}");
        }
    }
}
