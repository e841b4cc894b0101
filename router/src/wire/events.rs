//! Splits a stream into server-sent events, however the writes of the worker and the network have cut it.
//!
//! An event ends with a blank line. A frame that is one complete event, the usual case, is passed on without a
//! copy; a torn event is joined by copying. Lines end with LF or CRLF; no engine uses the third ending of the
//! standard, CR.

use bytes::{Bytes, BytesMut};
use memchr::memchr;

/// An incomplete event is buffered up to this size, so that a client never gets half of it. A longer event is
/// passed on in parts, so that an endless line does not grow memory.
const MAX_BUFFERED: usize = 64 << 10;

/// Maximum size of an event.
const MAX_EVENT: usize = 64 << 20;

/// A complete event, or a part of an event that is too long to buffer.
#[derive(Debug, PartialEq, Eq)]
pub struct Piece {
    pub bytes: Bytes,
    /// Whether an event starts with these bytes.
    pub begins: bool,
    /// Whether an event ends with these bytes.
    pub ends: bool,
}

/// The event exceeds the largest size: this is not a stream of events.
#[derive(Debug, PartialEq, Eq)]
pub struct EventTooLong;

/// The state of the splitter.
#[derive(Debug, Default)]
pub struct Events {
    held: BytesMut,
    line: Line,
    /// Bytes of the present event that were passed on in parts.
    passed: usize,
}

/// The content of the incomplete line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Line {
    #[default]
    Nothing,
    CarriageReturn,
    Text,
}

impl Events {
    /// Takes the next piece out of `frame`. `None` when the frame is consumed. Fails if the event is too long.
    pub fn next(&mut self, frame: &mut Bytes) -> Result<Option<Piece>, EventTooLong> {
        if frame.is_empty() {
            return Ok(None);
        }
        let end = self.find_end(frame);
        let new = frame.split_to(end.unwrap_or(frame.len()));
        let ends = end.is_some();
        let size = self.held.len() + new.len();
        if !ends && self.passed == 0 && size <= MAX_BUFFERED {
            self.held.extend_from_slice(&new);
            return Ok(None);
        }
        let begins = self.passed == 0;
        let bytes = if self.held.is_empty() {
            new
        } else {
            self.held.extend_from_slice(&new);
            self.held.split().freeze()
        };
        self.passed = if ends { 0 } else { self.passed + size };
        if self.passed > MAX_EVENT {
            Err(EventTooLong)
        } else {
            Ok(Some(Piece { bytes, begins, ends }))
        }
    }

    /// Takes the buffered start of an incomplete event.
    pub fn rest(&mut self) -> Bytes {
        self.held.split().freeze()
    }

    /// Whether all pieces so far were complete events.
    pub fn is_between_events(&self) -> bool {
        self.passed == 0
    }

    /// Length of the part of `frame` that belongs to the present event, if the event ends in it.
    fn find_end(&mut self, frame: &[u8]) -> Option<usize> {
        let mut at = 0;
        while let Some(length) = memchr(b'\n', &frame[at..]) {
            let line = &frame[at..at + length];
            let blank = match self.line {
                Line::Nothing => matches!(line, b"" | b"\r"),
                Line::CarriageReturn => line.is_empty(),
                Line::Text => false,
            };
            self.line = Line::Nothing;
            at += length + 1;
            if blank {
                return Some(at);
            }
        }
        self.line = match (self.line, &frame[at..]) {
            (before, b"") => before,
            (Line::Nothing, b"\r") => Line::CarriageReturn,
            _ => Line::Text,
        };
        None
    }
}

