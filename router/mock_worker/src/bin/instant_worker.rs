//! A worker that answers every request at once with the same chat completion or the same stream of events, to measure
//! the cost of a router. It uses threads and blocking reads, so that its own cost is small.
//!
//!     instant_worker FIRST_PORT COUNT

use std::{
    env,
    io::{self, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    thread,
};

use mla_mock_worker::raw::{self, Asked, request_length};

const EVENT: &str = "data: {\"id\":\"x\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"word \"}}]}\n\n";
/// Events of a stream, without `[DONE]`.
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
    let [whole, info] = [raw::CHAT, raw::INFO].map(raw::whole);
    stream.set_nodelay(true).expect("a TCP socket");
    let mut buffer = vec![0; MAX_REQUEST];
    let mut filled = 0;
    loop {
        match request_length(&buffer[..filled]) {
            Some(length) if length <= filled => {
                let asked = Asked::of(&buffer[..length]);
                buffer.copy_within(length..filled, 0);
                filled -= length;
                let sent = match asked {
                    Asked::Stream => send_events(&mut stream),
                    Asked::Whole => stream.write_all(whole.as_bytes()),
                    Asked::Info => stream.write_all(info.as_bytes()),
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

/// Writes each event by itself, like an engine with one event a step.
fn send_events(stream: &mut TcpStream) -> io::Result<()> {
    let event = raw::chunk(EVENT);
    stream.write_all(format!("{}{event}", raw::STREAM).as_bytes())?;
    for _ in 1..EVENTS {
        stream.write_all(event.as_bytes())?;
    }
    stream.write_all(raw::DONE.as_bytes())
}
