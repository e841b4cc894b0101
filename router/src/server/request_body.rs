//! The body of a request that is being read.

use std::{future::poll_fn, sync::Arc};

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;

use crate::{
    admission::{BodyMemory, MemoryReservation},
    error::Error,
    server::client_stream::ClientStream,
};

/// Maximum number of bytes that are reserved for the client's Content-Length. Beyond it, memory grows with the bytes
/// that arrive.
const MAX_RESERVED: usize = 1 << 20;

/// A body that has not been read from its stream.
#[derive(Clone, Copy)]
pub(super) struct RequestBody<'a>(pub(super) &'a Mutex<ClientStream>);

impl RequestBody<'_> {
    /// Reads the whole body, and reserves memory for it. A body that has arrived with its head, the usual case, is not
    /// copied, and needs no reservation. Fails if it has more than `limit` bytes, is malformed or too slow.
    pub(super) async fn read(
        self,
        limit: usize,
        memory: &Arc<BodyMemory>,
    ) -> Result<(Bytes, Option<MemoryReservation>), Error> {
        let announced = {
            let mut stream = self.0.lock();
            let announced = usize::try_from(stream.announced()).unwrap_or(usize::MAX);
            if announced > limit {
                return Err(Error::PayloadTooLarge { limit });
            }
            if let Some(whole) = stream.take_body() {
                return Ok((whole, None));
            }
            announced
        };
        let mut held = MemoryReservation::new(memory);
        let mut whole = BytesMut::with_capacity(announced.min(MAX_RESERVED));
        held.grow(whole.capacity())?;
        while poll_fn(|cx| self.0.lock().poll_body(&mut whole, cx)).await? {
            if whole.len() > limit {
                return Err(Error::PayloadTooLarge { limit });
            }
            held.grow(whole.capacity())?;
        }
        Ok((whole.freeze(), Some(held)))
    }
}
