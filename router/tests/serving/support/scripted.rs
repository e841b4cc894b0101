//! The body of a scripted reply, which reports when it is dropped before its end.

use std::{
    collections::VecDeque,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame};
use tokio::sync::mpsc;

use super::worker::{ENDLESS_FRAME, Event, Then};

pub(super) enum Source {
    Whole(Bytes),
    Live(mpsc::UnboundedReceiver<Bytes>),
    Endless(Arc<AtomicUsize>),
    Broken(VecDeque<Bytes>),
    Stream {
        frames: VecDeque<Bytes>,
        then: Then,
        /// hyper has had a turn to send them.
        out: bool,
    },
}

pub(super) struct ScriptedBody {
    pub(super) source: Source,
    pub(super) unfinished: Unfinished,
}

impl Body for ScriptedBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let next = match &mut self.source {
            Source::Whole(body) if body.is_empty() => None,
            Source::Whole(body) => Some(std::mem::take(body)),
            Source::Live(frames) => std::task::ready!(frames.poll_recv(cx)),
            Source::Endless(taken) => {
                taken.fetch_add(1, Ordering::Relaxed);
                Some(Bytes::from_static(&[b'x'; ENDLESS_FRAME]))
            }
            Source::Stream { frames, then, out } => match (frames.pop_front(), then) {
                (Some(frame), _) => Some(frame),
                (None, Then::End) => None,
                (None, Then::Break) if *out => {
                    self.unfinished.done();
                    return Poll::Ready(Some(Err(io::Error::other("scripted"))));
                }
                (None, Then::Break) => {
                    *out = true;
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                (None, Then::Silence) => return Poll::Pending,
            },
            Source::Broken(frames) => {
                let frame = frames.pop_front();
                if frame.is_none() {
                    self.unfinished.done();
                    return Poll::Ready(Some(Err(io::Error::other("scripted"))));
                }
                frame
            }
        };
        if next.is_none() || self.is_end_stream() {
            self.unfinished.done();
        }
        Poll::Ready(next.map(|data| Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.source, Source::Whole(body) if body.is_empty())
    }

    fn size_hint(&self) -> http_body::SizeHint {
        match &self.source {
            Source::Whole(body) => http_body::SizeHint::with_exact(body.len() as u64),
            _ => http_body::SizeHint::default(),
        }
    }
}

/// Tells of an abort when it is dropped before it is done.
pub(super) struct Unfinished(pub(super) Option<mpsc::UnboundedSender<Event>>);

impl Unfinished {
    pub(super) fn done(&mut self) {
        self.0 = None;
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(events) = self.0.take() {
            let _told = events.send(Event::Aborted);
        }
    }
}
