//! Tests the routing key of the bodies that clients write, and of malformed ones.

#![forbid(unsafe_code)]

use std::fmt::Write as _;

use mla_router::key::{KeyError, Measure, Route, RouteKey, session_of};
use serde_json::{Value, json};

fn extract(route: Route, body: &Value) -> Result<RouteKey, KeyError> {
    RouteKey::extract(route, body.to_string().as_bytes())
}

fn chat(body: &Value) -> RouteKey {
    extract(Route::ChatCompletions, body).expect("a chat")
}

fn long(word: &str) -> String {
    word.repeat(100)
}

fn body() -> Value {
    json!({
        "model": "m",
        "messages": [{"role": "system", "content": long("rule ")}, {"role": "user", "content": "Hi"}],
    })
}

#[test]
fn cache_separators_share_no_block() {
    let plain = chat(&body());
    let fields = [
        ("model", json!("other")),
        ("lora_path", json!("adapter")),
        ("lora", json!("adapter")),
        ("cache_salt", json!("tenant")),
        ("extra_key", json!("tenant")),
        ("tools", json!([{"type": "function", "function": {"name": "weather"}}])),
    ];
    for (field, value) in fields {
        let mut other = body();
        other[field] = value;
        let other = chat(&other);
        assert!(plain.blocks.iter().all(|block| !other.blocks.contains(block)), "{field}");
        assert_eq!(plain.root == other.root, field == "tools", "{field}");
    }
}

#[test]
fn cache_salt_and_extra_key_separate_together() {
    let root = |salt: &str, extra_key: &str| {
        let mut body = body();
        body["cache_salt"] = json!(salt);
        body["extra_key"] = json!(extra_key);
        chat(&body).root
    };
    assert_eq!(root("a", "b"), root("a", "b"));
    assert_ne!(root("a", "b"), root("a", "c"));
    assert_ne!(root("a", "b"), root("c", "b"));
    assert_ne!(root("a", "b"), root("b", "a"));
}

#[test]
fn tools_are_not_in_the_key_if_tool_choice_is_none() {
    let mut asked = body();
    asked["tools"] = json!([{"type": "function", "function": {"name": "weather"}}]);
    asked["tool_choice"] = json!("none");
    assert_eq!(chat(&asked), chat(&body()));
    asked["tool_choice"] = json!("auto");
    assert_ne!(chat(&asked).blocks, chat(&body()).blocks);
}

#[test]
fn fields_without_effect_on_the_cache_do_not_change_the_key() {
    let mut other = body();
    other["temperature"] = json!(0.5);
    other["cache_salt"] = Value::Null;
    other["tools"] = Value::Null;
    other["messages"][1]["tool_calls"] = Value::Null;
    assert_eq!(chat(&body()), chat(&other));
    other["stream"] = json!(true);
    assert_eq!(RouteKey { stream: true, ..chat(&body()) }, chat(&other));
}

#[test]
fn roles_names_and_tool_calls_are_part_of_the_key() {
    let mut other = body();
    other["messages"][0]["role"] = json!("user");
    assert_ne!(chat(&body()).blocks[0], chat(&other).blocks[0]);
    let mut other = body();
    other["messages"][0]["name"] = json!("Ann");
    assert_ne!(chat(&body()).blocks[0], chat(&other).blocks[0]);
    let call = |arguments: &str| {
        let call =
            json!({"type": "function", "function": {"name": "f", "arguments": long(arguments)}});
        json!({"messages": [{"role": "assistant", "content": null, "tool_calls": [call]}]})
    };
    assert_ne!(chat(&call("f")).blocks[0], chat(&call("g")).blocks[0]);
}

