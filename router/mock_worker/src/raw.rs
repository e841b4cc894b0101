//! What engines without an engine answer: bytes that are written as they stand, for load that should cost
//! the engine next to nothing.

/// A chat completion of usual length.
pub const CHAT: &str = r#"{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"An answer of about as many bytes as a short sentence of a model has, so that the response is not empty, and not large either: what is measured is the way."}}]}"#;

/// What every GET is answered with: healthy, and a model as SGLang and vLLM tell of theirs.
pub const INFO: &str = r#"{"object":"list","data":[{"id":"mock","object":"model"}],"model_path":"mock","served_model_name":"mock","is_generation":true}"#;

/// How the response of a stream begins.
pub const STREAM: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

/// How the response of a stream ends.
pub const DONE: &str = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";

/// The response with a JSON body.
pub fn whole(body: &str) -> String {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length";
    format!("{head}: {}\r\n\r\n{body}", body.len())
}

/// One event as a chunk of its response.
pub fn chunk(event: &str) -> String {
    format!("{:x}\r\n{event}\r\n", event.len())
}

/// What is asked for. Bench clients write the field `stream` last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    Info,
    Whole,
    Stream,
}

impl Asked {
    pub fn of(request: &[u8]) -> Self {
        match request {
            _ if request.starts_with(b"GET ") => Self::Info,
            _ if request.ends_with(b"\"stream\":true}") => Self::Stream,
            _ => Self::Whole,
        }
    }
}

/// Head and body of the request at the beginning of `bytes`, once the head is there.
pub fn request_length(bytes: &[u8]) -> Option<usize> {
    let head = memchr::memmem::find(bytes, b"\r\n\r\n")?;
    let text = String::from_utf8_lossy(&bytes[..head]).to_ascii_lowercase();
    let body = text.lines().find_map(|line| line.strip_prefix("content-length:"));
    Some(head + 4 + body.map_or(0, |length| length.trim().parse().expect("a length")))
}
