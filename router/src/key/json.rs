//! A borrowing scanner for JSON: no tree of values, no copies, no recursion.
//!
//! The data path needs a few fields of a body of up to hundreds of megabytes, in another order than the body has
//! them. So values are skipped at the speed of `memchr`, kept as slices, and read later. The scan is lenient: a
//! malformed body gives an error or a useless key, never a panic. The worker validates the body.

use memchr::{memchr, memchr3};

use super::KeyError;

/// Longest name of the fields that the router reads.
pub(super) const MAX_NAME: usize = 20;

/// A string literal without its quotes, with its escapes.
#[derive(Clone, Copy)]
pub(super) struct Text<'a>(&'a [u8]);

impl<'a> Text<'a> {
    /// The text of `value`, which [`Cursor::value`] has read. `None` if it is not a string.
    pub(super) fn of(value: &'a [u8]) -> Option<Self> {
        Some(Self(value.strip_prefix(b"\"")?.strip_suffix(b"\"")?))
    }

    /// Passes the decoded bytes to `sink`, in as few pieces as the escapes allow.
    pub(super) fn decode(self, mut sink: impl FnMut(&[u8])) -> Result<(), KeyError> {
        let mut rest = self.0;
        let mut literal = 0; // leading bytes of `rest` without escapes
        while !rest.is_empty() {
            // Escapes come in runs if a client escapes all non-ASCII characters.
            if rest.get(literal) != Some(&b'\\') {
                literal += find(b'\\', &rest[literal..]).unwrap_or(rest.len() - literal);
            }
            if literal > 0 {
                sink(&rest[..literal]);
                rest = &rest[literal..];
                literal = 0;
            } else if let Some(b'"' | b'\\' | b'/') = rest.get(1) {
                // Without its backslash the escape is literal text: it joins the text that follows.
                rest = &rest[1..];
                literal = 1;
            } else {
                rest = unescape(rest, &mut sink)?;
            }
        }
        Ok(())
    }

    /// Returns the decoded text, or nothing if it is longer than the name of any known field. `buffer` is used only
    /// for names with escapes.
    pub(super) fn name(self, buffer: &'a mut [u8; MAX_NAME]) -> &'a [u8] {
        if find(b'\\', self.0).is_none() {
            return self.0;
        }
        let mut length = 0;
        let copied = self.decode(|piece| {
            if let Some(place) = buffer.get_mut(length..length + piece.len()) {
                place.copy_from_slice(piece);
            }
            length += piece.len();
        });
        buffer.get(..length).filter(|_| copied.is_ok()).unwrap_or_default()
    }
}

/// Finds `byte` like `memchr`, and faster if it comes soon, like quotes of JSON within JSON, or if `text` is short: the
/// first 32 bytes and the last 7 are searched without a call.
fn find(byte: u8, text: &[u8]) -> Option<usize> {
    const ONES: u64 = u64::from_ne_bytes([0x01; 8]);
    const HIGHS: u64 = u64::from_ne_bytes([0x80; 8]);
    let (words, _) = text.as_chunks::<8>();
    let near = &words[..words.len().min(4)];
    for (index, word) in near.iter().enumerate() {
        // Equal bytes become zero; the lowest zero byte is the first one that borrows.
        let differing = u64::from_le_bytes(*word) ^ (ONES * u64::from(byte));
        let equal = differing.wrapping_sub(ONES) & !differing & HIGHS;
        if equal != 0 {
            return Some(index * 8 + equal.trailing_zeros() as usize / 8);
        }
    }
    let seen = near.len() * 8;
    let rest = &text[seen..];
    let at = if rest.len() < 8 {
        rest.iter().position(|other| *other == byte)
    } else {
        memchr(byte, rest)
    };
    at.map(|at| seen + at)
}

/// Decodes the escape at the start of `text`. Returns the text after it.
fn unescape<'a>(text: &'a [u8], sink: &mut impl FnMut(&[u8])) -> Result<&'a [u8], KeyError> {
    let byte = match text.get(1).ok_or(KeyError::Escape)? {
        b'b' => 0x08,
        b'f' => 0x0c,
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'u' => {
            let (unit, rest) = hex4(&text[2..])?;
            let (code, rest) = match unit {
                0xd800..=0xdbff => {
                    let low = rest.strip_prefix(b"\\u").ok_or(KeyError::Escape)?;
                    let (low, rest) = hex4(low)?;
                    let low = low.checked_sub(0xdc00).filter(|low| *low < 0x400);
                    (0x10000 + ((unit - 0xd800) << 10) + low.ok_or(KeyError::Escape)?, rest)
                }
                _ => (unit, rest),
            };
            let character = char::from_u32(code).ok_or(KeyError::Escape)?;
            sink(character.encode_utf8(&mut [0; 4]).as_bytes());
            return Ok(rest);
        }
        _ => return Err(KeyError::Escape),
    };
    sink(&[byte]);
    Ok(&text[2..])
}

fn hex4(text: &[u8]) -> Result<(u32, &[u8]), KeyError> {
    let (digits, rest) = text.split_at_checked(4).ok_or(KeyError::Escape)?;
    let mut unit = 0;
    for &digit in digits {
        unit = unit << 4 | char::from(digit).to_digit(16).ok_or(KeyError::Escape)?;
    }
    Ok((unit, rest))
}

