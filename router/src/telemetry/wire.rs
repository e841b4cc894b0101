//! The protobuf encoding that spans need: fields of numbers, bytes and messages.

/// A message under construction.
#[derive(Debug, Default)]
pub(super) struct Message(Vec<u8>);

const VARINT: u64 = 0;
const FIXED_64: u64 = 1;
const BYTES: u64 = 2;

impl Message {
    pub(super) fn number(mut self, field: u64, value: u64) -> Self {
        self.varint(field << 3 | VARINT);
        self.varint(value);
        self
    }

    pub(super) fn fixed(mut self, field: u64, value: u64) -> Self {
        self.varint(field << 3 | FIXED_64);
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(super) fn double(self, field: u64, value: f64) -> Self {
        self.fixed(field, value.to_bits())
    }

    pub(super) fn bytes(mut self, field: u64, value: &[u8]) -> Self {
        self.varint(field << 3 | BYTES);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    pub(super) fn message(self, field: u64, value: &Self) -> Self {
        self.bytes(field, &value.0)
    }

    /// Appends encoded fields.
    pub(super) fn raw(mut self, fields: &[u8]) -> Self {
        self.0.extend_from_slice(fields);
        self
    }

    pub(super) fn finish(self) -> Vec<u8> {
        self.0
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}
