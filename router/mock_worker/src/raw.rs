//! Constant responses as bytes, for load generation at a minimal cost of the engine.

/// A chat completion of typical length.
pub const CHAT: &str = r#"{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"An answer of about as many bytes as a short sentence of a model has, so that the response is not empty, and not large either: what is measured is the way."}}]}"#;

/// The response to every GET request: healthy, with a model in the form of SGLang and vLLM.
pub const INFO: &str = r#"{"object":"list","data":[{"id":"mock","object":"model"}],"model_path":"mock","served_model_name":"mock","is_generation":true}"#;

/// The start of the response of a stream.
pub const STREAM: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

/// The end of the response of a stream.
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

/// The requested kind of response. Bench clients write the field `stream` last.
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

/// Returns head and body of the request at the start of `bytes`. `None` until the head is complete.
pub fn request_length(bytes: &[u8]) -> Option<usize> {
    let head = memchr::memmem::find(bytes, b"\r\n\r\n")?;
    let text = String::from_utf8_lossy(&bytes[..head]).to_ascii_lowercase();
    let body = text.lines().find_map(|line| line.strip_prefix("content-length:"));
    Some(head + 4 + body.map_or(0, |length| length.trim().parse().expect("a length")))
}