/// A position in a body.
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// The bytes from `start` to the cursor.
    pub(super) fn since(&self, start: usize) -> &'a [u8] {
        &self.bytes[start..self.at]
    }

    fn malformed(&self) -> KeyError {
        KeyError::Malformed { at: self.at }
    }

    /// Returns the next byte that is not white space, without reading it.
    pub(super) fn peek(&mut self) -> Option<u8> {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.bytes.get(self.at) {
            self.at += 1;
        }
        self.bytes.get(self.at).copied()
    }

    /// Reads `byte` if it is next. Returns whether it was.
    fn take(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, byte: u8) -> Result<(), KeyError> {
        if self.take(byte) { Ok(()) } else { Err(self.malformed()) }
    }

    pub(super) fn string(&mut self) -> Result<Text<'a>, KeyError> {
        self.expect(b'"')?;
        let start = self.at;
        loop {
            let quote = find(b'"', &self.bytes[self.at..]).ok_or_else(|| self.malformed())?;
            self.at += quote + 1;
            // An odd number of backslashes escapes a quote. They are counted backwards from the quote, so that text
            // with many other escapes is scanned at full speed.
            let text = &self.bytes[start..self.at - 1];
            if text.iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 0 {
                return Ok(Text(text));
            }
        }
    }

    /// Reads a token id. `None` unless it has digits only and fits into u32.
    #[inline]
    pub(crate) fn id(&mut self) -> Option<u32> {
        self.peek();
        let rest = &self.bytes[self.at..];
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit());
        let (mut id, mut length) = (0_u64, 0);
        for digit in digits.take(11) {
            id = id * 10 + u64::from(digit - b'0');
            length += 1;
        }
        self.at += length;
        let ends = !matches!(self.bytes.get(self.at), Some(b'0'..=b'9' | b'.' | b'e' | b'E'));
        u32::try_from(id).ok().filter(|_| length > 0 && ends)
    }

    /// Reads a number, `true`, `false` or `null`, without a check.
    pub(super) fn scalar(&mut self) -> Result<&'a [u8], KeyError> {
        self.peek();
        let rest = &self.bytes[self.at..];
        let end = rest.iter().position(
            |b| !matches!(b, b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'+' | b'-' | b'.'),
        );
        match end.unwrap_or(rest.len()) {
            0 => Err(self.malformed()),
            length => {
                self.at += length;
                Ok(&rest[..length])
            }
        }
    }

    /// Reads any value. Returns its bytes.
    pub(super) fn value(&mut self) -> Result<&'a [u8], KeyError> {
        let first = self.peek();
        let start = self.at;
        match first {
            Some(b'"') => drop(self.string()?),
            Some(b'{') => self.skip_nested(b'{', b'}')?,
            Some(b'[') => self.skip_nested(b'[', b']')?,
            _ => drop(self.scalar()?),
        }
        Ok(&self.bytes[start..self.at])
    }

    /// Skips an object or an array. Outside of strings only brackets of its own kind matter, so three needles and a
    /// count are enough for any nesting.
    fn skip_nested(&mut self, open: u8, close: u8) -> Result<(), KeyError> {
        let mut depth = 0_usize;
        loop {
            // Usually one or two bytes lie between two strings: too few for a call.
            let rest = &self.bytes[self.at..];
            let (near, far) = rest.split_at(rest.len().min(4));
            let found = near
                .iter()
                .position(|byte| matches!(byte, b'"') || *byte == open || *byte == close)
                .or_else(|| Some(near.len() + memchr3(b'"', open, close, far)?));
            self.at += found.ok_or_else(|| self.malformed())?;
            match self.bytes[self.at] {
                b'"' => drop(self.string()?),
                byte => {
                    self.at += 1;
                    if byte == open {
                        depth += 1;
                    } else {
                        depth -= 1; // the first byte found is `open`: never below zero
                        if depth == 0 {
                            return Ok(());
                        }
                    }
                }
            }
        }
    }

    /// Calls `field` with each name and value of an object.
    pub(crate) fn object(
        &mut self,
        mut field: impl FnMut(&[u8], &'a [u8]) -> Result<(), KeyError>,
    ) -> Result<(), KeyError> {
        self.expect(b'{')?;
        if self.take(b'}') {
            return Ok(());
        }
        loop {
            let name = self.string()?;
            self.expect(b':')?;
            field(name.name(&mut [0; MAX_NAME]), self.value()?)?;
            if !self.take(b',') {
                return self.expect(b'}');
            }
        }
    }

    /// Calls `item` with the cursor before each value of an array; `item` must read that value.
    pub(super) fn array(
        &mut self,
        mut item: impl FnMut(&mut Self) -> Result<(), KeyError>,
    ) -> Result<(), KeyError> {
        self.expect(b'[')?;
        if self.take(b']') {
            return Ok(());
        }
        loop {
            item(self)?;
            if !self.take(b',') {
                return self.expect(b']');
            }
        }
    }
}

/// Passes a canonical form of `value` to `sink`: without white space and escapes.
pub(super) fn canonical(value: &[u8], mut sink: impl FnMut(&[u8])) -> Result<(), KeyError> {
    let mut cursor = Cursor::new(value);
    while let Some(byte) = cursor.peek() {
        match byte {
            b'"' => {
                sink(b"\"");
                cursor.string()?.decode(&mut sink)?;
                sink(b"\"");
            }
            b'{' | b'}' | b'[' | b']' | b',' | b':' => {
                cursor.at += 1;
                sink(&[byte]);
            }
            _ => sink(cursor.scalar()?),
        }
    }
    Ok(())
}
