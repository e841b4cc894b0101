//! The form of an answer in each of the three contracts, complete and as events.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::{
    engine::{Event, Finish},
    query::{Endpoint, Query},
    tokens::decode,
};

/// The answer to one prompt so far.
#[derive(Debug, Default)]
pub struct Choice {
    pub prompt_tokens: usize,
    pub cached: usize,
    /// All tokens, including those of another worker.
    pub tokens: Vec<u32>,
    /// Number of tokens that were sent.
    pub sent: usize,
    pub finish: Option<Finish>,
    /// Whether the end was sent.
    pub complete: bool,
}

/// The answer to one HTTP request.
#[derive(Debug)]
pub struct Answers {
    pub endpoint: Endpoint,
    pub id: String,
    pub created: u64,
    /// Name of the model, as a JSON string.
    model: String,
    single: bool,
    pub wants_usage: bool,
    /// Whether events have comments with their token ids.
    pub replay: bool,
    pub choices: Vec<Choice>,
}

impl Answers {
    pub fn to(query: &Query, id: String, created: u64) -> Self {
        let choices = query.prompts.iter();
        Self {
            endpoint: query.endpoint,
            id,
            created,
            model: Value::from(query.model.as_str()).to_string(),
            single: query.single,
            wants_usage: query.wants_usage && query.endpoint != Endpoint::Generate,
            replay: false,
            choices: choices
                .map(|prompt| Choice { prompt_tokens: prompt.len(), ..Choice::default() })
                .collect(),
        }
    }

    pub fn add(&mut self, event: Event) {
        let choice = &mut self.choices[event.index];
        choice.tokens.extend(event.token);
        // A continued answer has the count of the first worker.
        choice.cached = choice.cached.max(event.cached).min(choice.prompt_tokens);
        choice.finish = event.finish;
    }

    pub fn prompt_tokens(&self) -> usize {
        self.choices.iter().map(|choice| choice.prompt_tokens).sum()
    }

    pub fn cached_tokens(&self) -> usize {
        self.choices.iter().map(|choice| choice.cached).sum()
    }

    /// The opaque value for a continuation: see [`Answers::from_opaque`].
    pub fn opaque(&self) -> String {
        format!("{}.{}.{}", self.id, self.created, self.cached_tokens())
    }

    /// Reads id, time and cached tokens of another worker's response.
    pub fn from_opaque(opaque: &str) -> Option<(String, u64, usize)> {
        let mut parts = opaque.rsplitn(3, '.');
        let cached = parts.next()?.parse().ok()?;
        let created = parts.next()?.parse().ok()?;
        Some((parts.next()?.to_owned(), created, cached))
    }

    /// The next event of a choice, with all unsent tokens.
    pub fn event(&mut self, index: usize) -> String {
        let choice = &mut self.choices[index];
        let new = &choice.tokens[choice.sent..];
        let first = choice.sent == 0;
        let mut event = String::with_capacity(256);
        let finish = choice.finish.map(Finish::as_str);
        if self.replay && !new.is_empty() {
            let ids: Vec<_> = new.iter().map(u32::to_string).collect();
            let finish = finish.map(|reason| format!(" {reason}")).unwrap_or_default();
            // Writing to a string cannot fail; the same below.
            let _ok = writeln!(event, ":mla {index} {}{finish}", ids.join(","));
        }
        let text = decode(new);
        let Self { id, created, model, .. } = self;
        let reason = finish.map_or_else(|| "null".to_owned(), |reason| format!("\"{reason}\""));
        let _ok = match self.endpoint {
            Endpoint::Chat => {
                let role = if first { r#""role":"assistant","# } else { "" };
                write!(
                    event,
                    r#"data: {{"id":"{id}","object":"chat.completion.chunk","created":{created},"model":{model},"choices":[{{"index":{index},"delta":{{{role}"content":"{text}"}},"logprobs":null,"finish_reason":{reason}}}]}}"#
                )
            }
            Endpoint::Completions => write!(
                event,
                r#"data: {{"id":"{id}","object":"text_completion","created":{created},"model":{model},"choices":[{{"index":{index},"text":"{text}","logprobs":null,"finish_reason":{reason}}}]}}"#
            ),
            Endpoint::Generate => {
                let mut whole = native(&self.id, choice);
                if !self.single {
                    whole["index"] = index.into();
                }
                write!(event, "data: {whole}")
            }
        };
        event.push_str("\n\n");
        choice.sent = choice.tokens.len();
        choice.complete = choice.finish.is_some();
        event
    }

    /// The last event, with the token counts.
    pub fn usage_event(&self) -> String {
        let object = match self.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            _ => "text_completion",
        };
        let Self { id, created, model, .. } = self;
        let usage = self.usage();
        format!(
            r#"data: {{"id":"{id}","object":"{object}","created":{created},"model":{model},"choices":[],"usage":{usage}}}"#
        ) + "\n\n"
    }

