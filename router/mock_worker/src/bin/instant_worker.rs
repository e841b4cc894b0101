//! A worker that answers every request at once with the same chat completion, or the same stream of
//! events, for measuring what a router costs. Threads and blocking reads, so that it costs as little
//! as possible itself.
//!
//!     instant_worker FIRST_PORT COUNT

use std::{
    env,
    io::{self, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    thread,
};

const CHAT: &str = r#"{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"An answer of about as many bytes as a short sentence of a model has, so that the response is not empty, and not large either: what is measured is the way."}}]}"#;
const EVENT: &str = "data: {\"id\":\"x\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"word \"}}]}\n\n";
/// What every GET is answered with: healthy, and a model as SGLang and vLLM tell of theirs.
const INFO: &str = r#"{"object":"list","data":[{"id":"mock","object":"model"}],"model_path":"mock","served_model_name":"mock","is_generation":true}"#;
/// Of a stream, without `[DONE]`.
const EVENTS: usize = 64;
const MAX_REQUEST: usize = 1 << 20;

fn main() {
    let mut arguments = env::args().skip(1).map(|word| word.parse::<u16>().expect("a number"));
    let first = arguments.next().expect("usage: instant_worker FIRST_PORT COUNT");
    let count = arguments.next().expect("usage: instant_worker FIRST_PORT COUNT");
    let listeners: Vec<_> = (first..first + count)
        .map(|port| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).expect("a free port");
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    thread::spawn(move || serve(stream));
                }
            })
        })
        .collect();
    for listener in listeners {
        listener.join().expect("listeners run for ever");
    }
}

/// Answers one request after the other, until the client closes.
fn serve(mut stream: TcpStream) {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length";
    let [whole, info] = [CHAT, INFO].map(|body| format!("{head}: {}\r\n\r\n{body}", body.len()));
    stream.set_nodelay(true).expect("a TCP socket");
    let mut buffer = vec![0; MAX_REQUEST];
    let mut filled = 0;
    loop {
        match request_length(&buffer[..filled]) {
            Some(length) if length <= filled => {
                // Bench clients write this field last.
                let streams = buffer[..length].ends_with(b"\"stream\":true}");
                let asks = buffer.starts_with(b"GET ");
                buffer.copy_within(length..filled, 0);
                filled -= length;
                let sent = if streams {
                    send_events(&mut stream)
                } else {
                    stream.write_all(if asks { &info } else { &whole }.as_bytes())
                };
                if sent.is_err() {
                    return;
                }
            }
            _ => match stream.read(&mut buffer[filled..]) {
                Ok(read) if read > 0 => filled += read,
                _ => return,
            },
        }
    }
}

/// One write an event, as an engine makes one a step.
fn send_events(stream: &mut TcpStream) -> io::Result<()> {
    let chunk = |event: &str| format!("{:x}\r\n{event}\r\n", event.len());
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked";
    stream.write_all(format!("{head}\r\n\r\n{}", chunk(EVENT)).as_bytes())?;
    for _ in 1..EVENTS {
        stream.write_all(chunk(EVENT).as_bytes())?;
    }
    stream.write_all(format!("{}0\r\n\r\n", chunk("data: [DONE]\n\n")).as_bytes())
}

/// Head and body of the request at the beginning of `bytes`, once the head is there.
fn request_length(bytes: &[u8]) -> Option<usize> {
    let head = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    let text = String::from_utf8_lossy(&bytes[..head]).to_ascii_lowercase();
    let body = text.lines().find_map(|line| line.strip_prefix("content-length:"));
    Some(head + 4 + body.map_or(0, |length| length.trim().parse().expect("a length")))
}
