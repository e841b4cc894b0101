//! Response bodies: a complete answer or a stream of events, and the faults of both.

use std::{
    collections::VecDeque,
    io,
    pin::Pin,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::{
    answer::Answers,
    engine::Event,
    fault::Kind,
    socket::Spoil,
    state::{Order, State},
};

const DONE: &str = "data: [DONE]\n\n";
const ENGINE_DIED: &str = r#"{"error":{"message":"The engine has died","type":"internal_server_error","param":null,"code":"engine_died"}}"#;

/// The end of an incomplete body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Good,
    /// The connection closes.
    Broken,
    /// No further bytes come, and the connection stays open.
    Never,
    /// Filler bytes without end.
    Endless,
}

pub enum MockBody {
    Parts(Parts),
    Events(Box<Events>),
}

/// A body whose bytes are known.
pub struct Parts {
    left: VecDeque<Bytes>,
    end: End,
    /// The content length; `None` for a chunked body.
    length: Option<u64>,
    /// Spoils the framing of the second part.
    spoil: Option<Spoil>,
    pause: Pause,
}

impl MockBody {
    pub fn whole(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        let length = Some(bytes.len() as u64);
        Self::parts([bytes], End::Good, length)
    }

    /// The first half of `bytes`, then this end.
    pub fn half(bytes: impl Into<Bytes>, end: End) -> Self {
        let mut bytes = bytes.into();
        let length = bytes.len() as u64;
        bytes.truncate(bytes.len() / 2);
        Self::parts([bytes], end, Some(length))
    }

    /// Two chunks; the size of the second one is unreadable.
    pub fn spoiled(bytes: impl Into<Bytes>, spoil: Spoil) -> Self {
        let mut bytes = bytes.into();
        let rest = bytes.split_off(bytes.len() / 2);
        match Self::parts([bytes, rest], End::Good, None) {
            Self::Parts(parts) => Self::Parts(Parts { spoil: Some(spoil), ..parts }),
            events @ Self::Events(_) => events,
        }
    }

    pub fn endless(beginning: &'static str) -> Self {
        Self::parts([Bytes::from_static(beginning.as_bytes())], End::Endless, None)
    }

    fn parts<const N: usize>(parts: [Bytes; N], end: End, length: Option<u64>) -> Self {
        let left = parts.into_iter().filter(|part| !part.is_empty()).collect();
        Self::Parts(Parts { left, end, length, spoil: None, pause: Pause::default() })
    }
}

/// The error for a request whose engine is gone.
pub fn engine_died() -> &'static str {
    ENGINE_DIED
}

impl Parts {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        let spoils = self.spoil.as_ref().filter(|_| self.left.len() == 1);
        let breaks = self.left.is_empty() && self.end == End::Broken;
        if (spoils.is_some() || breaks) && self.pause.is_due(cx) {
            return Poll::Pending;
        }
        if let Some(spoil) = spoils {
            spoil.store(true, Ordering::Relaxed);
        }
        match (self.left.pop_front(), self.end) {
            (Some(part), _) => Poll::Ready(Some(Ok(part))),
            (None, End::Good) => Poll::Ready(None),
            (None, End::Broken) => Poll::Ready(Some(Err(io::Error::other("told to break")))),
            (None, End::Never) => Poll::Pending,
            (None, End::Endless) => Poll::Ready(Some(Ok(Bytes::from_static(&[b'x'; 1 << 14])))),
        }
    }
}

/// A stream of events from the engine.
pub struct Events {
    pub state: Arc<State>,
    pub answers: Answers,
    pub events: UnboundedReceiver<Event>,
    /// The first event, if the head had to wait for it.
    pub first: Option<Event>,
    pub fault: Kind,
    pub spoil: Spoil,
    /// Number of tokens sent.
    sent: usize,
    ended: bool,
    pause: Pause,
}

impl Events {
    pub fn new(
        state: Arc<State>,
        answers: Answers,
        events: UnboundedReceiver<Event>,
        fault: Kind,
        spoil: Spoil,
    ) -> Self {
        let (first, sent, ended, pause) = (None, 0, false, Pause::default());
        Self { state, answers, events, first, fault, spoil, sent, ended, pause }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if let Some(struck) = self.strike(cx) {
            return struck;
        }
        while !self.answers.choices.iter().all(|choice| choice.complete) {
            let event = match self.first.take() {
                Some(event) => Some(event),
                None => std::task::ready!(self.events.poll_recv(cx)),
            };
            let Some(event) = event else {
                return Poll::Ready(Some(Err(io::Error::other("the engine has restarted"))));
            };
            self.answers.add(event);
            let choice = &self.answers.choices[event.index];
            let new = choice.tokens.len() - choice.sent;
            let enough = self.state.settings.stream_interval;
            if new >= enough || choice.sent == 0 || choice.finish.is_some() {
                self.sent += new;
                let frame = self.answers.event(event.index);
                return Poll::Ready(Some(Ok(frame.into())));
            }
        }
        self.ended = true;
        Poll::Ready(Some(Ok(self.last().into())))
    }

    fn last(&mut self) -> String {
        let mut last = String::new();
        if self.answers.wants_usage {
            last += &self.answers.usage_event();
        }
        if self.fault != Kind::NoDone {
            last += DONE;
        }
        if self.fault == Kind::TokensAfterDone {
            last += &self.answers.event(0);
        }
        last
    }

    /// Applies the fault to the next frame, if it is due.
    fn strike(&mut self, cx: &mut Context<'_>) -> Option<Poll<Option<io::Result<Bytes>>>> {
        let (Kind::Freeze { after_tokens }
        | Kind::Break { after_tokens }
        | Kind::EngineDied { after_tokens }
        | Kind::BadChunking { after_tokens }
        | Kind::Die { after_tokens: Some(after_tokens) }) = self.fault
        else {
            return None;
        };
        if self.sent < after_tokens || self.pause.is_due(cx) {
            return (self.sent >= after_tokens).then_some(Poll::Pending);
        }
        match self.fault {
            Kind::Freeze { .. } => return Some(Poll::Pending),
            Kind::EngineDied { .. } => {
                self.ended = true;
                return Some(Poll::Ready(Some(Ok(format!("data: {ENGINE_DIED}\n\n").into()))));
            }
            Kind::BadChunking { .. } => {
                self.spoil.store(true, Ordering::Relaxed);
                self.fault = Kind::None;
                return None;
            }
            Kind::Die { .. } => self.state.order(Order::Die),
            _ => {}
        }
        Some(Poll::Ready(Some(Err(io::Error::other("told to break")))))
    }
}

/// Yields once, so that earlier bytes leave the server's buffer.
#[derive(Default)]
struct Pause(bool);

impl Pause {
    fn is_due(&mut self, cx: &mut Context<'_>) -> bool {
        let due = !std::mem::replace(&mut self.0, true);
        if due {
            cx.waker().wake_by_ref();
        }
        due
    }
}

impl Body for MockBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let polled = match self.get_mut() {
            Self::Parts(parts) => parts.poll(cx),
            Self::Events(events) => events.poll(cx),
        };
        polled.map(|part| part.map(|part| part.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Parts(Parts { left, end: End::Good, .. }) if left.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Parts(Parts { length: Some(length), .. }) => SizeHint::with_exact(*length),
            _ => SizeHint::default(),
        }
    }
}
