//! Decodes a chunked body (RFC 9112 section 7.1).

use bytes::{Buf, Bytes};

/// Maximum number of bytes in all extensions and trailers of a body. They are dropped: nobody reads them.
const MAX_DROPPED: usize = 16 << 10;

/// The decoder of one body. It takes bytes as they arrive and keeps none.
#[derive(Debug)]
pub(crate) struct Chunked {
    at: At,
    /// The size of the present chunk so far, then its bytes that have not come.
    left: u64,
    dropped: usize,
}

/// The part of the body to which the next byte belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// The first digit of a size.
    Size,
    MoreSize,
    Extension,
    /// The line feed after a size.
    SizeEnd,
    Data,
    /// The carriage return behind the data.
    DataEnd,
    /// The line feed after the data.
    ChunkEnd,
    /// The first byte of a trailer line, or of the empty line at the end.
    Trailer,
    InTrailer,
    /// The last line feed.
    LastLine,
    End,
}

impl Chunked {
    pub(crate) fn new() -> Self {
        Self { at: At::Size, left: 0, dropped: 0 }
    }

    /// Whether the whole body has been read.
    pub(crate) fn is_complete(&self) -> bool {
        self.at == At::End
    }

    /// Takes the next data out of `unread`. `None` if more bytes are needed, or the body is complete. Fails with the
    /// defect of a malformed body.
    pub(crate) fn next(&mut self, unread: &mut Bytes) -> Result<Option<Bytes>, &'static str> {
        while self.at != At::End {
            let Some(byte) = unread.first().copied() else { break };
            if self.at == At::Data {
                let length = usize::try_from(self.left).unwrap_or(usize::MAX).min(unread.len());
                self.left -= length as u64;
                if self.left == 0 {
                    self.at = At::DataEnd;
                }
                return Ok(Some(unread.split_to(length)));
            }
            self.at = self.after(byte)?;
            unread.advance(1);
        }
        if unread.is_empty() {
            // An empty view would keep the buffer of its read.
            *unread = Bytes::new();
        }
        Ok(None)
    }

    /// The part that follows `byte`, which is no data.
    fn after(&mut self, byte: u8) -> Result<At, &'static str> {
        Ok(match (self.at, byte) {
            (At::Size | At::MoreSize, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                if self.left >> 60 > 0 {
                    return Err("a chunk of more than 2^64 bytes");
                }
                let digit = char::from(byte).to_digit(16).unwrap_or_default();
                self.left = self.left << 4 | u64::from(digit);
                At::MoreSize
            }
            (At::MoreSize, b';' | b' ' | b'\t') => At::Extension,
            (At::MoreSize | At::Extension, b'\r') => At::SizeEnd,
            (At::SizeEnd, b'\n') if self.left == 0 => At::Trailer,
            (At::SizeEnd, b'\n') => At::Data,
            (At::DataEnd, b'\r') => At::ChunkEnd,
            (At::ChunkEnd, b'\n') => At::Size,
            (At::Trailer, b'\r') => At::LastLine,
            (At::InTrailer, b'\n') => At::Trailer,
            (At::LastLine, b'\n') => At::End,
            (At::Extension, b'\n') => return Err("a line feed in a chunk extension"),
            (At::Extension | At::Trailer | At::InTrailer, _) => {
                self.dropped += 1;
                if self.dropped > MAX_DROPPED {
                    return Err("too long chunk extensions or trailers");
                }
                if self.at == At::Extension { At::Extension } else { At::InTrailer }
            }
            (At::Size | At::MoreSize, _) => return Err("a chunk without a size"),
            _ => return Err("a chunk without its end"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes a body that arrives in these parts. Returns its data, and whether it is complete.
    fn decode<'a>(
        parts: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<(Vec<u8>, bool), &'static str> {
        let (mut chunked, mut data) = (Chunked::new(), Vec::new());
        for part in parts {
            let mut unread = Bytes::copy_from_slice(part);
            while let Some(piece) = chunked.next(&mut unread)? {
                assert!(!piece.is_empty());
                data.extend_from_slice(&piece);
            }
            assert!(unread.is_empty() || chunked.is_complete());
        }
        Ok((data, chunked.is_complete()))
    }

    #[test]
    fn any_parts_give_the_same_data() {
        let body = b"3\r\nabc\r\n0A ; x=\"1\"\r\n0123456789\r\n0;y\r\nTrailer: 1\r\nx:2\r\n\r\n";
        let whole = Ok((b"abc0123456789".to_vec(), true));
        assert_eq!(decode([&body[..]]), whole);
        assert_eq!(decode(body.chunks(1)), whole);
        for cut in 0..body.len() {
            let (first, second) = body.split_at(cut);
            assert_eq!(decode([first, second]), whole, "cut at {cut}");
            assert!(!decode([first]).expect("well-formed").1, "cut at {cut}");
        }
    }

    #[test]
    fn data_is_not_copied() {
        let mut unread = Bytes::from_static(b"4\r\nabcd\r\n");
        let place = unread.as_ptr().wrapping_add(3);
        let data = Chunked::new().next(&mut unread).expect("well-formed").expect("data");
        assert_eq!((data.as_ptr(), data.len()), (place, 4));
    }

    #[test]
    fn the_buffer_of_a_read_is_free_after_its_data() {
        let read = Bytes::from(b"4\r\nabcd\r\n".to_vec());
        let (mut unread, mut chunked) = (read.clone(), Chunked::new());
        drop(chunked.next(&mut unread).expect("well-formed").expect("data"));
        assert_eq!(chunked.next(&mut unread), Ok(None));
        assert!(read.is_unique());
    }

    #[test]
    fn bytes_behind_the_end_are_left() {
        let mut unread = Bytes::from_static(b"0\r\n\r\nHTTP/1.1");
        let mut chunked = Chunked::new();
        assert_eq!(chunked.next(&mut unread), Ok(None));
        assert!(chunked.is_complete());
        assert_eq!(unread, "HTTP/1.1");
    }

    #[test]
    fn malformed_bodies_are_refused() {
        let long = format!("1;{}\r\n", "x".repeat(MAX_DROPPED + 1));
        let many = format!("0\r\n{}", "x: y\r\n".repeat(MAX_DROPPED / 4));
        for body in [
            "\r\n",
            "x\r\n",
            "-1\r\n",
            " 1\r\n",
            "1\n",
            "1\rx",
            "1;x\n",
            "1\r\nab\r\n",
            "1\r\na\n",
            "1\r\na\rb",
            "0\r\n\rx",
            "fffffffffffffffff\r\n",
            &long,
            &many,
        ] {
            assert!(decode([body.as_bytes()]).is_err(), "{body:.20?}");
        }
        assert!(decode([&b"ffffffffffffffff\r\n"[..]]).is_ok());
    }
}