/// Returns the name of an event, empty without one, and its data.
pub fn parts(event: &[u8]) -> (&[u8], &[u8]) {
    let (name, rest) = match event.strip_prefix(b"event:") {
        Some(named) => {
            named.split_at(memchr::memchr(b'\n', named).map_or(named.len(), |end| end + 1))
        }
        None => (&[][..], event),
    };
    let data = rest.strip_prefix(b"data:").unwrap_or_default();
    (name.trim_ascii(), data.trim_ascii_start())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STREAM: &str = ": hello\n\ndata: {\"a\":\"\u{fc}\u{1f600}\"}\n\nevent: x\r\ndata: 1\r\n\r\n\
                          :mla 0 1,2\ndata: {}\n\n\ndata: a\rb\n\r\ndata: [DONE]\n\n";

    /// The complete events of a stream in these frames.
    fn events<'a>(frames: impl IntoIterator<Item = &'a [u8]>) -> Vec<Bytes> {
        let (mut splitter, mut events) = (Events::default(), Vec::new());
        for frame in frames {
            let mut frame = Bytes::copy_from_slice(frame);
            while let Some(piece) = splitter.next(&mut frame).expect("short events") {
                assert!(piece.begins && piece.ends);
                events.push(piece.bytes);
            }
            assert!(frame.is_empty());
        }
        events
    }

    #[test]
    fn each_event_ends_with_its_blank_line() {
        assert_eq!(
            events([STREAM.as_bytes()]),
            [
                ": hello\n\n",
                "data: {\"a\":\"\u{fc}\u{1f600}\"}\n\n",
                "event: x\r\ndata: 1\r\n\r\n",
                ":mla 0 1,2\ndata: {}\n\n",
                "\n",
                "data: a\rb\n\r\n",
                "data: [DONE]\n\n",
            ]
        );
    }

    #[test]
    fn two_frames_make_the_same_events_wherever_they_are_cut() {
        let whole = events([STREAM.as_bytes()]);
        for cut in 0..=STREAM.len() {
            let (first, second) = STREAM.as_bytes().split_at(cut);
            assert_eq!(events([first, second]), whole, "cut at {cut}");
        }
        assert_eq!(events(STREAM.as_bytes().chunks(1)), whole);
    }

    #[test]
    fn a_frame_that_is_an_event_is_not_copied() {
        let mut frame = Bytes::from_static(b"data: 1\n\n");
        let place = frame.as_ptr();
        let piece = Events::default().next(&mut frame).expect("short").expect("an event");
        assert_eq!(piece.bytes.as_ptr(), place);
    }

    proptest! {
        #[test]
        fn any_stream_in_any_frames(
            stream in proptest::collection::vec(
                prop::sample::select(vec![b'\n', b'\r', b'a', b':', 0xf0, 0x9f]), 0..60),
            sizes in proptest::collection::vec(1..9_usize, 60),
        ) {
            let mut rest = &stream[..];
            let frames = sizes.iter().map_while(|&size| {
                let (frame, behind) = rest.split_at(size.min(rest.len()));
                rest = behind;
                (!frame.is_empty()).then_some(frame)
            });
            let whole = events([&stream[..]]);
            prop_assert_eq!(&events(frames), &whole);
            prop_assert!(stream.starts_with(&whole.concat()));
        }
    }

    #[test]
    fn a_long_event_passes_in_parts_and_what_follows_is_whole() {
        let (mut splitter, mut sizes) = (Events::default(), Vec::new());
        for _ in 0..100 {
            let mut frame = Bytes::from_static(&[b'x'; 10_000]);
            if let Some(piece) = splitter.next(&mut frame).expect("not that long") {
                assert_eq!((piece.begins, piece.ends), (sizes.is_empty(), false));
                assert!(piece.bytes.len() <= MAX_BUFFERED + 10_000);
                assert!(!splitter.is_between_events());
                sizes.push(piece.bytes.len());
            }
        }
        let mut frame = Bytes::from_static(b"x\n\ndata: 1\n\n");
        let last = splitter.next(&mut frame).expect("not that long").expect("the end of the event");
        assert_eq!((last.begins, last.ends, last.bytes.len()), (false, true, 3));
        assert_eq!(sizes.iter().sum::<usize>(), 1_000_000);
        let next = splitter.next(&mut frame).expect("short").expect("an event");
        assert_eq!((next.begins, next.ends), (true, true));
        assert!(splitter.is_between_events());
    }

    #[test]
    fn a_line_without_end_is_no_stream_of_events() {
        let mut splitter = Events::default();
        let chunk = Bytes::from(vec![b'x'; 1 << 20]);
        let outcomes = (0..100).map(|_| splitter.next(&mut chunk.clone()).is_err());
        assert_eq!(outcomes.take_while(|failed| !failed).count(), MAX_EVENT >> 20);
    }
}