#[test]
fn text_parts_equal_text_and_images_count_by_their_data() {
    let mut parts = body();
    let text = long("rule ");
    parts["messages"][0]["content"] =
        json!([{"type": "text", "text": text[..70]}, {"text": text[70..], "type": "text"}]);
    assert_eq!(chat(&parts), chat(&body()));

    let image = |url: &str| {
        let url = json!({"type": "image_url", "image_url": {"url": url}});
        chat(
            &json!({"messages": [{"role": "user", "content": [url, {"type": "text", "text": long("a")}]}]}),
        )
    };
    let (ours, same, theirs) = (image("data:a/b"), image("data:a/b"), image("data:a/c"));
    assert_eq!(ours, same);
    assert_ne!(ours.blocks[0], theirs.blocks[0]);
    let reordered = format!(
        r#"{{"messages":[{{"content":[{{"image_url":{{"url":"data:a\/b"}},"type":"image_url"}},{{"type":"text","text":"{}"}}],"role":"user"}}]}}"#,
        long("a")
    );
    assert_eq!(RouteKey::extract(Route::ChatCompletions, reordered.as_bytes()), Ok(ours));
}

#[test]
fn bare_prompts_with_other_images_share_no_block() {
    let key = |field: &str, data: Value| {
        let body = json!({"text": long("<image> "), field: data});
        extract(Route::Generate, &body).expect("a prompt")
    };
    let (ours, same) = (key("image_data", json!(["a"])), key("image_data", json!(["a"])));
    assert_eq!(ours, same);
    let others = [
        key("image_data", json!(["b"])),
        key("video_data", json!(["a"])),
        key("image_data", Value::Null),
    ];
    for other in others {
        assert_ne!(ours.root, other.root);
        assert_ne!(ours.blocks[0], other.blocks[0]);
    }
    assert_eq!(ours.measure, Measure::Unknown);
    let bare = extract(Route::Generate, &json!({"text": long("<image> ")})).expect("a prompt");
    assert_eq!(key("image_data", Value::Null), bare);
}

#[test]
fn messages_request_shares_the_blocks_of_the_equal_chat() {
    let messages = |body: &Value| extract(Route::Messages, body).expect("messages");
    let (rule, question) = (long("rule "), long("why "));
    let turn = json!({"role": "user", "content": question});
    let same =
        chat(&json!({"model": "m", "messages": [{"role": "system", "content": rule}, turn]}));
    let cached =
        |text: &str| json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}});
    for system in [json!(rule), json!([cached(&rule)])] {
        for content in [json!(question), json!([cached(&question)])] {
            let turns = json!([{"role": "user", "content": content}]);
            let body = json!({"model": "m", "max_tokens": 9, "system": system, "messages": turns});
            assert_eq!(messages(&body), same, "{body}");
        }
    }
    let body = json!({"model": "m", "system": rule, "messages": [turn]});
    let call = |input: Value| json!({"type": "tool_use", "id": "t1", "name": "f", "input": input});
    let ends = [json!({"a": 1}), json!({"a": 2})].map(|input| {
        let mut longer = body.clone();
        longer["messages"] = json!([turn, {"role": "assistant", "content": [call(input)]}, turn]);
        let key = messages(&longer);
        assert_eq!(key.blocks[..same.blocks.len()], same.blocks);
        key.blocks.last().copied()
    });
    assert_ne!(ends[0], ends[1]);
    let mut other = body.clone();
    other["system"] = json!("another");
    assert_ne!(messages(&other).blocks.first(), same.blocks.first());
}

