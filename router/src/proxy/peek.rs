//! Reads the start of a response before the client gets any of it. A response that breaks within this part can be
//! retried. The start is the first event of a stream, or a whole JSON value.

use bytes::{Bytes, BytesMut};
use http::response::Parts;
use tokio::time::Instant;

use super::attempt_error::AttemptError;
use crate::{
    engine::expect::Expect,
    upstream::{Connection, UpstreamError},
    wire::events::Events,
};

/// Maximum number of bytes of a JSON value that are read. The rest of a longer value is passed on as it arrives.
const MAX_PEEKED: usize = 8 << 20;

/// The start of a good response.
pub(super) struct PeekedResponse {
    pub(super) head: Box<Parts>,
    pub(super) first: Bytes,
    /// When this start had arrived.
    pub(super) received: Instant,
    /// The connection with the rest of the body; `None` if `first` is the whole body.
    pub(super) rest: Option<Connection>,
}

/// The start of a body.
pub(super) struct PeekedBody {
    pub(super) bytes: Bytes,
    pub(super) ended: bool,
}

impl PeekedBody {
    /// Waits for the first bytes of a body.
    pub(super) async fn read(connection: &mut Connection) -> Result<Self, UpstreamError> {
        let first = connection.next_data().await?;
        let ended = first.is_none() || connection.has_ended();
        Ok(Self { bytes: first.unwrap_or_default(), ended })
    }

    /// Reads on until `expect` can judge the start.
    pub(super) async fn read_start(
        self,
        expect: Expect,
        connection: &mut Connection,
    ) -> Result<Self, AttemptError> {
        match expect {
            Expect::Events(_) => self.event(expect, connection).await,
            Expect::Json(_) if !self.ended => Ok(self.value(connection).await?),
            Expect::Json(_) | Expect::Anything => Ok(self),
        }
    }

    /// Reads to the end of the first event, or as much of a long event as [`Events`] buffers.
    async fn event(
        mut self,
        expect: Expect,
        connection: &mut Connection,
    ) -> Result<Self, AttemptError> {
        let (mut events, mut held) = (Events::default(), BytesMut::new());
        let mut unread = self.bytes.clone();
        let endless = |_| AttemptError::Garbage("an event without end");
        // Usually the first frame is the first event, and nothing is copied.
        let first = loop {
            if let Some(piece) = events.next(&mut unread).map_err(endless)? {
                break piece;
            }
            if self.ended {
                return Err(AttemptError::Garbage("an event stream that ends in its first event"));
            }
            if held.is_empty() {
                held.extend_from_slice(&self.bytes);
            }
            let next = Self::read(connection).await?;
            held.extend_from_slice(&next.bytes);
            (unread, self.ended) = (next.bytes, next.ended);
        };
        if first.ends {
            expect.check_event(&first.bytes).map_err(AttemptError::Garbage)?;
        }
        if !held.is_empty() {
            self.bytes = held.freeze();
        }
        Ok(self)
    }

    /// Reads to the end of the body, or up to [`MAX_PEEKED`] bytes.
    async fn value(self, connection: &mut Connection) -> Result<Self, UpstreamError> {
        // Usually only the end follows, and nothing is copied.
        let Some(second) = connection.next_data().await? else {
            return Ok(Self { ended: true, ..self });
        };
        let announced =
            usize::try_from(connection.size_hint().lower()).unwrap_or(MAX_PEEKED).min(MAX_PEEKED);
        let length = self.bytes.len() + second.len();
        let mut whole = BytesMut::with_capacity(length + announced);
        whole.extend_from_slice(&self.bytes);
        whole.extend_from_slice(&second);
        while whole.len() < MAX_PEEKED {
            match connection.next_data().await? {
                Some(data) => whole.extend_from_slice(&data),
                None => return Ok(Self { bytes: whole.freeze(), ended: true }),
            }
        }
        Ok(Self { bytes: whole.freeze(), ended: connection.has_ended() })
    }
}
