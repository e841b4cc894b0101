//! Small requests of the router itself to a worker: health, information, admin requests. Their responses are read
//! completely.

use std::time::Instant;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, StatusCode, header};

use super::{Connection, Pool, UpstreamError};

/// Maximum size of such a response.
const RESPONSE_LIMIT: usize = 4 << 20;

/// The user agent of these requests. It identifies them to a worker.
const USER_AGENT: &str = concat!("mla-router/", env!("CARGO_PKG_VERSION"));

/// A request.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    pub method: Method,
    pub path: &'a str,
    pub body: Bytes,
    /// Replaces the `Authorization` of the pool.
    pub authorization: Option<HeaderValue>,
}

impl<'a> Call<'a> {
    pub fn get(path: &'a str) -> Self {
        Self { method: Method::GET, path, body: Bytes::new(), authorization: None }
    }

    /// Sends the request over `connection` if it still works, otherwise over a new one, which replaces it.
    pub async fn over(
        &self,
        connection: &mut Option<Connection>,
        pool: &Pool,
    ) -> Result<(StatusCode, Bytes), UpstreamError> {
        if let Some(mut kept) = connection.take()
            && let Ok(answer) = self.once(&mut kept, pool).await
        {
            *connection = Some(kept);
            return Ok(answer);
        }
        let mut opened = pool.open().await?;
        let answer = self.once(&mut opened, pool).await?;
        *connection = Some(opened);
        Ok(answer)
    }

    /// Sends the request over a connection of the pool.
    pub async fn to(&self, pool: &Pool) -> Result<(StatusCode, Bytes), UpstreamError> {
        let mut connection = pool.checkout(Instant::now());
        let answer = self.over(&mut connection, pool).await;
        if let Some(connection) = connection {
            pool.checkin(connection, Instant::now());
        }
        answer
    }

    async fn once(
        &self,
        connection: &mut Connection,
        pool: &Pool,
    ) -> Result<(StatusCode, Bytes), UpstreamError> {
        let mut request = Request::new(self.body.clone());
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.path.parse().expect("contract: a path that was checked before");
        let headers = request.headers_mut();
        headers.insert(header::HOST, pool.host_header().clone());
        headers.insert(header::USER_AGENT, HeaderValue::from_static(USER_AGENT));
        let authorization = self.authorization.clone().or_else(|| pool.authorization().cloned());
        if let Some(authorization) = authorization {
            headers.insert(header::AUTHORIZATION, authorization);
        }
        if !self.body.is_empty() {
            let json = HeaderValue::from_static("application/json");
            headers.insert(header::CONTENT_TYPE, json);
        }
        let response = connection.send(&(&request).into()).await?;
        Ok((response.status, connection.read(RESPONSE_LIMIT).await?))
    }
}