#[test]
fn responses_request_shares_the_blocks_of_the_equal_chat() {
    let responses = |body: &Value| extract(Route::Responses, body).expect("an input");
    let tools = json!([{"type": "function", "name": "weather"}]);
    let call =
        json!({"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"});
    let output = json!({"type": "function_call_output", "call_id": "c1", "output": long("rain ")});
    let body = |input: Value| json!({"model": "m", "instructions": long("rule "), "tools": tools, "input": input});
    let chat_of =
        |messages: Value| chat(&json!({"model": "m", "tools": tools, "messages": messages}));
    let (system, question) = (json!({"role": "system", "content": long("rule ")}), long("why "));
    let plain = responses(&body(json!(question)));
    let same = chat_of(json!([system, {"role": "user", "content": question}]));
    assert_eq!(plain, same);

    let part = json!({"type": "input_text", "text": question});
    for input in [
        json!([{"role": "user", "content": question}]),
        json!([{"type": "message", "role": "user", "content": [part]}]),
    ] {
        assert_eq!(responses(&body(input)), plain);
    }
    let longer = responses(&body(json!([{"role": "user", "content": question}, call, output])));
    let shared = plain.blocks.len();
    assert_eq!(longer.blocks[..shared], plain.blocks);
    assert!(longer.prompt_len > plain.prompt_len + 500);
    let mut other_call = call.clone();
    other_call["arguments"] = json!("{\"city\": \"Ulm\"}");
    let other =
        responses(&body(json!([{"role": "user", "content": question}, other_call, output])));
    assert_ne!(other.blocks.last(), longer.blocks.last());

    for (field, value) in [
        ("previous_response_id", json!("resp_1")),
        ("conversation", json!({"id": "conv_1"})),
        ("prompt", json!({"id": "pmpt_1"})),
    ] {
        let mut continued = body(json!(question));
        continued[field] = value;
        let continued = responses(&continued);
        assert_ne!(continued.blocks[0], plain.blocks[0], "{field}");
        assert_eq!(continued.measure, Measure::Unknown, "{field}");
    }
}

#[test]
fn only_plain_text_and_ids_are_measured() {
    let measure = |route, body: &Value| extract(route, body).expect("a prompt").measure;
    let image = json!({"type": "image_url", "image_url": {"url": "data:a/b"}});
    for (route, body, expected) in [
        (Route::Completions, json!({"prompt": "a"}), Measure::Text),
        (Route::Completions, json!({"prompt": ["a", "b"]}), Measure::Unknown),
        (Route::Completions, json!({"prompt": ["a"]}), Measure::Text),
        (Route::Completions, json!({"prompt": [1, 2]}), Measure::Ids),
        (Route::Generate, json!({"input_ids": [[1, 2], [3]]}), Measure::Unknown),
        (Route::ChatCompletions, body(), Measure::Text),
        (
            Route::ChatCompletions,
            json!({"messages": [{"role": "user", "content": [image]}]}),
            Measure::Unknown,
        ),
    ] {
        assert_eq!(measure(route, &body), expected, "{body}");
    }
}

