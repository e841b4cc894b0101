//! How much of an answer is read before its client sees anything of it: what breaks off within that
//! much can be asked for again. A stream is read to the end of its first event, a JSON value whole.

use bytes::{Bytes, BytesMut};
use http::response::Parts;
use http_body::Body;
use hyper::body::Incoming;

use super::{Rest, exchange::Trouble, expect::Expect};
use crate::{
    upstream::{Connection, UpstreamError},
    wire::events::Events,
};

/// A JSON value that is longer passes through after so much of it.
const WHOLE: usize = 8 << 20;

/// The beginning of a good answer.
pub(super) struct Beginning {
    pub(super) head: Parts,
    pub(super) first: Bytes,
    /// `None` if `first` is all.
    pub(super) rest: Option<Rest>,
}

/// A body of which something has come.
pub(super) struct Begun {
    pub(super) bytes: Bytes,
    pub(super) ended: bool,
}

impl Begun {
    /// Waits for the first bytes of a body.
    pub(super) async fn read(
        connection: &mut Connection,
        incoming: &mut Incoming,
    ) -> Result<Self, UpstreamError> {
        let first = connection.next_data(incoming).await?;
        let ended = first.is_none() || incoming.is_end_stream();
        Ok(Self { bytes: first.unwrap_or_default(), ended })
    }

    /// Reads on until there is as much as `expect` needs.
    pub(super) async fn read_on(
        self,
        expect: Expect,
        connection: &mut Connection,
        incoming: &mut Incoming,
    ) -> Result<Self, Trouble> {
        match expect {
            Expect::Events(_) => self.event(expect, connection, incoming).await,
            Expect::Json(_) if !self.ended => Ok(self.value(connection, incoming).await?),
            Expect::Json(_) | Expect::Anything => Ok(self),
        }
    }

    /// To the end of the first event, or as much of a long one as [`Events`] holds back.
    async fn event(
        mut self,
        expect: Expect,
        connection: &mut Connection,
        incoming: &mut Incoming,
    ) -> Result<Self, Trouble> {
        let (mut events, mut held) = (Events::default(), BytesMut::new());
        let mut unread = self.bytes.clone();
        let endless = |_| Trouble::Garbage("an event without end");
        // Most often the first frame is the first event, and there is nothing to copy.
        let first = loop {
            if let Some(piece) = events.next(&mut unread).map_err(endless)? {
                break piece;
            }
            if self.ended {
                return Err(Trouble::Garbage("an event stream that ends in its first event"));
            }
            if held.is_empty() {
                held.extend_from_slice(&self.bytes);
            }
            let next = Self::read(connection, incoming).await?;
            held.extend_from_slice(&next.bytes);
            (unread, self.ended) = (next.bytes, next.ended);
        };
        if first.ends {
            expect.is_event(&first.bytes).map_err(Trouble::Garbage)?;
        }
        if !held.is_empty() {
            self.bytes = held.freeze();
        }
        Ok(self)
    }

    /// To the end of the body, or to [`WHOLE`].
    async fn value(
        self,
        connection: &mut Connection,
        incoming: &mut Incoming,
    ) -> Result<Self, UpstreamError> {
        // Most often there is nothing but the end, and then nothing to copy.
        let Some(second) = connection.next_data(incoming).await? else {
            return Ok(Self { ended: true, ..self });
        };
        let announced = usize::try_from(incoming.size_hint().lower()).unwrap_or(WHOLE).min(WHOLE);
        let length = self.bytes.len() + second.len();
        let mut whole = BytesMut::with_capacity(length + announced);
        whole.extend_from_slice(&self.bytes);
        whole.extend_from_slice(&second);
        while whole.len() < WHOLE {
            match connection.next_data(incoming).await? {
                Some(data) => whole.extend_from_slice(&data),
                None => return Ok(Self { bytes: whole.freeze(), ended: true }),
            }
        }
        Ok(Self { bytes: whole.freeze(), ended: incoming.is_end_stream() })
    }
}
