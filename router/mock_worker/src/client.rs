//! A minimal HTTP client, for load generators and for tests of bytes.

use std::{
    io::{self, ErrorKind},
    net::SocketAddr,
};

use memchr::memmem;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const READ: usize = 1 << 16;

/// One keep-alive connection.
pub struct Client {
    stream: TcpStream,
    /// Bytes that are read and not consumed.
    buffer: Vec<u8>,
    body: Framing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    Length(usize),
    /// Remaining bytes of the chunk, including the line break after it.
    Chunk(usize),
    ChunkSize,
    UntilClose,
    Ended,
}

/// Status line and fields of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    pub status: u16,
    fields: String,
}

impl Head {
    fn parse(bytes: &[u8]) -> io::Result<Self> {
        let text = String::from_utf8_lossy(bytes);
        let (line, fields) = text.split_once("\r\n").unwrap_or((&text, ""));
        let status = line.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
        let status = status.ok_or_else(|| bad("no status line"))?;
        Ok(Self { status, fields: fields.to_owned() })
    }

    /// The value of a field, by its name in lower case.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.split("\r\n").find_map(|line| {
            let (field, value) = line.split_once(':')?;
            field.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    fn framing(&self) -> io::Result<Framing> {
        if self.field("transfer-encoding").is_some() {
            return Ok(Framing::ChunkSize);
        }
        let Some(length) = self.field("content-length") else {
            return Ok(Framing::UntilClose);
        };
        match length.parse().map_err(|_| bad("no length"))? {
            0 => Ok(Framing::Ended),
            length => Ok(Framing::Length(length)),
        }
    }
}

impl Client {
    pub async fn connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: Vec::with_capacity(READ), body: Framing::Ended })
    }

    /// Sends complete requests, made by [`post`].
    pub async fn send(&mut self, request: &[u8]) -> io::Result<()> {
        self.stream.write_all(request).await
    }

    /// Reads the head of the next response. The body of the previous one must have been read.
    pub async fn head(&mut self) -> io::Result<Head> {
        assert_eq!(self.body, Framing::Ended, "the body before has not been read");
        loop {
            if let Some(end) = memmem::find(&self.buffer, b"\r\n\r\n") {
                let head = Head::parse(&self.buffer[..end])?;
                self.buffer.drain(..end + 4);
                self.body = head.framing()?;
                return Ok(head);
            }
            self.fill().await?;
        }
    }

    /// Appends the next bytes of the body to `body`. Returns false at its end.
    pub async fn more(&mut self, body: &mut Vec<u8>) -> io::Result<bool> {
        loop {
            match self.body {
                Framing::Ended => return Ok(false),
                Framing::ChunkSize => {
                    if let Some(size) = self.take_chunk_size()? {
                        // Also after the last chunk: an empty line ends the body.
                        self.body = Framing::Chunk(size + 2);
                        if size == 0 {
                            self.skip_line().await?;
                            self.body = Framing::Ended;
                        }
                        continue;
                    }
                }
                Framing::Chunk(left) if !self.buffer.is_empty() => {
                    let taken = left.min(self.buffer.len());
                    let content = taken.min(left.saturating_sub(2));
                    body.extend_from_slice(&self.buffer[..content]);
                    self.buffer.drain(..taken);
                    self.body = match left - taken {
                        0 => Framing::ChunkSize,
                        left => Framing::Chunk(left),
                    };
                    if content > 0 {
                        return Ok(true);
                    }
                    continue;
                }
                Framing::Length(left) if !self.buffer.is_empty() => {
                    let taken = left.min(self.buffer.len());
                    body.extend(self.buffer.drain(..taken));
                    self.body = match left - taken {
                        0 => Framing::Ended,
                        left => Framing::Length(left),
                    };
                    return Ok(true);
                }
                Framing::UntilClose if !self.buffer.is_empty() => {
                    body.append(&mut self.buffer);
                    return Ok(true);
                }
                _ => {}
            }
            match self.fill().await {
                Err(error)
                    if self.body == Framing::UntilClose
                        && error.kind() == ErrorKind::UnexpectedEof =>
                {
                    self.body = Framing::Ended;
                }
                filled => filled?,
            }
        }
    }

    /// Reads a complete response.
    pub async fn response(&mut self) -> io::Result<(Head, Vec<u8>)> {
        let head = self.head().await?;
        let mut body = Vec::new();
        while self.more(&mut body).await? {}
        Ok((head, body))
    }

    fn take_chunk_size(&mut self) -> io::Result<Option<usize>> {
        let Some(end) = memmem::find(&self.buffer, b"\r\n") else {
            return Ok(None);
        };
        let digits = std::str::from_utf8(&self.buffer[..end]).ok();
        let size = digits.and_then(|digits| usize::from_str_radix(digits, 16).ok());
        self.buffer.drain(..end + 2);
        size.map(Some).ok_or_else(|| bad("no chunk size"))
    }

    async fn skip_line(&mut self) -> io::Result<()> {
        loop {
            if let Some(end) = memmem::find(&self.buffer, b"\r\n") {
                self.buffer.drain(..end + 2);
                return Ok(());
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> io::Result<()> {
        self.buffer.reserve(READ);
        match self.stream.read_buf(&mut self.buffer).await? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }
}

/// Returns the bytes of a request.
pub fn post(path: &str, fields: &str, body: &str) -> Vec<u8> {
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n{fields}\r\n{body}",
        body.len()
    )
    .into_bytes()
}

fn bad(what: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}