#[test]
fn the_body_names_the_session() {
    let session = |user: Value| {
        let mut body = body();
        body["user"] = user;
        chat(&body).session
    };
    assert_eq!(session(Value::Null), None);
    assert!(session(json!("ann")).is_some());
    assert_eq!(session(json!("ann")), session(json!("ann")));
    assert_ne!(session(json!("ann")), session(json!("bob")));
    assert_eq!(session(json!("")), None, "all who have no name would be one");
    assert_ne!(session(json!(1)), session(json!(2)));
    // The header has the same name without quotes and escapes.
    for (body, name) in [
        (r#"{"prompt":"a","user":"ann"}"#, "ann"),
        (r#"{"prompt":"a","user":"\u0061n\u006e"}"#, "ann"),
        (r#"{"prompt":"a","user":"a\"\u00fc"}"#, "a\"ü"),
    ] {
        let key = RouteKey::extract(Route::Completions, body.as_bytes()).expect("a key");
        assert_eq!(key.session, session_of(name.as_bytes()), "{body}");
    }
}

#[test]
fn a_batch_is_keyed_by_its_first_prompt() {
    let (first, second) = (long("first"), long("second"));
    let key = |prompt: Value| {
        extract(Route::Completions, &json!({ "prompt": prompt })).expect("a prompt")
    };
    let (one, batch) = (key(json!(first)), key(json!([first, second])));
    assert_eq!(one.blocks, batch.blocks);
    assert_eq!((one.prompt_len, batch.prompt_len), (500, 500 + 602));

    let (ids, others) = ((0..40).collect::<Vec<u32>>(), vec![7_u32; 9]);
    let (one, batch) = (key(json!(ids)), key(json!([ids, others])));
    assert_eq!((one.blocks.len(), &one.blocks), (2, &batch.blocks));
    assert_eq!((one.prompt_tokens, batch.prompt_tokens), (40, 49));
}

#[test]
fn generate_takes_ids_before_text() {
    let ids: Vec<u32> = (0..64).collect();
    let key = |body: &Value| extract(Route::Generate, body).expect("a prompt");
    let by_ids = key(&json!({"input_ids": ids, "text": "ignored"}));
    assert_eq!(by_ids, key(&json!({"input_ids": ids, "text": null})));
    assert_eq!((by_ids.blocks.len(), by_ids.prompt_len), (4, 64));
    let by_text = key(&json!({"text": long("a"), "input_ids": null}));
    assert_eq!((by_text.blocks.len(), by_text.prompt_len, by_text.prompt_tokens), (1, 100, 25));
}

#[test]
fn the_last_of_equal_fields_wins() {
    let twice = br#"{"prompt":"first","model":"m","prompt":"second"}"#;
    let once = br#"{"prompt":"second","model":"m"}"#;
    assert_eq!(
        RouteKey::extract(Route::Completions, twice),
        RouteKey::extract(Route::Completions, once)
    );
}

#[test]
fn body_without_a_prompt_is_an_error() {
    let cases = [
        (Route::ChatCompletions, json!({}), KeyError::Missing("messages")),
        (Route::ChatCompletions, json!({"messages": null}), KeyError::Missing("messages")),
        (
            Route::ChatCompletions,
            json!({"messages": [{"content": 3}]}),
            KeyError::Unreadable("messages"),
        ),
        (Route::Completions, json!({"text": "a"}), KeyError::Missing("prompt")),
        (Route::Completions, json!({"prompt": []}), KeyError::Unreadable("prompt")),
        (Route::Completions, json!({"prompt": {}}), KeyError::Unreadable("prompt")),
        (Route::Generate, json!({"input_ids": [1, -1]}), KeyError::Unreadable("input_ids")),
        (
            Route::Generate,
            json!({"input_ids": [1, 4_294_967_296_u64]}),
            KeyError::Unreadable("input_ids"),
        ),
        (Route::Generate, json!({"input_ids": [1.5]}), KeyError::Unreadable("input_ids")),
        (Route::Responses, json!({"prompt": "a"}), KeyError::Missing("input")),
        (Route::Responses, json!({"input": 3}), KeyError::Unreadable("input")),
        (Route::Responses, json!({"input": ["a"]}), KeyError::Unreadable("input")),
        (
            Route::Responses,
            json!({"input": "a", "instructions": 1}),
            KeyError::Unreadable("instructions"),
        ),
        (Route::Messages, json!({"system": "a"}), KeyError::Missing("messages")),
        (Route::Messages, json!({"messages": [], "system": 1}), KeyError::Unreadable("system")),
        (Route::Other, json!({"prompt": "a"}), KeyError::NoPrompt),
    ];
    for (route, body, error) in cases {
        assert_eq!(extract(route, &body), Err(error), "{body}");
    }
    for body in
        ["", "[]", "{", r#"{"prompt":"a"#, r#"{"prompt" "a"}"#, r#"{"prompt":}"#, "\u{feff}{}"]
    {
        let key = RouteKey::extract(Route::Completions, body.as_bytes());
        assert!(matches!(key, Err(KeyError::Malformed { .. })), "{body}: {key:?}");
    }
    for escape in [r"\x", r"\u12", r"\ud800", r"\ud800\u0041", r"\udc00", r"\u00zz"] {
        let body = format!(r#"{{"prompt":"{escape}"}}"#);
        let key = RouteKey::extract(Route::Completions, body.as_bytes());
        assert_eq!(key, Err(KeyError::Escape), "{escape}");
    }
}

#[test]
fn deep_and_long_bodies_are_handled() {
    let deep = "[".repeat(100_000);
    for body in [
        format!(r#"{{"prompt":{deep}"#),
        format!(r#"{{"prompt":{deep}{}}}"#, "]".repeat(100_000)),
        format!(r#"{{"messages":[{{"role":"user","content":{deep}{}}}]}}"#, "]".repeat(100_000)),
        format!(r#"{{"messages":[],"tools":{deep}{}}}"#, "]".repeat(100_000)),
    ] {
        for route in [Route::ChatCompletions, Route::Completions] {
            let key = RouteKey::extract(route, body.as_bytes());
            assert!(key.is_err() || route == Route::ChatCompletions);
        }
    }
    // A long run of backslashes: counting them backwards must not become quadratic.
    let slashes = format!(r#"{{"prompt":"{}"}}"#, r#"\\\""#.repeat(100_000));
    let key = RouteKey::extract(Route::Completions, slashes.as_bytes()).expect("a prompt");
    // Blocks end at 4 MB; the length counts all bytes.
    assert_eq!((key.prompt_len, key.blocks.len()), (200_000, 200_000 / 64));
    let huge = json!({"prompt": "x".repeat(16 << 20)});
    let key = extract(Route::Completions, &huge).expect("a prompt");
    assert_eq!((key.prompt_len, key.blocks.len()), (16 << 20, 1 << 16));
}

/// Malformed and hostile bodies: each gives a key or an error, in short time.
#[test]
fn hostile_bodies_cost_no_more_than_their_length() {
    let mut fields = String::new();
    for number in 0..1_000_000 {
        write!(fields, "\"k{number}\":{number},").expect("a string takes all");
    }
    let many = format!("{{{fields}\"prompt\":\"{}\"}}", long("a"));
    let key = RouteKey::extract(Route::Completions, many.as_bytes()).expect("a prompt");
    assert_eq!(key.prompt_len, 100);

    let roles = r#"{"role":"user","content":"a"},"#.repeat(300_000);
    let chats = format!(r#"{{"messages":[{}]}}"#, roles.trim_end_matches(','));
    let key = RouteKey::extract(Route::ChatCompletions, chats.as_bytes()).expect("a prompt");
    assert_eq!(key.prompt_len, 300_000 * 8);

    let controls: Vec<u8> = (0..=0x1f).collect();
    let overlong = [0xc0, 0xaf, 0xe0, 0x80, 0x80, 0xff, 0xfe];
    let rtl = "\u{202e}\u{5e9}\u{300}\u{301}\u{302}".as_bytes();
    for odd in [&controls[..], &overlong, rtl] {
        // Some of these are no JSON. The worker decides on that.
        let body = [br#"{"prompt":""#, &odd.repeat(64)[..], br#""}"#].concat();
        let key = RouteKey::extract(Route::Completions, &body).expect("a prompt");
        assert_eq!(key.blocks.len(), odd.len());
    }
    let body = body().to_string();
    for end in 0..body.len() {
        let key = RouteKey::extract(Route::ChatCompletions, &body.as_bytes()[..end]);
        assert!(key.is_err(), "cut at {end}");
    }
}

#[test]
fn answers_are_counted() {
    for (route, body, answers) in [
        (Route::Completions, json!({"prompt": "a"}), 1),
        (Route::Completions, json!({"prompt": ["a"]}), 1),
        (Route::Completions, json!({"prompt": vec!["a"; 256]}), 256),
        (Route::Completions, json!({"prompt": [1, 2, 3]}), 1),
        (Route::Completions, json!({"prompt": [[1, 2, 3], [4]], "n": 3}), 6),
        (Route::Generate, json!({"text": ["a", ""]}), 2),
        (Route::ChatCompletions, json!({"messages": [], "n": 64}), 64),
        (Route::ChatCompletions, json!({"messages": [], "n": null}), 1),
        (Route::ChatCompletions, json!({"messages": [], "n": 0}), 1),
        (Route::ChatCompletions, json!({"messages": [], "n": "many"}), 1),
        (Route::ChatCompletions, json!({"messages": [], "n": u32::MAX}), 4096),
    ] {
        let key = extract(route, &body).expect("a key");
        assert_eq!(key.more_answers + 1, answers, "{route:?}");
    }
}
