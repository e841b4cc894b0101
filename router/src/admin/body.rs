//! The body of a request to the router itself.

use axum::{
    body::{Bytes, to_bytes},
    extract::{FromRequest, Request},
};

use crate::error::Error;

/// Far more than any of them has to say.
const LIMIT: usize = 1 << 20;

/// A body that fits in memory many times over, whatever `--max-payload-size` allows prompts.
pub(super) struct SmallBody(pub(super) Bytes);

impl<S: Sync> FromRequest<S> for SmallBody {
    type Rejection = Error;

    async fn from_request(request: Request, _: &S) -> Result<Self, Error> {
        let body = to_bytes(request.into_body(), LIMIT).await;
        // The other cause is a client that is gone, which will not read what the error says.
        body.map(Self).map_err(|_| Error::PayloadTooLarge { limit: LIMIT })
    }
}
