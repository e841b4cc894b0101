//! The tokenizer and the generated text: a function of prompt, position and seed. So all workers give the same
//! answer, and one can continue another's.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::cache::PageHash;

/// Bytes of text in a token. Its id is these bytes in little-endian order.
pub const TOKEN_BYTES: usize = 4;

/// Text as tokens, the last filled up with zeros.
pub fn encode(text: &str) -> impl Iterator<Item = u32> + '_ {
    text.as_bytes().chunks(TOKEN_BYTES).map(|bytes| {
        let mut token = [0; TOKEN_BYTES];
        token[..bytes.len()].copy_from_slice(bytes);
        u32::from_le_bytes(token)
    })
}

/// The text of generated tokens.
pub fn decode(tokens: &[u32]) -> String {
    tokens.iter().flat_map(|token| token.to_le_bytes()).map(char::from).collect()
}

fn bytes(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

/// Hashes of all full pages. `root` covers everything except tokens that must be equal for a shared page.
pub fn page_hashes(tokens: &[u32], page_size: usize, root: u64) -> Vec<PageHash> {
    let mut hash = root;
    let chain = tokens.chunks_exact(page_size).map(|page| {
        hash = xxh3_64_with_seed(&bytes(page), hash);
        hash
    });
    chain.collect()
}

/// The answer to one prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Answer(u64);

impl Answer {
    pub fn to(prompt: &[u32], seed: u64) -> Self {
        Self(xxh3_64_with_seed(&bytes(prompt), seed))
    }

    /// Its token at that position: three letters and a space.
    pub fn token(self, position: usize) -> u32 {
        let mut random = xxh3_64_with_seed(&(position as u64).to_le_bytes(), self.0);
        let mut text = [b' '; TOKEN_BYTES];
        for letter in &mut text[..3] {
            *letter = b'a' + (random % 26) as u8;
            random /= 26;
        }
        u32::from_le_bytes(text)
    }

    /// The position of its natural end.
    pub fn length(self) -> usize {
        16 + (xxh3_64(&self.0.to_le_bytes()) % 112) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_in_the_next_prompt_keeps_its_tokens() {
        let answer = Answer::to(&[1, 2, 3], 0);
        let tokens: Vec<_> = (0..10).map(|position| answer.token(position)).collect();
        assert_eq!(encode(&decode(&tokens)).collect::<Vec<_>>(), tokens);
    }

    #[test]
    fn answers_differ_by_prompt_seed_and_position() {
        let answer = Answer::to(&[1, 2, 3], 0);
        assert_eq!(answer, Answer::to(&[1, 2, 3], 0));
        assert_ne!(answer.token(0), answer.token(1));
        assert_ne!(answer, Answer::to(&[1, 2, 4], 0));
        assert_ne!(answer, Answer::to(&[1, 2, 3], 1));
    }

    #[test]
    fn page_hash_depends_on_all_previous_pages_and_the_root() {
        let one = page_hashes(&[1, 2, 3, 4, 5], 2, 0);
        assert_eq!(one.len(), 2, "the last page is not full");
        assert_eq!(one[0], page_hashes(&[1, 2, 9, 9], 2, 0)[0]);
        assert_ne!(one[1], page_hashes(&[9, 9, 3, 4], 2, 0)[1]);
        assert_ne!(one[0], page_hashes(&[1, 2], 2, 1)[0]);
    }
}