    /// The complete answer.
    pub fn whole(&self) -> String {
        let choices = self.choices.iter().enumerate();
        let finish = |choice: &Choice| choice.finish.map(Finish::as_str);
        let (object, choices): (_, Vec<_>) = match self.endpoint {
            Endpoint::Generate => {
                let mut whole: Vec<_> =
                    self.choices.iter().map(|choice| native(&self.id, choice)).collect();
                return if self.single { whole.remove(0) } else { whole.into() }.to_string();
            }
            Endpoint::Chat => (
                "chat.completion",
                choices
                    .map(|(index, choice)| {
                        let message =
                            json!({"role": "assistant", "content": decode(&choice.tokens)});
                        json!({"index": index, "message": message, "logprobs": null,
                               "finish_reason": finish(choice)})
                    })
                    .collect(),
            ),
            Endpoint::Completions => (
                "text_completion",
                choices
                    .map(|(index, choice)| {
                        json!({"index": index, "text": decode(&choice.tokens), "logprobs": null,
                               "finish_reason": finish(choice)})
                    })
                    .collect(),
            ),
        };
        let model: Value = serde_json::from_str(&self.model).expect("contract: it was made so");
        json!({"id": self.id, "object": object, "created": self.created, "model": model,
               "choices": choices, "usage": self.usage()})
        .to_string()
    }

    fn usage(&self) -> Value {
        let prompt = self.prompt_tokens();
        let completion: usize = self.choices.iter().map(|choice| choice.tokens.len()).sum();
        json!({"prompt_tokens": prompt, "completion_tokens": completion,
               "total_tokens": prompt + completion,
               "prompt_tokens_details": {"cached_tokens": self.cached_tokens()}})
    }
}

/// SGLang's form: each event has the whole text so far.
fn native(id: &str, choice: &Choice) -> Value {
    let finish = choice.finish.map(|finish| match finish {
        Finish::Length => json!({"type": "length", "length": choice.tokens.len()}),
        Finish::Stop => json!({"type": "stop", "matched": 0}),
        Finish::Abort => json!({"type": "abort", "message": "Aborted"}),
    });
    json!({"text": decode(&choice.tokens), "output_ids": choice.tokens, "meta_info": {
        "id": id, "finish_reason": finish, "prompt_tokens": choice.prompt_tokens,
        "completion_tokens": choice.tokens.len(), "cached_tokens": choice.cached}})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{settings::Flavour, tokens::encode};

    fn answers(endpoint: Endpoint, body: &str) -> Answers {
        let query = Query::read(endpoint, body.as_bytes(), Flavour::Mla).expect("valid");
        Answers::to(&query, "x".to_owned(), 7)
    }

    fn token(text: &str, finish: Option<Finish>) -> Event {
        Event { index: 0, token: encode(text).next(), cached: 0, finish }
    }

    fn data(event: &str) -> Value {
        let line = event.lines().find_map(|line| line.strip_prefix("data: ")).expect("data");
        serde_json::from_str(line).expect("JSON")
    }

    #[test]
    fn chat_events_have_deltas_and_token_ids() {
        let body = r#"{"model": "m\"", "messages": [{"role": "user", "content": "hi"}]}"#;
        let mut answers = answers(Endpoint::Chat, body);
        answers.replay = true;
        answers.add(token("abc ", None));
        let first = answers.event(0);
        assert_eq!(data(&first)["choices"][0]["delta"]["role"], "assistant");
        assert_eq!(data(&first)["model"], "m\"");
        answers.add(token("def ", None));
        answers.add(token("ghi ", Some(Finish::Length)));
        let last = answers.event(0);
        assert!(last.starts_with(":mla 0 543581540,543778919 length\ndata: "), "{last}");
        let delta = &data(&last)["choices"][0]["delta"];
        assert_eq!(delta, &json!({"content": "def ghi "}));
        assert_eq!(data(&answers.usage_event())["usage"]["completion_tokens"], 3);
    }

    #[test]
    fn complete_answers_are_valid_json() {
        for (endpoint, body, text) in [
            (Endpoint::Chat, r#"{"messages": []}"#, "/choices/0/message/content"),
            (Endpoint::Completions, r#"{"prompt": "abcd"}"#, "/choices/0/text"),
            (Endpoint::Generate, r#"{"text": "abcd"}"#, "/text"),
            (Endpoint::Generate, r#"{"text": ["abcd"]}"#, "/0/text"),
        ] {
            let mut answers = answers(endpoint, body);
            answers.add(token("abc ", Some(Finish::Stop)));
            let whole: Value = serde_json::from_str(&answers.whole()).expect("JSON");
            assert_eq!(whole.pointer(text), Some(&Value::from("abc ")), "{whole}");
        }
    }

    #[test]
    fn continuation_state_round_trips() {
        let mut answers = answers(Endpoint::Completions, r#"{"prompt": "abcd"}"#);
        answers.id = "cmpl-1.5".to_owned();
        let expected = Some(("cmpl-1.5".to_owned(), 7, 0));
        assert_eq!(Answers::from_opaque(&answers.opaque()), expected);
        assert_eq!(Answers::from_opaque("x"), None);
    }
}
